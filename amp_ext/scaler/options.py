"""Checks of the options of a gradient scaler."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from amp_ext.scaler_ranges import check_range

__all__ = ["DEVICE_TYPES", "OF_TORCH", "check_flag", "check_options", "device_type_of"]

#: Device types that our kernels support. Others use torch's code, without limits of the scale.
DEVICE_TYPES = ("cpu", "cuda")

#: The options of torch's scaler that are numbers.
OF_TORCH = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def check_options(options: dict[str, Any], dynamic: Any, device: str) -> None:
    """Checks the options of the constructor, except the factors, which torch has checked."""
    check_flag("dynamic", dynamic)
    for name, option in options.items():
        check_range("GradScaler", name, option)
    smallest, largest = options["min_scale"], options["max_scale"]
    if not smallest <= options["init_scale"] <= largest:
        raise ValueError(
            "GradScaler: init_scale must lie between min_scale and max_scale, got "
            f"init_scale={options['init_scale']}, min_scale={smallest}, max_scale={largest}"
        )
    has_options = (smallest, largest, dynamic, options["hysteresis"]) != (0, math.inf, True, 1)
    if has_options and device not in DEVICE_TYPES:
        raise ValueError(
            "GradScaler: min_scale, max_scale, dynamic and hysteresis need device 'cuda' or "
            f"'cpu', got {device!r}"
        )


def device_type_of(device: Any, enabled: bool) -> Any:
    """Returns the type of a device, such as "cuda". A disabled scaler accepts anything."""
    if isinstance(device, torch.device):
        return device.type
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):
            return torch.device(device.lower()).type
    if not enabled:
        return device
    text = f"GradScaler: device must be a type of device such as 'cuda' or 'cpu', got {device!r}"
    if isinstance(device, str):
        raise ValueError(text)
    raise TypeError(f"{text}. Pass the scale as init_scale=.")


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError for a string."""
    if isinstance(value, str):  # torch accepts any value, and "no" counts as true
        raise TypeError(f"GradScaler: {name} must be a bool, got {value!r}")
