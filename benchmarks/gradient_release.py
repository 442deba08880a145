"""Times the hooks of released gradients on a CPU, beside a step of torch's fused AdamW.

    python benchmarks/gradient_release.py                     # 20 seconds on one core

A hook of ``release_gradients`` steps one parameter of 64 elements. Its time is that of a backward
pass that only accumulates gradients, divided by the number of parameters, minus the same time with
an empty Python hook in place of the release. The unit is the time of ``step()`` of
``torch.optim.AdamW(fused=True)`` with one such parameter. All sides run in turns, and the least
time of each counts. The rows with 10 parameters show that a hook does not take longer if there are
more parameters.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

import torch
from common import in_turns
from torch.nn import Parameter

import amp_ext
from amp_ext.optim import AdamW, release_gradients
from amp_ext.text_table import format_table

ELEMENTS = 64
ROUNDS = 200  # how often each side runs


def backward_of(count: int, released: bool, scaled: bool) -> Callable[[], float]:
    """Returns a function that takes an iteration, and returns the seconds of a hook."""
    params = [Parameter(torch.randn(ELEMENTS)) for _ in range(count)]
    gradients = [torch.randn(ELEMENTS) for _ in params]
    optimizer = AdamW(params)
    scaler = amp_ext.GradScaler("cpu", enabled=scaled)
    if released:
        release_gradients(optimizer, scaler)
    else:
        for param in params:
            param.register_post_accumulate_grad_hook(lambda _: None)

    def iterate() -> float:
        scaler.scale(torch.ones(()))
        start = time.perf_counter()
        torch.autograd.backward(params, gradients)
        seconds = time.perf_counter() - start
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return seconds / count

    return iterate


def step_of_torch() -> Callable[[], float]:
    """Returns a function that steps one parameter by torch, and returns the seconds."""
    param = Parameter(torch.randn(ELEMENTS))
    param.grad = torch.randn(ELEMENTS)
    optimizer = torch.optim.AdamW([param], fused=True)

    return lambda: min(timeit.repeat(optimizer.step, number=1, repeat=20))  # the first is cold


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [["parameters", "scaler", "hook, µs", "torch's step, µs", "hook / step"]]
    for count in (10, 1000):
        for scaled in (False, True):
            released = backward_of(count, released=True, scaled=scaled)
            sides = [released, backward_of(count, released=False, scaled=scaled), step_of_torch()]
            best, plain, torchs = in_turns(dict(enumerate(sides)), ROUNDS).values()
            hook = best - plain
            figures = (1e6 * hook, 1e6 * torchs, hook / torchs)
            rows.append([str(count), "yes" if scaled else "no", *(f"{x:.2f}" for x in figures)])
    print(format_table(rows, left=(1,)))
