"""Tests of any sequence of clean and overflowing steps, drawn by hypothesis."""

from __future__ import annotations

import pytest
import torch
from harness import optimizer_cases as cases
from harness.optimizer_cases import assert_same_bits, optimizers_named, ours, params_of, theirs
from harness.scaler_loop import ELEMENTS, makers, new_params, plain, under_scaler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import amp_ext

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
