"""The rules of a guard of norms in Python, and norms of a run to judge."""

from __future__ import annotations

import dataclasses
import math

import torch

from harness.edge_shapes import INF, NAN


@dataclasses.dataclass
class GuardRules:
    """The rules of a guard, in Python."""

    sigma_factor: float = 6.0
    window: int = 128
    warmup_steps: int = 64
    max_norm: float = INF
    patience: int = 16
    entered: int = 0
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    in_row: int = 0

    def limit_of_statistics(self) -> float:
        if self.entered < self.warmup_steps:
            return INF
        return self.mean + self.sigma_factor * max(math.sqrt(self.variance), 0.01 * self.mean)

    def limit(self) -> float:
        yields = self.in_row + 1 >= self.patience
        return min(self.max_norm, INF if yields else self.limit_of_statistics())

    def takes(self, norm: float) -> bool:
        """Judges a finite norm, and lets it enter if it is no outlier."""
        if norm > self.limit():
            self.in_row += norm <= self.max_norm
            return False
        if norm > self.limit_of_statistics():
            self.variance *= (norm / self.mean) ** 2
            self.mean, self.count = norm, 1
        else:
            self.count += 1
            weight = max(2 / (self.window + 1), 1 / self.count)
            difference = norm - self.mean
            self.mean += weight * difference
            self.variance = (1 - weight) * (self.variance + weight * difference**2)
        self.entered += 1
        self.in_row = 0
        return True


def norms_of_a_run(count: int) -> list[float | None]:
    """Log-normal norms with jumps, changes of the level, a quiet stretch, NaN, and none at all."""
    torch.manual_seed(0)
    norms = torch.randn(count, dtype=torch.float64).mul(0.4).exp()
    quiet = slice(count // 2, count // 2 + count // 10)
    norms[quiet] = 1.0 + 1e-6 * torch.rand(quiet.stop - quiet.start, dtype=torch.float64)
    norms[count // 4 :] *= 20.0
    norms[count * 3 // 4 :] /= 50.0
    jumps = torch.rand(count) < 0.02
    norms[jumps] *= 15.0
    kinds = torch.rand(count).tolist()
    return [
        NAN if kind < 0.01 else None if kind < 0.02 else norm
        for norm, kind in zip(norms.tolist(), kinds, strict=True)
    ]
