"""What a gradient scaler or a guard of norms is given, checked by name."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.plain_numbers import is_number, plain

__all__ = [
    "DEVICE_TYPES",
    "as_number",
    "check_flag",
    "check_has_groups",
    "check_options",
    "check_process_group",
    "check_range",
    "checked",
    "device_type_of",
]

_COUNTS = (
    *("growth_interval", "hysteresis", "warn_after", "_growth_tracker", "_hysteresis_tracker"),
    *("window", "warmup_steps", "patience", "norms", "entered", "outliers", "nonfinite"),
    *("last_outlier", "outliers_in_row", "count"),
)
#: Types of devices on which scales follow limits, and looks are ours.
DEVICE_TYPES = ("cpu", "cuda")

_LARGEST_SCALE = torch.finfo(torch.float32).max


def checked(operation: str, name: str, value: Any, wrong_type: type = TypeError) -> Any:
    """Returns a number of Python that is in its range.

    Args:
        operation: What the error begins with.
        name: That of an option, of an entry of a state dict, or "new_scale".
        value: What was given; also a tensor of one element.
        wrong_type: What is raised where it is no number.

    Raises:
        ValueError: If it is out of range.
        RuntimeError: If it is a new scale that is finite but does not fit float32, as in torch.
    """
    value = as_number(operation, name, value, wrong_type)
    check_range(operation, name, value)
    return value


def as_number(operation: str, name: str, value: Any, wrong_type: type = TypeError) -> Any:
    """Returns what was given as a number of Python; the arguments are those of :func:`checked`."""
    given = value = plain(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if name in _COUNTS:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif is_number(value):
        return value if isinstance(value, (int, float)) else float(value)
    raise wrong_type(_text(operation, name, math.nan, given))


def check_range(operation: str, name: str, value: float) -> None:
    """Raises if a number is out of range; the arguments are those of :func:`checked`."""
    try:
        is_too_large = name in _COUNTS and value >= 2**63  # to which double rounds what fits
        text = _text(operation, name, math.inf if is_too_large else float(value), value)
    except OverflowError:
        text = _text(operation, name, math.inf, value)
    if text and name == "new_scale" and _LARGEST_SCALE < value < math.inf:
        raise RuntimeError(text)
    if text:
        raise ValueError(text)


def _text(operation: str, name: str, value: float, given: Any) -> str:
    wanted = ops.wanted_of_scaler(name, value)
    return f"{operation}: {name} must be {wanted}, got {given!r}" if wanted else ""


def check_options(options: dict[str, Any], dynamic: Any, device: str) -> None:
    """Checks the options of a constructor; factors that torch knows were checked by its own.

    Args:
        options: Numbers of Python by their names.
        dynamic: Whether the scale follows overflows.
        device: The type of device.

    Raises:
        TypeError: If ``dynamic`` is a text.
        ValueError: If a number is out of range, or the device has no limits.
    """
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
    """Returns the type of a device as torch names it; anything for a scaler that is disabled."""
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
    raise TypeError(f"{text}; init_scale comes after it")


def check_flag(name: str, value: Any) -> None:
    """Refuses a text."""
    if isinstance(value, str):  # torch takes whatever has a truth value, and "no" is true
        raise TypeError(f"GradScaler: {name} must be a bool, got {value!r}")


def check_has_groups(operation: str, optimizer: Any) -> None:
    """Refuses what has no groups of parameters, on behalf of an operation of a scaler."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"GradScaler.{operation}: optimizer must have param_groups, as a "
            f"torch.optim.Optimizer, got {type(optimizer).__name__}"
        )


def check_process_group(group: Any, operation: str = "GradScaler") -> None:
    """Refuses what is neither None nor a group that this process is a member of.

    Args:
        group: What was given.
        operation: What the error begins with.
    """
    if group is None:
        return
    if not (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        raise TypeError(
            f"{operation}: process_group must be None or a torch.distributed.ProcessGroup that "
            f"this process is a member of, got {group!r}"
        )
