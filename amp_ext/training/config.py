"""What a mixed-precision training is set to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from amp_ext.plain_numbers import is_count, is_number, plain
from amp_ext.training.scaler import SMALLEST_SCALE

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """Settings of a :class:`~amp_ext.training.MixedPrecisionTrainer`; checked when made.

    Attributes:
        precision: What the model computes in: "bf16", "fp16" (with a loss scale) or "fp32".
        initial_loss_scale: Loss scale of the first step. This and the next four are for fp16.
        growth_interval: Clean steps until the loss scale grows.
        growth_factor: Factor of growth, above 1.
        backoff_factor: Factor after an overflow, between 0 and 1.
        min_scale: Limit below which the loss scale does not fall, or None.
        max_grad_norm: Norm to keep all unscaled gradients together below, 0 or more; ``math.inf``
            measures and clips nothing, None does neither.
        gradient_accumulation_steps: Batches for each step of the optimizer, 1 or more.

    Raises:
        ValueError: If a setting is out of range.
    """

    precision: Precision = "bf16"
    initial_loss_scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float | None = SMALLEST_SCALE
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        """Checks every setting, and takes numbers of numpy as those of Python."""
        for each in fields(self):
            object.__setattr__(self, each.name, plain(getattr(self, each.name)))
        for name, fits, wanted in self._checks():
            if not fits:
                raise ValueError(
                    f"MixedPrecisionConfig: {name} must be {wanted}, got {getattr(self, name)!r}"
                )

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yields each setting with whether it fits and what is wanted."""
        scale = self.initial_loss_scale
        is_text = isinstance(self.precision, str)
        yield "precision", is_text and self.precision in DTYPES, "'fp32', 'bf16' or 'fp16'"
        fits = _is_positive(scale) and scale <= torch.finfo(torch.float32).max
        yield "initial_loss_scale", fits, "positive and finite in float32"
        yield "growth_interval", is_count(self.growth_interval), "an int of 1 or more"
        growth = self.growth_factor
        yield "growth_factor", _is_positive(growth) and growth > 1, "above 1 and finite"
        backoff = self.backoff_factor
        yield "backoff_factor", _is_positive(backoff) and backoff < 1, "between 0 and 1"
        low = self.min_scale
        fits = low is None or (_is_positive(low) and low <= scale)
        yield "min_scale", fits, f"positive and at most initial_loss_scale ({scale}), or None"
        norm = self.max_grad_norm
        yield (
            "max_grad_norm",
            norm is None or (is_number(norm) and norm >= 0),
            "0 or more, or None",
        )
        steps = self.gradient_accumulation_steps
        yield "gradient_accumulation_steps", is_count(steps), "an int of 1 or more"

    @property
    def dtype(self) -> torch.dtype:
        """The precision as torch names it."""
        return DTYPES[self.precision]

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients in this precision vanish or overflow without a loss scale."""
        return self.precision == "fp16"


def _is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf
