"""Changes of several things that are made all together or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["put_back_on_failure"]


@contextmanager
def put_back_on_failure(
    dicts: Sequence[dict[Any, Any]], tensors: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Puts things back as they were if the block fails or is interrupted.

    Args:
        dicts: Dicts, such as the attributes of an object; what they refer to is not looked at.
        tensors: Whose elements are put back as well.
    """
    entries = [dict(each) for each in dicts]
    elements = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except BaseException:  # also an interrupt, after which a notebook goes on
        for each, before in zip(dicts, entries, strict=True):
            for name in each.keys() - before.keys():
                del each[name]
            each.update(before)
        with torch.no_grad():
            for tensor, copied in zip(tensors, elements, strict=True):
                tensor.copy_(copied)
        raise
