"""Copies of parameters and buffers for gradients in host memory."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from amp_ext.optim.transport import Transport
from amp_ext.sharding import is_dtensor, local_tensor

__all__ = ["BUFFERS", "GradBuffers", "HostCopy", "aligned_bytes", "is_dense", "strided"]

#: Buffers for gradients: one is stepped while the next one arrives.
BUFFERS = 2
_ALIGNMENT = 64  # bytes


class HostCopy:
    """The host copy of a parameter, and what the parameter was when both were equal.

    Args:
        param: The parameter; for a DTensor, this rank's shard is copied.
        local: Host memory with the layout of the shard; None if nothing reads the parameter,
            because it is frozen.
    """

    def __init__(self, param: Tensor, local: Tensor | None) -> None:
        """Makes the tensor that the inner optimizer steps, a DTensor if the parameter is one."""
        self.is_copy = local is not None
        if local is None:
            self.local = self.tensor = torch.empty(0, dtype=param.dtype)
        else:  # the tensor in ``data`` has a version counter of its own
            self.local = local.data
            self.tensor = _sharded_as(param, self.local)
        self.group = 0  # index of the group that has the parameter
        self._seen: tuple[StorageWeakRef, int, int, int] | None = None

    def fits(self, param: Tensor) -> bool:
        """Returns True if the parameter has the dtype, the layout and the mesh of the copy."""
        ours, theirs = self.local, local_tensor(param)
        return (ours.dtype, ours.shape, ours.stride(), _spec_of(self.tensor)) == (
            *(theirs.dtype, theirs.shape, theirs.stride()),
            _spec_of(param),
        )

    def see(self, param: Tensor) -> None:
        """Remembers that the copy has, or will have, what is in the parameter now."""
        storage = local_tensor(param).untyped_storage()
        self._seen = StorageWeakRef(storage), *self._versions(param)

    def forget(self) -> None:
        """Forgets what the copy has, so that the parameter is copied again."""
        self._seen = None

    @property
    def is_known(self) -> bool:
        """True from :meth:`see` to :meth:`forget`."""
        return self._seen is not None

    def writes(self, param: Tensor) -> int:
        """Returns how often the parameter was written since :meth:`see`; -1 if it was replaced."""
        if self._seen is None:
            return -1
        storage, address, *versions = self._seen
        now_at, *now = self._versions(param)
        if storage.cdata != local_tensor(param).untyped_storage()._cdata or now_at != address:
            return -1
        return max(new - old for new, old in zip(now, versions, strict=True))

    @staticmethod
    def _versions(param: Tensor) -> tuple[int, int, int]:
        local = local_tensor(param)
        return local.data_ptr(), param._version, local._version

    def set_grad(self, grad: Tensor | None) -> None:
        """Sets the gradient of the copy, also if it has another dtype.

        Args:
            grad: A gradient in host memory, or None.
        """
        self.tensor.grad = None
        if grad is not None:
            grad = _sharded_as(self.tensor, grad)
            if getattr(self.tensor, "grad_dtype", grad.dtype) != grad.dtype:
                self.tensor.grad_dtype = grad.dtype
            self.tensor.grad = grad


class GradBuffers:
    """Two buffers for gradients in host memory, which are filled in turns.

    Args:
        transport: Allocates the memory.
    """

    def __init__(self, transport: Transport) -> None:
        """Allocates nothing yet."""
        self._transport = transport
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._size = 0  # bytes of each buffer
        self._index = self._used = 0
        self._last: list[Future[None] | None] = [None] * BUFFERS  # the last step of each buffer

    def reserve(self, size: int) -> None:
        """Makes each buffer at least ``size`` bytes large."""
        if size > self._size:
            self._memory, self._size = self._transport.allocate(size * BUFFERS), size
            self._index, self._used, self._last = 0, 0, [None] * BUFFERS

    def fits(self, grad: Tensor) -> bool:
        """Returns True if a buffer can take a gradient."""
        return aligned_bytes(grad) <= self._size

    def begin(self, size: int) -> None:
        """Makes room for ``size`` bytes. Waits until the next buffer is free, if it must."""
        if self._used + size > self._size:
            self._index, self._used = (self._index + 1) % BUFFERS, 0
            last = self._last[self._index]
            if last is not None:
                last.result()

    def place(self, grad: Tensor) -> Tensor:
        """Returns memory for a gradient, for which :meth:`begin` has made room."""
        start = self._index * self._size + self._used
        self._used += aligned_bytes(grad)
        view = strided(self._memory, start, grad.dtype, grad.shape, grad.stride())
        increment_version(view)  # the gradient is new, although its memory is not
        return view

    def like(self, grad: Tensor) -> Tensor:
        """Returns memory with the dtype and the layout of a gradient, which nobody must read."""
        return strided(self._memory, 0, grad.dtype, grad.shape, grad.stride())

    def is_used_by(self, step: Future[None]) -> None:
        """Remembers that a step reads the buffer that is filled now."""
        self._last[self._index] = step


def _spec_of(tensor: Any) -> Any:
    return tensor._spec if is_dtensor(tensor) else None


def _sharded_as(param: Any, local: Tensor) -> Tensor:
    """Returns a shard in host memory as a DTensor, if the parameter is one."""
    if not is_dtensor(param):
        return local
    sharded: Tensor = type(param.data)(local, param._spec, requires_grad=False)
    return sharded


def aligned_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, rounded up so that the next tensor is aligned."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def is_dense(tensor: Tensor) -> bool:
    """Returns True if a tensor has no gaps or overlaps in memory."""
    return tensor.numel() == 0 or torch.empty_like(tensor, device="meta").stride() == (
        tensor.stride()
    )


def strided(
    slab: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """Returns a view of a tensor's layout on bytes of a slab."""
    numel = shape.numel()
    flat = slab[offset : offset + numel * dtype.itemsize].view(dtype)
    return flat.as_strided(shape, stride)
