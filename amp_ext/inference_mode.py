"""Creates tensors inside ``torch.inference_mode()`` that can be used after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["outside_inference_mode"]


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Creates normal tensors inside, without autograd; a context manager or decorator.

    Tensors created in inference mode can't be written after it, nor saved for a backward pass.
    Write no tensors of the caller here: if they are inference tensors, this raises.
    """
    with torch.inference_mode(False), torch.no_grad():  # inference_mode(False) switches autograd on
        yield
