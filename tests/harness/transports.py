"""Transports over CPU memory: one whose copies run at once, and one whose copies run late."""

from __future__ import annotations

import collections
import ctypes
import random
import threading
import time
from typing import Any

import torch
from torch import Tensor


class Event:
    """Set by the thread once all copies before it have ended."""

    def __init__(self) -> None:
        self.is_passed = threading.Event()


class Queue:
    """The copies of one direction. Between two events, they run in any order."""

    def __init__(self, seed: int, delay: float) -> None:
        self.work: collections.deque[Any] = collections.deque()
        self.has_work = threading.Condition()
        self.is_closed = False
        self.random, self.delay = random.Random(seed), delay
        self.copies = 0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def put(self, item: Any) -> None:
        with self.has_work:
            self.work.append(item)
            self.has_work.notify()

    def run(self) -> None:
        while True:
            with self.has_work:
                self.has_work.wait_for(lambda: self.is_closed or self.has_event())
                if not self.has_event():
                    return
            copies = []
            while not isinstance(item := self.work.popleft(), Event):
                copies.append(item)
            self.random.shuffle(copies)
            for target, source in copies:
                if self.delay:
                    time.sleep(self.random.random() * self.delay)
                # Both are dense. ThreadSanitizer watches this call, unlike a copy of torch.
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            item.is_passed.set()

    def has_event(self) -> bool:
        return any(isinstance(item, Event) for item in list(self.work))


class DelayedTransport:
    """Fails if it is used in an order that a GPU would not refuse, but compute wrong results with.

    Host memory and parameters are both on the CPU. Nothing tells them apart but their addresses.
    """

    def __init__(self, seed: int = 0, delay: float = 0.0002) -> None:
        self.device = torch.device("cpu")
        self.down, self.up = Queue(seed, delay), Queue(seed + 1, delay)
        self.allocated = 0
        self.calls: list[str] = []
        self.joined: Event | None = None  # the last event that the caller's stream waits for
        self.is_open = True

    def allocate(self, size: int) -> Tensor:
        self.allocated += size
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in all dtypes

    def begin(self) -> None:
        self.calls.append("begin")

    def copy_down(self, host: Tensor, source: Tensor) -> None:
        self._copy(self.down, host, source)

    def copy_up(self, target: Tensor, host: Tensor) -> None:
        self._copy(self.up, target, host)

    def _copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        assert self.is_open
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        assert target.numel() == 0 or target.stride() == source.stride()
        assert target.numel() == 0 or target.data_ptr() != source.data_ptr()
        self.calls.append("down" if queue is self.down else "up")
        queue.copies += 1
        queue.put((target.data, source.data))

    def record_down(self) -> Event:
        return self._record(self.down)

    def record_up(self) -> Event:
        return self._record(self.up)

    def _record(self, queue: Queue) -> Event:
        event = Event()
        queue.put(event)
        return event

    def wait(self, event: Event) -> None:
        self._pass(event)

    def join(self, event: Event) -> None:
        # A stream would wait here. Copies that were started later would not be waited for.
        assert not self.up.work or self.up.work[-1] is event
        self._pass(event)

    def _pass(self, event: Event) -> None:
        assert event.is_passed.wait(timeout=60)

    def close(self) -> None:
        assert not self.down.work
        assert not self.up.work
        self.is_open = False
        for queue in (self.down, self.up):
            with queue.has_work:
                queue.is_closed = True
                queue.has_work.notify()


class ImmediateTransport:
    """Copies at once."""

    device = torch.device("cpu")

    def allocate(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in all dtypes

    def copy_down(self, host: Tensor, source: Tensor) -> None:
        host.data.copy_(source.data)

    copy_up = copy_down

    def begin(self) -> None:
        pass

    record_down = record_up = close = begin

    def wait(self, event: None) -> None:
        pass

    join = wait
