"""Changes of several things that are made all together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Before"]


class Before:
    """Values from before a change, to put back if the change fails or is interrupted.

    ::

        before = Before([vars(self)])
        try:
            ...
        except BaseException:  # also an interrupt, after which a notebook goes on
            before.put_back()
            raise
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], tensors: Sequence[Tensor] = ()) -> None:
        """Copies the present values.

        Args:
            dicts: Dicts, such as the attributes of an object; what they refer to is not looked at.
            tensors: Tensors whose elements are put back too.
        """
        self._entries = [(each, dict(each)) for each in dicts]
        self._elements = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Puts the copied values back."""
        for each, entries in self._entries:
            for name in each.keys() - entries.keys():
                del each[name]
            each.update(entries)
        for tensor, elements in self._elements:
            tensor.copy_(elements)
