"""Copies between a GPU and host memory, on streams of their own."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CGROUP = Path("/sys/fs/cgroup")


class Transport:
    """Copies on two CUDA streams, from and to host memory that is pinned in place.

    Copies down and copies up are two queues, which run at the same time. Both sides of a copy have
    the same dtype, sizes and strides, and stay unchanged until the copy has ended. Copies do not
    change the version counters of tensors. For tests, another object with ``device`` and these
    methods may copy between other memories.

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
        # The finalizer owns the memory, which must not be freed while it is pinned.
        self._slabs: list[Tensor] = []
        self._finalizer = weakref.finalize(self, _unpin, self._slabs, device)
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
        """Makes later copies wait for the work that the current stream has now."""
        for stream in (self._down, self._up):
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy_down(self, host: Tensor, source: Tensor) -> None:
        """Starts a copy into host memory."""
        with torch.cuda.stream(self._down):
            host.data.copy_(source.data, non_blocking=True)

    def copy_up(self, target: Tensor, host: Tensor) -> None:
        """Starts a copy from host memory. Another thread may call it."""
        with torch.cuda.stream(self._up):
            target.data.copy_(host.data, non_blocking=True)

    def record_down(self) -> Any:
        """Returns an event after all copies down so far."""
        return self._down.record_event()

    def record_up(self) -> Any:
        """Returns an event after all copies up so far."""
        return self._up.record_event()

    def wait(self, event: Any) -> None:
        """Returns once the copies before an event have ended. Another thread may call it."""
        event.synchronize()

    def join(self, event: Any) -> None:
        """Makes the current stream wait for the copies before an event, but not the host."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def close(self) -> None:
        """Ends the use of the host memory, after all copies."""
        self._finalizer()


def _unpin(slabs: list[Tensor], device: torch.device) -> None:
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        while slabs:
            torch.cuda.cudart().cudaHostUnregister(slabs.pop().data_ptr())


def available_host_memory() -> int | None:
    """Returns how many bytes this process can still allocate on the host, or None if unknown.

    The answer is the smaller of MemAvailable and of what the control group of the process leaves.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for folder, limit, used in (
        (_CGROUP, "memory.max", "memory.current"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            found.append(left + int(pages.get("inactive_file", 0)))
    return min(found) if found else None
