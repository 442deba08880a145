"""Tests of any sequence of clean and overflowing steps, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import optimizer_cases as cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizer_cases import FEW_OPTIMIZERS, Optimizer, optimizers_named, ours, params_of, theirs
from reference import same_bits
from torch import Tensor
from torch.nn import Parameter

import amp_ext

OPTIMIZERS = [
    pytest.param(package(name), options | switches, id=f"{prefix}-{row.id}")
    for prefix, package, switches, chosen in (
        ("our", ours, {}, [*FEW_OPTIMIZERS, *optimizers_named("adam-decay", "nesterov-decay")]),
        ("loop", theirs, {"foreach": False}, optimizers_named("adam-decay", "momentum")),
        ("fused", theirs, {"fused": True}, optimizers_named("adamw")),
    )
    for row in chosen
    for name, options in [row.values]
]
BAD = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
SIZE = 11

# What happens in one iteration: a clean step, or the value that overflows and where.
iterations = st.one_of(
    st.just(None), st.tuples(st.sampled_from(sorted(BAD)), st.integers(0, 2 * SIZE - 1))
)
# And whether unscale_ is called before the step.
sequences = st.lists(st.tuples(iterations, st.booleans()), min_size=1, max_size=9)
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


def new_optimizer(optimizer_class: type, options: dict[str, Any], device: Any) -> Optimizer:
    draw = torch.Generator().manual_seed(7)
    params = [Parameter(torch.randn(SIZE, generator=draw).to(device)) for _ in range(2)]
    return optimizer_class(params, **options)


def new_grads(step: int, device: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(SIZE, generator=draw).to(device) for _ in range(2)]


def train(
    scaler: Any, optimizer: Optimizer, sequence: list[Any], device: Any
) -> list[dict[str, Any]]:
    """Returns the scaler's state after each step."""
    params, log = params_of(optimizer), []
    for step, (overflow, unscale_first) in enumerate(sequence):
        for param, grad in zip(params, scaler.scale(new_grads(step, device)), strict=True):
            param.grad = grad
        if overflow is not None:
            value, place = overflow
            params[place // SIZE].grad[place % SIZE] = BAD[value]
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        log.append(scaler.state_dict())
    return log


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
@repeatable
@given(sequence=sequences, scaler=scaler_options)
def test_overflowing_steps_might_as_well_not_have_been(
    optimizer_class, options, sequence, scaler, device
):
    """All scales are powers of two, so scaling and unscaling lose nothing: bits must agree."""
    actual, torchs, expected = (new_optimizer(optimizer_class, options, device) for _ in range(3))
    log = train(amp_ext.GradScaler(device.type, **scaler), actual, sequence, device)
    assert log == train(torch.amp.GradScaler(device.type, **scaler), torchs, sequence, device)
    for step, (overflow, _) in enumerate(sequence):
        if overflow is None:
            for param, grad in zip(params_of(expected), new_grads(step, device), strict=True):
                param.grad = grad
            expected.step()
    assert all(map(same_bits, params_of(actual), params_of(expected)))
    assert all(map(same_bits, params_of(torchs), params_of(expected)))
    if any(overflow is None for overflow, _ in sequence):
        cases.assert_same_bits(actual, expected)


@pytest.mark.filterwarnings("ignore:.*inverse is not finite")
@repeatable
@given(
    found=st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=1, max_size=40),
    options=st.tuples(  # scale, growth, backoff, interval
        st.floats(1e-30, 1e38),
        st.floats(1, 1e9, exclude_min=True),
        st.floats(1e-9, 1, exclude_max=True),
        st.integers(0, 5),
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
