"""Transports over CPU memory: one whose copies run at once, and one whose copies run late."""

from __future__ import annotations

import collections
import ctypes
import random
import threading
import time
from typing import Any

import pytest
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

    def copy_down(self, copies: Any) -> Any:
        return self._copy(self.down, "down", copies)

    def copy_up(self, copies: Any) -> None:
        self._copy(self.up, "up", copies)

    def _copy(self, queue: Queue, name: str, copies: Any) -> Any:
        assert self.is_open
        for target, source in copies:
            assert (target.dtype, target.shape) == (source.dtype, source.shape)
            assert target.numel() == 0 or target.stride() == source.stride()
            assert target.numel() == 0 or target.data_ptr() != source.data_ptr()
            self.calls.append(name)
            queue.put((target.data, source.data))
        event = threading.Event()
        queue.put(event)
        return lambda: event.wait(60) or pytest.fail("a copy has not ended")

    def join(self) -> None:
        self._copy(self.up, "", ())()

    def close(self) -> None:
        self.is_open = False
        for queue in (self.down, self.up):
            assert not queue.work
            queue.put(None)


class ImmediateTransport:
    """Copies at once."""

    device = torch.device("cpu")

    def allocate(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in all dtypes

    def copy_down(self, copies: Any) -> Any:
        for target, source in copies:
            target.data.copy_(source.data)
        return self.join

    copy_up = copy_down

    def join(self) -> None:
        pass

    close = join
