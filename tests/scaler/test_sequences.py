"""Sequences of clean and overflowing steps, drawn by hypothesis, and scales set by hand."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.awkward import F32
from harness.optimizer_cases import (
    EACH_CLASS,
    Optimizer,
    assert_same_bits,
    optimizers_named,
    ours,
    params_of,
    theirs,
)
from harness.reference import same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import amp_ext

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


OPTIMIZERS = [
    *makers(ours, cases.FEW_OPTIMIZERS + optimizers_named("adam-decay", "nesterov-decay"), "our"),
    *makers(theirs, optimizers_named("adam-decay", "momentum"), "loop", foreach=False),
    *makers(theirs, optimizers_named("adamw"), "fused", fused=True),
]

overflows = st.one_of(
    st.none(),
    st.tuples(
        st.integers(0, ELEMENTS - 1),
        st.sampled_from([float("inf"), float("-inf"), float("nan")]),
    ),
)
sequences = st.lists(st.tuples(overflows, st.booleans()), min_size=1, max_size=9)
scaler_options = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**16, 1.0, 2.0**-6, 2.0**100]),
        "growth_factor": st.sampled_from([2.0, 8.0]),
        "backoff_factor": st.sampled_from([0.5, 0.125]),
        "growth_interval": st.integers(1, 4),
    }
)
repeatable = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("make", OPTIMIZERS)
@repeatable
@given(sequence=sequences, options=scaler_options)
def test_overflowing_steps_might_as_well_not_have_been(make, sequence, options, device):
    """All scales are powers of two, so scaling and unscaling lose nothing: bits must agree."""
    actual, torchs = (make(new_params(device)) for _ in range(2))
    log = under_scaler(amp_ext.GradScaler(device.type, **options), actual, sequence)
    scaler = torch.amp.GradScaler(device.type, **options)
    assert log == under_scaler(scaler, torchs, sequence)
    clean = [step for step, (overflow, _) in enumerate(sequence) if overflow is None]
    expected = plain(make, clean, device)
    for optimizer in (actual, torchs):
        assert_same_bits(params_of(optimizer), params_of(expected))
    if clean:
        assert_same_bits(actual, expected)


@pytest.mark.filterwarnings("ignore:.*inverse is not finite")
@repeatable
@given(
    found=st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=1, max_size=40),
    options=st.tuples(  # scale, growth, backoff, interval
        st.floats(1e-30, 1e38),
        st.floats(1, 1e30, exclude_min=True) | st.sampled_from([1.0 + 1e-9, 1.7, 2.0]),
        st.floats(1e-30, 1, exclude_max=True) | st.sampled_from([1.0 - 1e-9, 0.3, 0.5]),
        st.integers(1, 5),
    ),
)
def test_the_scale_is_torchs_to_the_bit_for_any_options(found, options, device):
    logs = []
    for scaler_class in (amp_ext.GradScaler, torch.amp.GradScaler):
        scaler, log = scaler_class(device.type, *options), []
        scaler.scale(torch.ones((), device=device))
        for value in found:
            where = {device: torch.full((), value, device=device)}
            scaler._per_optimizer_states[0]["found_inf_per_device"] = where
            scaler.update()
            log.append(scaler.state_dict())
        logs.append(log)
    assert logs[0] == logs[1]


# What is set by hand.

SCALE = 2.0**10
OURS = makers(ours, EACH_CLASS, "our")


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("found", [None, 0.0, 1.0, 2.0, 3.0, -1], ids=str)
@pytest.mark.parametrize("scale", [None, SCALE], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_attributes_may_be_set_by_hand(make, found, scale, shape, device):
    """An int skips as well. Of the int 0, see ``test_hand_over.py``."""
    optimizer = make(new_params(device))
    full = isinstance(found, float)
    optimizer.found_inf = torch.full(shape, found, device=device) if full else found
    optimizer.grad_scale = None if scale is None else torch.full(shape, scale, device=device)
    for step in range(2):
        give_new_grads(params_of(optimizer), step, factor=scale or 1.0)
        optimizer.step()
    expected = plain(make, [] if found else [0, 1], device)
    assert all(map(same_bits, params_of(optimizer), params_of(expected)))
