"""Changes of several things that are made all together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Before"]


class Before:
    """What things were before a change, to put them back if it fails or is interrupted.

    ::

        before = Before([vars(self)])
        try:
            ...
        except BaseException:  # also an interrupt, after which a notebook goes on
            before.put_back()
            raise
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], tensors: Sequence[Tensor] = ()) -> None:
        """Copies what is there.

        Args:
            dicts: Dicts, such as the attributes of an object; what they refer to is not looked at.
            tensors: Whose elements are put back as well.
        """
        self._entries = [(each, dict(each)) for each in dicts]
        self._elements = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes everything what it was."""
        for each, entries in self._entries:
            for name in each.keys() - entries.keys():
                del each[name]
            each.update(entries)
        for tensor, elements in self._elements:
            tensor.copy_(elements)
