"""What a load says of an object that is not the state dict that it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["check_is_dict", "first_keys", "missing_entry"]


def check_is_dict(operation: str, state_dict: Any) -> None:
    """Refuses what is no dict.

    Args:
        operation: The load, as its errors begin.
        state_dict: What it was given.

    Raises:
        TypeError: If that is no dict; of a path it says how to read the file.
    """
    if isinstance(state_dict, Mapping):
        return
    got = type(state_dict).__name__
    if isinstance(state_dict, (str, os.PathLike)):
        got = f"{state_dict!r}: read the file with torch.load first"
    raise TypeError(f"{operation}: state_dict must be a dict, got {got}")


def missing_entry(
    operation: str,
    name: str,
    state_dict: Mapping[Any, Any],
    is_wanted: Callable[[Mapping[Any, Any]], bool],
) -> str:
    """Returns what an error says of a dict without an entry, and which of its entries to load.

    Args:
        operation: The load, as its errors begin.
        name: The entry that is missing.
        state_dict: What it was given.
        is_wanted: Tells whether a dict is one that could have been given instead.
    """
    inner = [
        key for key, value in state_dict.items() if isinstance(value, Mapping) and is_wanted(value)
    ]
    text = f"{operation}: state_dict must have {name!r}, got {first_keys(state_dict)}"
    return text + (f"; load its entry {' or '.join(map(repr, inner))} instead" if inner else "")


def first_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Returns enough keys to tell what a mapping is, which may be one of all tensors of a model."""
    return list(mapping)[:8] + (["..."] if len(mapping) > 8 else [])
