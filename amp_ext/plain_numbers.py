"""Numbers as Python has them, whoever made them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from torch import Tensor

__all__ = ["is_count", "is_number", "plain", "timestep_of", "with_plain_numbers"]


def plain(value: Any) -> Any:
    """Returns a number of numpy, or its array of no dimensions, as one of Python.

    Anything else comes back as it is. A checkpoint with a number of numpy in it can't be read with
    ``weights_only=True``.
    """
    if isinstance(value, Tensor) or getattr(value, "ndim", None) != 0:
        return value
    return value.item() if hasattr(value, "item") else value


def with_plain_numbers(value: Any) -> Any:
    """Returns a copy of dicts, lists and tuples in each other, with numbers as of :func:`plain`."""
    if type(value) in (dict, OrderedDict, Counter):
        items = {plain(key): with_plain_numbers(each) for key, each in value.items()}
        return type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(map(with_plain_numbers, value))
    return plain(value)


def is_number(value: Any) -> bool:
    """Returns whether a value, as :func:`plain` returns it, is a real number: no bool, no text."""
    if isinstance(value, (bool, Tensor)) or hasattr(value, "ndim"):
        return False
    return hasattr(type(value), "__float__") or hasattr(type(value), "__index__")


def is_count(value: Any) -> bool:
    """Returns whether a value, as :func:`plain` returns it, is an int of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def timestep_of(operation: str, value: Any) -> int:
    """Returns the number of a step, from 1, that an operation was given.

    Raises:
        RuntimeError: If it is no such number.
    """
    timestep = plain(value)
    if not is_count(timestep):
        raise RuntimeError(f"{operation}: timestep must be an int of at least 1, got {timestep}")
    return timestep
