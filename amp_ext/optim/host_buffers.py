"""Copies of parameters and buffers for gradients in host memory."""

from __future__ import annotations

import concurrent.futures
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_ext.optim.transport import Transport

__all__ = [
    "BUFFERS",
    "Chunks",
    "HookBuffers",
    "HostCopy",
    "Layout",
    "Seen",
    "aligned_bytes",
    "is_dense",
    "set_grad",
    "strided",
]

#: Buffers for gradients: one is stepped while the next one arrives.
BUFFERS = 2
_ALIGNMENT = 64  # bytes


class Seen(NamedTuple):
    """Tells whether a parameter was written."""

    address: int
    version: int

    @classmethod
    def of(cls, param: Tensor) -> Seen:
        """Returns what tells now."""
        return cls(param.data_ptr(), param._version)


class HostCopy:
    """The host copy of a parameter, and the parameter as it was when both were equal."""

    def __init__(self, tensor: Tensor, is_copy: bool = True) -> None:
        self.tensor = tensor
        self.is_copy = is_copy  # False if `tensor` is empty, because the parameter is frozen
        self.seen: Seen | None = None  # what is in the copy; None: nothing yet

    def fits(self, param: Tensor) -> bool:
        """Returns True if the parameter has still the dtype and layout of the copy."""
        ours = self.tensor
        return (ours.dtype, ours.shape, ours.stride()) == (
            param.dtype,
            param.shape,
            param.stride(),
        )


class Layout:
    """The chunks of a step, and the place of each gradient in the memory of its chunk."""

    def __init__(self, grads: list[Tensor | None], chunk_bytes: int) -> None:
        self._kinds = list(map(_kind, grads))
        self._gaps = [
            index for index, grad in enumerate(grads) if grad is not None and not is_dense(grad)
        ]
        #: Index after the last parameter of each chunk.
        self.ends: list[int] = []
        self._places: list[tuple[int, int]] = []  # chunk and offset in its memory
        self.buffer_bytes = offset = 0
        for index, grad in enumerate(grads):
            size = 0 if grad is None else aligned_bytes(grad)
            if offset and offset + size > chunk_bytes:
                self.ends.append(index)
                offset = 0
            self._places.append((len(self.ends), offset))
            offset += size
            self.buffer_bytes = max(self.buffer_bytes, offset)
        self.ends.append(len(grads))
        #: Host memory of each gradient.
        self.views: list[Tensor | None] = []

    def fits(self, grads: list[Tensor | None]) -> bool:
        """Returns True if these gradients have the dtypes and layouts of this layout's."""
        return self._kinds == list(map(_kind, grads))

    def close_gaps(self, grads: list[Tensor | None]) -> None:
        """Replaces gradients that have gaps or overlaps in memory by contiguous copies."""
        for index in self._gaps:
            grad = grads[index]
            grads[index] = None if grad is None else grad.contiguous()

    def place(self, ring: Tensor) -> None:
        """Places the gradients in host memory of ``BUFFERS * buffer_bytes`` bytes."""
        for index, kind in enumerate(self._kinds):
            chunk, offset = self._places[index]
            if kind is None:
                self.views.append(None)
                continue
            dtype, shape, stride = kind
            if index in self._gaps:
                stride = torch.empty(shape, device="meta").stride()
            start = chunk % BUFFERS * self.buffer_bytes + offset
            self.views.append(strided(ring, start, dtype, shape, stride))


class HookBuffers:
    """The buffers for gradients of hooks, which are filled in turns."""

    def __init__(self, memory: Tensor, buffer_bytes: int) -> None:
        self._memory = memory
        self.buffer_bytes = buffer_bytes
        #: The buffer that is filled now.
        self.index = 0
        self._used = 0  # bytes of this buffer
        #: The last step of each buffer.
        self.futures: list[concurrent.futures.Future[None] | None] = [None] * BUFFERS

    def place(self, grad: Tensor) -> Tensor:
        """Returns host memory for a gradient. Waits until the next buffer is free, if it must."""
        size = aligned_bytes(grad)
        if self._used + size > self.buffer_bytes:
            self.index, self._used = (self.index + 1) % BUFFERS, 0
            last = self.futures[self.index]
            if last is not None:
                last.result()
        start = self.index * self.buffer_bytes + self._used
        self._used += size
        return strided(self._memory, start, grad.dtype, grad.shape, grad.stride())


class Chunks:
    """Copies the gradients of each chunk down, and the updated parameters up.

    The compiled step calls the methods, in the thread.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        params: list[tuple[Tensor, HostCopy]],
        grads: list[Tensor | None],
    ) -> None:
        self.ends = layout.ends
        self._transport = transport
        self._params, self._grads, self._views = params, grads, layout.views
        self._events: list[Any] = []
        for (_, host), view in zip(params, layout.views, strict=True):
            set_grad(host.tensor, view)

    def begin(self, chunk: int) -> None:
        """Waits for the gradients of a chunk, while those of the next one are copied."""
        while len(self._events) < min(chunk + BUFFERS, len(self.ends)):
            for index in self._indices(len(self._events)):
                grad, view = self._grads[index], self._views[index]
                if grad is not None and view is not None:
                    self._transport.copy_down(view, grad)
            self._events.append(self._transport.record_down())
        self._transport.wait(self._events[chunk])

    def end(self, chunk: int) -> None:
        """Starts the copies of the updated parameters."""
        for index in self._indices(chunk):
            if self._grads[index] is None:
                continue
            self._grads[index] = None
            param, host = self._params[index]
            self._transport.copy_up(param, host.tensor)
            increment_version(param)
            host.seen = Seen.of(param)

    def _indices(self, chunk: int) -> range:
        return range(self.ends[chunk - 1] if chunk else 0, self.ends[chunk])


def set_grad(host: Tensor, grad: Tensor | None) -> None:
    """Sets the gradient of a host copy, also if it has another dtype."""
    if grad is not None and grad.dtype != host.dtype:
        host.grad_dtype = grad.dtype
    host.grad = grad


def aligned_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, rounded up so that the next tensor is aligned."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def is_dense(tensor: Tensor) -> bool:
    """Returns True if a tensor has no gaps or overlaps in memory."""
    return tensor.numel() == 0 or torch.empty_like(tensor, device="meta").stride() == (
        tensor.stride()
    )


def _kind(grad: Tensor | None) -> tuple[torch.dtype, torch.Size, tuple[int, ...]] | None:
    return None if grad is None else (grad.dtype, grad.shape, grad.stride())


def strided(
    slab: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """Returns a view of a tensor's layout on bytes of a slab."""
    numel = shape.numel()
    flat = slab[offset : offset + numel * dtype.itemsize].view(dtype)
    return flat.as_strided(shape, stride)
