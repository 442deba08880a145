"""Numbers that are the same on every machine, and hashes of what comes of them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor


def numbers(seed: int, count: int) -> Tensor:
    """Returns whole numbers of 24 bits, the same everywhere, as float32 in [-1, 1)."""
    value = torch.arange(1, count + 1, dtype=torch.int64) + 7919 * seed
    for _ in range(3):  # Park and Miller's generator, its lattice broken; no product leaves 64 bits
        value = value * 48271 % 2147483647
        value = value ^ (value >> 13)
    return (value % 2**24 - 2**23).to(torch.float32) / 2**23


class Hash:
    """A SHA-256 of tensors and numbers; a NaN is a NaN, whatever its bits."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, *values: Any) -> None:
        for value in values:
            if not isinstance(value, Tensor):
                self._sha.update(repr(value).encode())
                continue
            tensor = value.detach().cpu().contiguous().reshape(-1)
            self._sha.update(f"{tensor.dtype} {tuple(value.shape)}".encode())
            if tensor.is_floating_point():
                tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
            self._sha.update(tensor.view(torch.uint8).numpy().tobytes())

    def short(self) -> str:
        return self._sha.hexdigest()[:16]
