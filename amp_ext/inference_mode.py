"""Tensors that outlive ``torch.inference_mode()``, in which they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["outside_inference_mode"]


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Lets tensors be made normal ones, without autograd; also a decorator.

    Those that are made in inference mode can't be written after it, nor saved for a backward pass.
    Nothing of the caller's is to be written here: tensors of inference mode can't be.
    """
    with torch.inference_mode(False), torch.no_grad():  # the former switches autograd on
        yield
