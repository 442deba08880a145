"""Creates tensors inside ``torch.inference_mode()`` that can be used after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A context manager or decorator that leaves inference mode, and switches autograd off.

    Tensors created in inference mode can't be written after it, nor saved for a backward pass. A
    caller's tensor that was created in inference mode can't be written in this context.
    """
    with torch.inference_mode(False), torch.no_grad():  # inference_mode(False) switches autograd on
        yield
