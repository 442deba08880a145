"""Copies between a GPU and host memory, on streams of their own."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaTransport", "Transport", "available_host_memory"]

_CGROUP = "/sys/fs/cgroup"


class Transport(Protocol):
    """The copies between one device and host memory.

    Copies down and copies up are two queues, which run at the same time. An event marks the copies
    that a queue has at the time of its record. Both sides of a copy have the same dtype, sizes and
    strides, and have to stay unchanged until an event after the copy has passed. Copies do not
    change the version counters of tensors.
    """

    #: The device of the parameters.
    device: torch.device

    def allocate(self, size: int) -> Tensor:
        """Returns host memory of ``size`` bytes, as uint8, which lives as long as this object."""

    def begin(self) -> None:
        """Makes later copies wait for the work that the caller's current stream has now."""

    def copy_down(self, host: Tensor, source: Tensor) -> None:
        """Starts a copy of a device tensor into host memory."""

    def copy_up(self, target: Tensor, host: Tensor) -> None:
        """Starts a copy of host memory into a device tensor."""

    def record_down(self) -> Any:
        """Returns an event after all copies down so far."""

    def record_up(self) -> Any:
        """Returns an event after all copies up so far."""

    def wait(self, event: Any) -> None:
        """Returns once the copies before an event have ended."""

    def join(self, event: Any) -> None:
        """Makes the stream that called :meth:`begin` wait for the copies before an event."""

    def close(self) -> None:
        """Ends the use of the host memory. All copies must have ended."""


class CudaTransport:
    """Copies on two CUDA streams, from and to host memory that is pinned in place.

    Args:
        device: The GPU.
        pinned: Pins the host memory, so that copies run at the full speed of the bus and beside
            other work.
    """

    def __init__(self, device: torch.device, pinned: bool) -> None:
        """Creates the streams."""
        self.device = device
        self._is_pinned = pinned
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._caller = torch.cuda.current_stream(device)
        # The finalizer owns the memory, which must not be freed while it is pinned.
        self._slabs: list[Tensor] = []
        self._finalizer = weakref.finalize(self, _unpin, self._slabs, device, pinned, os.getpid())
        self._finalizer.atexit = False  # the end of the process unpins all memory

    def allocate(self, size: int) -> Tensor:
        """Returns host memory of ``size`` bytes.

        The memory is pinned in place, because torch's pinned allocator rounds each block up to a
        power of two.

        Raises:
            RuntimeError: If the memory can't be pinned.
        """
        slab = torch.empty(size, dtype=torch.uint8)
        if self._is_pinned and size:
            with torch.cuda.device(self.device):
                error = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), size, 0))
            if error:
                raise RuntimeError(
                    f"offload_states: {size} bytes of host memory can't be pinned (CUDA error "
                    f"{error}). Raise the limit of locked memory (ulimit -l), or pass pinned=False."
                )
        self._slabs.append(slab)
        return slab

    def begin(self) -> None:
        """Makes later copies wait for the work of the caller's stream."""
        self._caller = torch.cuda.current_stream(self.device)
        self._down.wait_stream(self._caller)
        self._up.wait_stream(self._caller)

    def copy_down(self, host: Tensor, source: Tensor) -> None:
        """Starts a copy into host memory."""
        with torch.cuda.stream(self._down):
            host.data.copy_(source.data, non_blocking=True)

    def copy_up(self, target: Tensor, host: Tensor) -> None:
        """Starts a copy into a device tensor."""
        with torch.cuda.stream(self._up):
            target.data.copy_(host.data, non_blocking=True)

    def record_down(self) -> torch.cuda.Event:
        """Records an event on the stream of copies down."""
        return self._down.record_event()

    def record_up(self) -> torch.cuda.Event:
        """Records an event on the stream of copies up."""
        return self._up.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Blocks the host until the event has passed."""
        event.synchronize()

    def join(self, event: torch.cuda.Event) -> None:
        """Makes the caller's stream wait for the event, but not the host."""
        self._caller.wait_event(event)

    def close(self) -> None:
        """Unpins the memory, after all copies."""
        self._finalizer()


def _unpin(slabs: list[Tensor], device: torch.device, is_pinned: bool, pid: int) -> None:
    if os.getpid() != pid:  # a fork has pinned nothing, and can't use CUDA
        return
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        while slabs:
            if is_pinned and slabs[-1].numel():
                torch.cuda.cudart().cudaHostUnregister(slabs[-1].data_ptr())
            slabs.pop()


def available_host_memory() -> int | None:
    """Returns how many bytes this process can still allocate on the host, or None if unknown.

    The answer is the smaller of MemAvailable and of what the control group of the process leaves.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used, cache in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            pages = dict(line.split() for line in _read(cache).splitlines())
            cached = int(pages.get("inactive_file", 0))
            found.append(int(_read(limit)) - int(_read(used)) + cached)
    return min(found) if found else None


def _read(name: str) -> str:
    with open(os.path.join(_CGROUP, name)) as file:
        return file.read()
