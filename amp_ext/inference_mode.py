"""Creates tensors inside ``torch.inference_mode()`` that can be used after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["outside_inference_mode"]


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Creates normal tensors inside, without autograd. A context manager and decorator.

    Tensors created in inference mode can't be written after it, nor saved for a backward pass.
    Don't write tensors of the caller inside: they may be inference tensors, which can't be written
    here.
    """
    with torch.inference_mode(False), torch.no_grad():  # inference_mode(False) switches autograd on
        yield
