"""Creates gradient scalers for fp16."""

from __future__ import annotations

from typing import Any

import torch

from amp_ext.scaler import GradScaler

#: Lower limit of the loss scale, at which only gradients above about 2**32 overflow in float16.
SMALLEST_SCALE = 2.0**-16


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
