"""Errors for an object passed to ``load_state_dict`` that is not the expected state dict."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any


def check_is_dict(operation: str, state_dict: Any) -> None:
    """Raises if an object is not a dict.

    Args:
        operation: Name of the method that loads, with which errors begin.
        state_dict: The object that was passed to it.

    Raises:
        TypeError: If the object is not a dict. For a path, the error says how to read the file.
    """
    if isinstance(state_dict, Mapping):
        return
    got = type(state_dict).__name__
    if isinstance(state_dict, (str, os.PathLike)):
        got = f"{state_dict!r}: read the file with torch.load first"
    raise TypeError(f"{operation}: state_dict must be a dict, got {got}")


def check_keys(name: str, wanted: Iterable[str], mapping: Mapping[Any, Any]) -> None:
    """Raises KeyError if a dict lacks an entry.

    Args:
        name: The operation and the dict, with which errors begin.
        wanted: The keys that must be present.
        mapping: The dict.
    """
    for key in wanted:
        if key not in mapping:
            raise KeyError(f"{name} must have {key!r}, got {first_keys(mapping)}")


def missing_entry(operation: str, name: str, state_dict: Mapping[Any, Any]) -> str:
    """Returns the error text for a missing entry of a state dict."""
    return f"{operation}: state_dict must have {name!r}, got {first_keys(state_dict)}"


def first_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Returns up to eight keys for an error message; a dict may hold all tensors of a model."""
    return list(mapping)[:8] + (["..."] if len(mapping) > 8 else [])
