"""A transport over CPU memory, whose copies run late and in any order."""

from __future__ import annotations

import collections
import ctypes
import random
import threading
import time
from typing import Any

import torch
from torch import Tensor


class Queue:
    """The copies of one direction. Between two events, they run in any order."""

    def __init__(self, seed: int, delay: float) -> None:
        self.work: collections.deque[Any] = collections.deque()
        self.has_work = threading.Condition()
        self.random, self.delay = random.Random(seed), delay
        threading.Thread(target=self.run, daemon=True).start()

    def put(self, item: Any) -> None:
        """Takes a copy, an event that is set after all copies before it, or None at the end."""
        with self.has_work:
            self.work.append(item)
            self.has_work.notify()

    def run(self) -> None:
        while True:
            with self.has_work:
                self.has_work.wait_for(lambda: any(type(each) is not tuple for each in self.work))
            copies = []
            while isinstance(item := self.work.popleft(), tuple):
                copies.append(item)
            self.random.shuffle(copies)
            for target, source in copies:
                if self.delay:
                    time.sleep(self.random.random() * self.delay)
                # Both are dense. ThreadSanitizer watches this call, unlike a copy of torch.
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            if item is None:
                return
            item.set()


class DelayedTransport:
    """Fails if it is used in an order that a GPU would not refuse, but compute wrong results with.

    Host memory and parameters are both on the CPU. Nothing tells them apart but their addresses.
    """

    def __init__(self, seed: int = 0, delay: float = 0.0002) -> None:
        self.device = torch.device("cpu")
        self.down, self.up = Queue(seed, delay), Queue(seed + 1, delay)
        self.allocated = 0
        self.calls: list[str] = []
        self.is_open = True

    def allocate(self, size: int) -> Tensor:
        self.allocated += size
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in all dtypes

    def begin(self) -> None:
        assert self.is_open

    def copy_down(self, host: Tensor, source: Tensor) -> None:
        self._copy(self.down, "down", host, source)

    def copy_up(self, target: Tensor, host: Tensor) -> None:
        self._copy(self.up, "up", target, host)

    def _copy(self, queue: Queue, name: str, target: Tensor, source: Tensor) -> None:
        assert self.is_open
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        assert target.numel() == 0 or target.stride() == source.stride()
        assert target.numel() == 0 or target.data_ptr() != source.data_ptr()
        self.calls.append(name)
        queue.put((target.data, source.data))

    def record_down(self) -> threading.Event:
        return self._record(self.down)

    def record_up(self) -> threading.Event:
        return self._record(self.up)

    def _record(self, queue: Queue) -> threading.Event:
        event = threading.Event()
        queue.put(event)
        return event

    def wait(self, event: threading.Event) -> None:
        assert event.wait(60), "a copy has not ended"

    join = wait

    def close(self) -> None:
        self.is_open = False
        for queue in (self.down, self.up):
            assert not queue.work
            queue.put(None)
