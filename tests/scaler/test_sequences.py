"""Tests of any sequence of clean and overflowing steps, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import same_bits, tolerance
from torch import Tensor
from torch.nn import Parameter

import amp_ext

ADAM = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
LOOP, FUSED = {"foreach": False}, {"fused": True}

OPTIMIZERS = [
    pytest.param(torch.optim.Adam, ADAM | LOOP, id="adam-loop"),
    pytest.param(torch.optim.AdamW, ADAM | LOOP | {"amsgrad": True}, id="amsgrad-loop"),
    pytest.param(torch.optim.SGD, SGD | LOOP, id="sgd-loop"),
    pytest.param(torch.optim.Adam, ADAM | FUSED, id="adam-fused"),
    pytest.param(torch.optim.AdamW, ADAM | FUSED, id="adamw-fused"),
    pytest.param(amp_ext.optim.Adam, ADAM, id="our-adam"),
    pytest.param(amp_ext.optim.AdamW, ADAM | {"amsgrad": True}, id="our-amsgrad"),
    pytest.param(amp_ext.optim.SGD, SGD, id="our-sgd"),
    pytest.param(amp_ext.optim.SGD, SGD | {"nesterov": True}, id="our-nesterov"),
    pytest.param(
        amp_ext.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}, id="our-dampening"
    ),
]
BAD = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
SIZE = 11

# What happens in one iteration: a clean step, or the value that overflows and where.
iterations = st.one_of(
    st.just(None), st.tuples(st.sampled_from(sorted(BAD)), st.integers(0, 2 * SIZE - 1))
)
sequences = st.lists(iterations, min_size=1, max_size=9)
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


def new_params(device: Any) -> list[Parameter]:
    draw = torch.Generator().manual_seed(7)
    return [Parameter(torch.randn(SIZE, generator=draw).to(device)) for _ in range(2)]


def new_grads(step: int, device: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return [torch.randn(SIZE, generator=draw).to(device) for _ in range(2)]


def train(
    scaler: torch.amp.GradScaler,
    optimizer_class: type,
    options: dict[str, Any],
    sequence: list[tuple[str, int] | None],
    unscale_first: list[bool],
    device: Any,
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]:
    """Returns the parameters, the states of the optimizer and the scaler's state after each."""
    params, log = new_params(device), []
    optimizer = optimizer_class(params, **options)
    for step, (overflow, unscale) in enumerate(zip(sequence, unscale_first, strict=True)):
        for param, grad in zip(params, scaler.scale(new_grads(step, device)), strict=True):
            param.grad = grad
        if overflow is not None:
            value, place = overflow
            params[place // SIZE].grad[place % SIZE] = BAD[value]
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        log.append(scaler.state_dict())
    return params, states(optimizer), log


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [value for param in params for _, value in sorted(optimizer.state[param].items())]


def without_overflows(
    optimizer_class: type, options: dict[str, Any], sequence: list[Any], device: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns parameters and states of a loop of the clean steps that has no scaler."""
    params = new_params(device)
    optimizer = optimizer_class(params, **options)
    for step, overflow in enumerate(sequence):
        if overflow is None:
            for param, grad in zip(params, new_grads(step, device), strict=True):
                param.grad = grad
            optimizer.step()
    return params, states(optimizer)


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
@repeatable
@given(sequence=sequences, scaler=scaler_options, data=st.data())
def test_overflowing_steps_might_as_well_not_have_been(
    optimizer_class: type,
    options: dict[str, Any],
    sequence: list[tuple[str, int] | None],
    scaler: dict[str, Any],
    data: st.DataObject,
    device,
) -> None:
    """All scales are powers of two, so scaling and unscaling lose nothing: bits must agree."""
    count = len(sequence)
    unscale_first = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    case = optimizer_class, options, sequence, unscale_first, device
    params, kept, log = train(amp_ext.GradScaler(device.type, **scaler), *case)
    expected, expected_kept = without_overflows(optimizer_class, options, sequence, device)
    assert all(map(same_bits, params, expected))
    if any(overflow is None for overflow in sequence):
        assert all(map(same_bits, kept, expected_kept))

    torchs_params, _, torchs_log = train(torch.amp.GradScaler(device.type, **scaler), *case)
    assert log == torchs_log
    assert all(map(same_bits, params, torchs_params))

    loop_options = {k: v for k, v in options.items() if k != "fused"} | LOOP
    loop_class = getattr(torch.optim, optimizer_class.__name__)
    loop, _ = without_overflows(loop_class, loop_options, sequence, device)
    for param, wanted in zip(params, loop, strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(torch.float32, count))


@pytest.mark.filterwarnings("ignore:.*inverse is not finite")
@repeatable
@given(
    found=st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=1, max_size=40),
    init_scale=st.floats(1e-30, 1e38),
    growth_factor=st.floats(1, 1e9, exclude_min=True),
    backoff_factor=st.floats(1e-9, 1, exclude_max=True),
    growth_interval=st.integers(0, 5),
)
def test_the_scale_is_torchs_to_the_bit_for_any_options(
    found: list[float],
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    device,
) -> None:
    options = init_scale, growth_factor, backoff_factor, growth_interval
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
