"""Measures how many healthy steps a NormGuard skips: the table of docs/watching.md.

    PYTHONPATH=. python benchmarks/norm_guard_skips.py  # half a minute

Gradient norms are drawn from a log-normal distribution, with another standard deviation of the
logarithm in each row. All batches are healthy, so every skip is a false alarm.
"""

from __future__ import annotations

import torch

from amp_ext.optim import SGD, NormGuard
from amp_ext.text_table import format_table

WIDTHS = (0.3, 0.5, 0.8)
SIGMA_FACTORS = (4.0, 6.0)
STEPS = 100_000


def share_skipped(width: float, sigma_factor: float, steps: int = STEPS) -> float:
    """Returns the fraction of steps skipped after the warm-up; log-norms have std ``width``."""
    generator = torch.Generator().manual_seed(0)
    norms = (width * torch.randn(steps, generator=generator)).exp()
    param = torch.nn.Parameter(torch.zeros(()))
    guard = NormGuard(sigma_factor)
    optimizer = SGD([param], lr=0.0, norm_guard=guard)
    for norm in norms:
        param.grad = norm
        optimizer.step()
    return guard.stats(wait=True).outliers / (steps - guard.options["warmup_steps"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = [["width", *(f"{factor:g} deviations" for factor in SIGMA_FACTORS)]]
    for width in WIDTHS:
        shares = [share_skipped(width, factor) for factor in SIGMA_FACTORS]
        table.append([f"{width}", *(f"{share:.2%}" for share in shares)])
    print(format_table(table))
