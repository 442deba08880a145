"""Whose state dict it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from amp_ext import ops

__all__ = ["other_writer"]


def other_writer(
    kind: type,
    own: Iterable[str],
    groups: Iterable[Mapping[str, Any]],
    states: Mapping[Any, Any],
) -> str | None:
    """Returns which other optimizer wrote a state dict, with what tells it; None if none is known.

    A key that the optimizer has as well tells nothing, nor does one of a class that it extends.

    Args:
        kind: The class that is to load it.
        own: Names of its options and buffers.
        groups: ``param_groups`` of the state dict.
        states: ``state`` of the state dict.
    """
    writer = ops.other_writer(
        [base.__name__ for base in kind.__mro__],
        list(own),
        [_names(group) for group in groups],
        [name for state in states.values() if isinstance(state, Mapping) for name in _names(state)],
    )
    return writer or None


def _names(mapping: Mapping[Any, Any]) -> list[str]:
    return [key for key in mapping if isinstance(key, str)]
