"""A gradient scaler that is set for fp16."""

from __future__ import annotations

from typing import Any

import torch

from amp_ext.grad_scaler import GradScaler

#: A smaller loss scale helps no training: gradients of 2**32 would still be too large.
SMALLEST_SCALE = 2.0**-16


def create_fp16_grad_scaler(device: torch.device | str | None = None, **options: Any) -> GradScaler:
    """Creates a gradient scaler with settings for float16.

    The settings are torch's, with a lower limit: a run of bad batches can't push the scale to 0,
    from where it never comes back.

    Args:
        device: Device that trains, or its type. None takes CUDA where there is one, else the CPU;
            torch's own default, "cuda", switches the scaler off on a machine without CUDA.
        **options: Options of :class:`amp_ext.GradScaler`. For runs of a few hundred steps, take a
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
