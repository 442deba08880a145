"""Range checks for the numbers that users pass to a gradient scaler or a norm guard."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.plain_numbers import is_number, plain

__all__ = ["as_number", "check_range", "checked"]

_COUNTS = (
    *("growth_interval", "hysteresis", "warn_after", "_growth_tracker", "_hysteresis_tracker"),
    *("window", "warmup_steps", "patience", "norms", "entered", "outliers", "nonfinite"),
    *("last_outlier", "outliers_in_row", "count"),
)
_LARGEST_SCALE = torch.finfo(torch.float32).max


def checked(operation: str, name: str, value: Any, wrong_type: type = TypeError) -> Any:
    """Returns a value as a Python number if it is in the range of its name.

    Args:
        operation: Start of the error.
        name: Name of an option or of an entry of a state dict, or "new_scale".
        value: The value; also a tensor of one element.
        wrong_type: Exception class to raise if the value is not a number.

    Raises:
        ValueError: If the number is out of range.
        RuntimeError: If a new scale is finite but does not fit float32, as in torch.
    """
    value = as_number(operation, name, value, wrong_type)
    check_range(operation, name, value)
    return value


def as_number(operation: str, name: str, value: Any, wrong_type: type = TypeError) -> Any:
    """Returns a value as a Python number. The arguments are those of :func:`checked`."""
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
    """Raises if a number is out of range. The arguments are those of :func:`checked`."""
    try:
        # An int, because 2^63 - 1, which fits int64, becomes 2^63 as a double.
        is_too_large = name in _COUNTS and value >= 2**63
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
