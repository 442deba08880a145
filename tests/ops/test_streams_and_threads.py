"""Optimizers at the same time, in threads and on streams, have the bits of one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from harness import HANGS
from harness.edge_shapes import BF16, F32, threads
from harness.optimizer_cases import bits_of, ours
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor
from torch.nn import Parameter

import amp_ext

# One tensor is large enough for the CPU engine to share it among threads of its own.
SHAPES = [(140_001,), (33, 5), (7,), ()]
REPETITIONS = 15
STEPS = 4
LIMITS: dict[str, Any] = {"max_grad_norm": 5.0, "clip_value": 0.5, "skip_nonfinite": True}

Results = list[Tensor]


class Work:
    """A training loop that shares nothing with another: one of the optimizers, maybe scaled.

    Its gradients have an inf and a NaN among them.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        name: str,
        seed: int,
        device: torch.device,
        scaled: bool = False,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        *self.grads, start = (
            [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in SHAPES]
            for _ in range(STEPS + 1)
        )
        for grads in self.grads:
            grads[0][seed % 100], grads[1][seed % 33, 0] = float("inf"), float("nan")
        self.params, self.scaled = [Parameter(tensor) for tensor in start], scaled
        self.optimizer = ours(name)(self.params, lr=0.05, **options)
        self.scaler = amp_ext.GradScaler(device.type, 4.0, enabled=scaled, growth_interval=2)
        self.scaler.scale(torch.ones((), device=device))

    def step(self, number: int) -> None:
        """Takes the step of a number, from 0."""
        for param, grad in zip(self.params, self.grads[number], strict=True):
            param.grad = grad.clone()
            if self.scaled and number != 1:  # the second step overflows
                param.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def results(self) -> Results:
        """Returns copies of everything that the steps wrote."""
        norm = self.optimizer.grad_norm
        written = [tensor for row in bits_of(self.optimizer) for tensor in row.values()]
        written += [] if norm is None else [norm.clone()]
        return [*written, torch.tensor(self.scaler.get_scale())]


Make = Callable[[int, torch.device], Work]

adamw = partial(Work, BF16, "AdamW", **LIMITS)
amsgrad = partial(Work, F32, "Adam", amsgrad=True, write_back_grads=True, **LIMITS)
momentum = partial(Work, F32, "SGD", momentum=0.9, dampening=0.1, skip_nonfinite=True)
scaled = partial(Work, BF16, "AdamW", scaled=True, max_grad_norm=5.0)
PAIRS = rows(
    {
        "two-adamw": [adamw] * 2,
        "adamw-and-momentum": [adamw, momentum],
        "amsgrad-and-scaled": [amsgrad, scaled],
        "two-scalers": [scaled] * 2,
        "four-threads": [adamw, amsgrad, momentum, scaled],
    }
)


def one_after_the_other(makes: list[Make], device: torch.device) -> list[Results]:
    results = []
    for seed, make in enumerate(makes):
        work = make(seed, device)
        for number in range(STEPS):
            work.step(number)
        results.append(work.results())
    return results


def in_threads(works: list[Work], streams: list[Any] | None = None) -> None:
    """Takes the steps of each work in a thread of its own, all starting every step together.

    Args:
        works: What to do at the same time.
        streams: The CUDA stream of each thread, or None for the default one.
    """
    barrier = threading.Barrier(len(works), timeout=HANGS)

    def loop(index: int) -> None:
        try:
            for number in range(STEPS):
                barrier.wait()
                with torch.cuda.stream(streams[index]) if streams else contextlib.nullcontext():
                    works[index].step(number)
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(loop, range(len(works))))


def assert_same_results(actual: list[Results], expected: list[Results]) -> None:
    for work, (left, right) in enumerate(zip(actual, expected, strict=True)):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert same_bits(one, other), f"tensor {index} of work {work}"


@pytest.fixture
def cpu() -> Iterator[torch.device]:
    """The CPU, where every launch of the engine runs on threads of its own besides."""
    with threads(2):
        yield torch.device("cpu")


@pytest.mark.parametrize("makes", PAIRS)
def test_threads_give_the_bits_of_one_after_the_other(cpu, makes):
    expected = one_after_the_other(makes, cpu)
    for _ in range(REPETITIONS):
        works = [make(seed, cpu) for seed, make in enumerate(makes)]
        in_threads(works)
        assert_same_results([work.results() for work in works], expected)


# Streams.


def on_streams(works: list[Work], threads: bool) -> None:
    """Takes the steps of each work on a stream of its own, from one thread or from one each."""
    streams = [torch.cuda.Stream() for _ in works]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    if threads:
        in_threads(works, streams)
    else:
        for number in range(STEPS):
            for work, stream in zip(works, streams, strict=True):
                with torch.cuda.stream(stream):
                    work.step(number)
    torch.cuda.synchronize()


@pytest.mark.parametrize("threads", [False, True], ids=["one-thread", "a-thread-each"])
@pytest.mark.parametrize("makes", PAIRS)
def test_streams_give_the_bits_of_one_after_the_other(gpu, makes, threads):
    expected = one_after_the_other(makes, gpu)
    torch.cuda.synchronize()
    for _ in range(REPETITIONS):
        works = [make(seed, gpu) for seed, make in enumerate(makes)]
        on_streams(works, threads)
        assert_same_results([work.results() for work in works], expected)


def test_the_cpu_and_a_gpu_step_at_the_same_time(cpu, gpu):
    places = [cpu, gpu]
    expected = [one_after_the_other([adamw], place)[0] for place in places]
    for _ in range(REPETITIONS):
        works = [adamw(0, place) for place in places]
        in_threads(works)
        torch.cuda.synchronize()
        assert_same_results([work.results() for work in works], expected)
