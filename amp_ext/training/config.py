"""The settings of mixed-precision training, and the gradient scaler for fp16."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from amp_ext.plain_numbers import is_count, is_number, plain
from amp_ext.scaler import GradScaler

#: Lower limit of the loss scale, at which only gradients above about 2**32 overflow in float16.
SMALLEST_SCALE = 2.0**-16
Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[Any, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """Settings of a :class:`~amp_ext.training.MixedPrecisionTrainer`.

    Attributes:
        precision: Precision of the model's computations: "bf16", "fp16" (with a loss scale) or
            "fp32".
        initial_loss_scale: Loss scale of the first step. It and the next four settings apply to
            fp16, and the :class:`~amp_ext.GradScaler` checks them.
        growth_interval: Number of steps without an overflow after which the loss scale grows.
        growth_factor: Factor of the loss scale when it grows, above 1.
        backoff_factor: Factor of the loss scale after an overflow, between 0 and 1.
        min_scale: Lower limit of the loss scale, or None.
        max_grad_norm: Largest norm of all unscaled gradients together, 0 or more. ``math.inf``
            measures the norm without clipping; None does neither.
        gradient_accumulation_steps: Number of batches per optimizer step, 1 or more.
        average_decay: Decay per step of an average of the weights, from 0 to 1, or "equal"; None
            for no average. Needs an optimizer of ``amp_ext.optim``.

    Raises:
        ValueError: If the precision, the norm or the number of batches is out of range.
    """

    precision: Precision = "bf16"
    initial_loss_scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float | None = SMALLEST_SCALE
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int = 1
    average_decay: float | str | None = None

    def __post_init__(self) -> None:
        """Converts numpy numbers to Python numbers, and checks settings that no scaler checks."""
        for each in fields(self):
            object.__setattr__(self, each.name, plain(getattr(self, each.name)))
        norm, batches = self.max_grad_norm, self.gradient_accumulation_steps
        is_norm = norm is None or (is_number(norm) and norm >= 0)
        for name, fits, wanted in (
            ("precision", self.precision in [*_DTYPES], "'fp32', 'bf16' or 'fp16'"),
            ("max_grad_norm", is_norm, "0 or more, or None"),
            ("gradient_accumulation_steps", is_count(batches), "an int of 1 or more"),
        ):
            if not fits:
                got = getattr(self, name)
                raise ValueError(f"MixedPrecisionConfig: {name} must be {wanted}, got {got!r}")

    @property
    def dtype(self) -> torch.dtype:
        """The precision as a torch dtype."""
        return _DTYPES[self.precision]


def create_fp16_grad_scaler(device: torch.device | str | None = None, **options: Any) -> GradScaler:
    """Creates a gradient scaler with settings for float16.

    The defaults are torch's, with a lower limit of the scale: without one, many bad batches in a
    row push the scale to 0, and it can never grow again.

    Args:
        device: Device that trains, or its type. None takes CUDA if it is available, and else the
            CPU. (torch's default, "cuda", disables the scaler on a machine without CUDA.)
        **options: Options of :class:`amp_ext.GradScaler`. For runs of a few hundred steps, use a
            ``growth_interval`` of 100 or less.

    Raises:
        TypeError: If an option is unknown.
        ValueError: If an option is out of its range.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"min_scale": SMALLEST_SCALE, **options}
    return GradScaler(torch.device(device).type, **options)
