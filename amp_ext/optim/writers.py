"""Whose state dict it is, and what torch makes of one that lacks an option."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from amp_ext import ops

__all__ = ["options_since", "other_writer"]

# A patch of torch's names may put our classes there later.
_OF_TORCH = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}


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


def options_since(kind: type) -> dict[str, Any]:
    """Returns what torch's optimizers give to files that were written before they had an option.

    Those are the defaults of their constructors, which do as it was before.

    Args:
        kind: One of our classes; what counts is the class of torch that has its name, or that of
            the nearest class that it extends.
    """
    for base in kind.__mro__:
        if base.__name__ in _OF_TORCH:
            parameters = inspect.signature(_OF_TORCH[base.__name__]).parameters.values()
            return {
                each.name: each.default for each in parameters if each.default is not each.empty
            }
    return {}
