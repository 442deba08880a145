"""A gradient scaler that is set for fp16."""

from __future__ import annotations

import torch

from amp_ext.grad_scaler import GradScaler

#: Below this a loss scale helps no training: gradients of 2**32 would still be too large.
SMALLEST_SCALE = 2.0**-16


def create_fp16_grad_scaler(
    device: torch.device | str | None = None,
    *,
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float | None = SMALLEST_SCALE,
    max_scale: float | None = None,
    hysteresis: int = 1,
) -> GradScaler:
    """Creates a gradient scaler with settings for float16.

    They are those of torch, with a lower limit: a run of bad batches can't push the scale to 0,
    from where it never comes back.

    Args:
        device: Device that trains, or its type. None takes CUDA where there is one, else the CPU;
            torch's own default, "cuda", switches the scaler off on a machine without CUDA.
        init_scale: Scale of the first iteration. The largest that fits is found within a few
            skipped steps, so too large costs little; too small loses gradients for thousands.
        growth_factor: Factor of growth after ``growth_interval`` clean iterations, above 1.
        backoff_factor: Factor after an overflow, below 1.
        growth_interval: Clean iterations until the scale grows. For runs of a few hundred steps,
            take 100 or less.
        min_scale: The scale does not fall below, or None.
        max_scale: The scale does not grow above, or None.
        hysteresis: Number of overflows since the last growth of which the last backs off. With 2,
            the first bad batch costs a step and leaves the scale.

    Returns:
        The scaler, switched on.

    Raises:
        AssertionError: If a factor is out of range.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return GradScaler(
        torch.device(device).type,
        init_scale,
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
    )
