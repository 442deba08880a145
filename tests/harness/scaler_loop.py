"""A short loop of any scaler with any optimizer, whose gradients overflow where a test says."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from harness.awkward import F32
from harness.optimizer_cases import Optimizer, params_of

SHAPES = [(4, 5), (33,), ()]
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)

# One iteration: the place among all elements with the value that overflows there, or None, and
# whether unscale_ is called before the step.
Iteration = tuple[tuple[int, float] | None, bool]


def makers(package: Any, table: list[Any], prefix: str, **switches: Any) -> list[Any]:
    """Returns rows of functions that make an optimizer of parameters."""
    return [
        pytest.param(partial(package(name), **options, **switches), id=f"{prefix}-{row.id}")
        for row in table
        for name, options in [row.values]
    ]


def new_params(device: Any, dtype: torch.dtype = F32) -> list[Parameter]:
    """Returns parameters of three shapes with the same values at each call."""
    draw = torch.Generator().manual_seed(7)
    return [Parameter(torch.randn(s, generator=draw).to(device, dtype)) for s in SHAPES]


def give_new_grads(params: list[Parameter], step: int, scaler: Any = None, factor: float = 1.0):
    """Gives the gradients of a step: none that leaves fp16's range when scaled."""
    draw = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=draw).clamp(-4, 4) * factor
        grad = grad.to(param.device, param.dtype)
        param.grad = grad if scaler is None else scaler.scale(grad).to(param.dtype)


def set_grad(params: list[Parameter], place: int, value: float) -> None:
    """Writes one element of the gradients, which is counted through all of them."""
    for param in params:
        if place < param.numel():
            param.grad.view(-1)[place] = value
            return
        place -= param.numel()
    raise IndexError(place)


def plain(make: Any, steps: Iterable[int], *kind: Any) -> Optimizer:
    """Returns an optimizer after some steps without any scaler."""
    optimizer = make(new_params(*kind))
    for step in steps:
        give_new_grads(params_of(optimizer), step)
        optimizer.step()
    return optimizer


def under_scaler(
    scaler: Any, optimizer: Optimizer, sequence: Iterable[Iteration]
) -> list[dict[str, Any]]:
    """Takes a step for each iteration; returns the scaler's state after each."""
    params, log = params_of(optimizer), []
    for step, (overflow, unscale_first) in enumerate(sequence):
        give_new_grads(params, step, scaler)
        if overflow is not None:
            set_grad(params, *overflow)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        log.append(scaler.state_dict())
    return log
