"""Conversion of numbers of numpy and of a device to Python's, and checks of numbers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor


def plain(value: Any) -> Any:
    """Converts a number of numpy, or a numpy array without dimensions, to a Python number.

    Any other value is returned unchanged. Checkpoints must not contain numpy's numbers, because
    ``torch.load`` with ``weights_only=True`` refuses them.
    """
    if isinstance(value, Tensor) or getattr(value, "ndim", None) != 0:
        return value
    return value.item() if hasattr(value, "item") else value


def with_plain_numbers(value: Any) -> Any:
    """Returns a copy of nested dicts, lists and tuples, with numbers converted by :func:`plain`."""
    if type(value) in (dict, OrderedDict, Counter):
        items = {plain(key): with_plain_numbers(each) for key, each in value.items()}
        return type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(map(with_plain_numbers, value))
    return plain(value)


def numbers_on_host(state: Tensor, on_host: Tensor, *, wait: bool) -> list[float]:
    """Returns the numbers that a device has copied to the host, without waiting for the device.

    Args:
        state: The tensor on the device.
        on_host: Its copy on the host, or the tensor itself, if it is there. The first and the last
            entry are the same number of updates, unless the device is writing the copy.
        wait: Waits for the device, so that its last update is included.
    """
    if wait and state.is_cuda:
        torch.cuda.synchronize(state.device)
    while True:
        numbers: list[float] = on_host.tolist()
        if numbers[0] == numbers[-1]:
            return numbers


def is_number(value: Any) -> bool:
    """Returns True if a value from :func:`plain` is a real number, not a bool or a string."""
    if isinstance(value, (bool, Tensor)) or hasattr(value, "ndim"):
        return False
    return hasattr(type(value), "__float__") or hasattr(type(value), "__index__")


def is_count(value: Any) -> bool:
    """Returns True for a value from :func:`plain` that is an int of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def timestep_of(operation: str, value: Any) -> int:
    """Returns the number of a step, from 1, that was passed to an operation.

    Raises:
        RuntimeError: If ``value`` is not an int of at least 1.
    """
    timestep = plain(value)
    if not is_count(timestep):
        raise RuntimeError(f"{operation}: timestep must be an int of at least 1, got {timestep}")
    return timestep
