"""Tests of what ``GradScaler`` adds to torch's rules: limits, a static scale and hysteresis."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from harness.rows import rows
from harness.scaler_cases import INF, TorchScaler, filled, ready, scales
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import amp_ext
from amp_ext import ops

LARGEST = torch.finfo(torch.float32).max


def in_float32(number: float) -> float:
    return ctypes.c_float(number).value


@dataclasses.dataclass
class Rules:
    """What the scale should be, in Python: the same names as the scaler's arguments."""

    init_scale: float = 4.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    dynamic: bool = True
    hysteresis: int = 1

    def __post_init__(self) -> None:
        self.scale = in_float32(self.init_scale)
        self.clean_steps = 0
        self.overflows_since_growth = 0

    def update(self, overflow: bool) -> float:
        """Counts one iteration and returns the scale after it."""
        if not self.dynamic:
            return self.scale
        if overflow:
            self.clean_steps = 0
            self.overflows_since_growth += 1
            if self.overflows_since_growth >= self.hysteresis:
                lowest = 0.0 if self.min_scale is None else min(self.min_scale, self.scale)
                self.scale = in_float32(max(self.scale * self.backoff_factor, lowest))
            return self.scale
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.clean_steps = 0
            highest = INF if self.max_scale is None else self.max_scale
            grown = in_float32(min(self.scale * self.growth_factor, highest))
            if self.scale < grown < INF:
                self.scale = grown
                self.overflows_since_growth = 0
        return self.scale

    def scales(self, sequence: str) -> list[float]:
        """Returns the scale after each iteration of a sequence: "x" overflows, "." does not."""
        return [self.update(letter == "x") for letter in sequence]


# The rules


AT_THE_LARGEST = {"init_scale": LARGEST, "max_scale": 1e300, "growth_interval": 1}
NEAR_THE_LARGEST = {"init_scale": 2.0**126, "min_scale": 2.0**120, "growth_interval": 2}
SEQUENCES = {
    "backs-off-to-the-minimum": ({"min_scale": 3.0}, "xxx.", [3, 3, 3, 3]),
    "maximum": ({"growth_interval": 1, "max_scale": 10}, "...x", [8, 10, 10, 5]),
    "static": ({"growth_interval": 1, "dynamic": False}, "..xx.", [4, 4, 4, 4, 4]),
    "refills": (
        {"growth_interval": 2, "hysteresis": 2},
        "xx.x..xx",
        [4, 2, 2, 1, 1, 2, 2, 1],
    ),
    "a-maximum-above-float32": (AT_THE_LARGEST, ".", [LARGEST]),
    "near-the-largest": (NEAR_THE_LARGEST, "....", [2**126, *[2**127] * 3]),
}


@pytest.mark.parametrize(("options", "sequence", "expected"), rows(SEQUENCES))
def test_the_scale_follows_the_overflows(options, sequence, expected, device):
    rules, scaler = Rules(**options), ready(device, **options)
    assert scales(scaler, sequence, device) == rules.scales(sequence) == expected
    assert_follows(scaler, rules)


def assert_follows(scaler, rules):
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (rules.scale, rules.clean_steps)
    overflows_left = max(rules.hysteresis - rules.overflows_since_growth, 1)
    assert state.get("_hysteresis_tracker", 1) == overflows_left


FIXTURE_ONCE = [HealthCheck.function_scoped_fixture]
options_of_scalers = st.fixed_dictionaries(
    {
        "init_scale": st.floats(1.0, 2.0**20, width=32),
        "growth_factor": st.floats(1.125, 8.0),
        "backoff_factor": st.floats(0.125, 0.875),
        "growth_interval": st.integers(1, 4),
        "min_scale": st.none() | st.floats(0.0, 1.0),
        "max_scale": st.none() | st.floats(2.0**20, 2.0**24),
        "dynamic": st.sampled_from([True, True, True, False]),
        "hysteresis": st.integers(1, 4),
    }
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=FIXTURE_ONCE)
@given(
    options=options_of_scalers,
    before=st.text("..x", max_size=12),
    after=st.text("..x", max_size=12),
)
def test_any_sequence_follows_the_rules_and_checkpoints(device, options, before, after):
    rules, scaler = Rules(**options), ready(device, **options)
    assert scales(scaler, before, device) == rules.scales(before)
    loaded = amp_ext.GradScaler(device.type, **options)
    loaded.load_state_dict(scaler.state_dict())
    for each in (loaded, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), scaler):
        of_each = copy.copy(rules)
        assert_follows(each, of_each)
        assert scales(each, after, device) == of_each.scales(after)
        assert_follows(each, of_each)


@pytest.mark.filterwarnings("ignore:.*inverse is not finite")
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=FIXTURE_ONCE)
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


def test_a_scale_below_the_minimum_does_not_rise_at_an_overflow(device):
    """It may stand there after ``update(new_scale)``, or out of another scaler's state."""
    scaler = ready(device, init_scale=1024.0, min_scale=256.0, growth_interval=1)
    scaler.update(1.0)
    assert scales(scaler, "x..", device) == [1, 2, 4]
    loaded = ready(device, init_scale=1024.0, min_scale=256.0)
    loaded.load_state_dict(TorchScaler("cpu", init_scale=8.0).state_dict())
    assert scales(loaded, "xx", device) == [8, 8]


def test_a_scale_above_the_maximum_falls_and_does_not_grow(device):
    scaler = ready(device, max_scale=8.0, growth_interval=1)
    scaler.update(64.0)
    assert scales(scaler, ".xxxxx.", device) == [64, 32, 16, 8, 4, 2, 4]


# Arguments


def test_a_hysteresis_without_its_tracker_is_refused_before_anything_is_written():
    scale, growth_tracker = torch.full((), 4.0), torch.zeros((), dtype=torch.int32)
    options: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}
    wanted = "^update_scale_: hysteresis_tracker must be given with a hysteresis of 3, got None"
    with pytest.raises(RuntimeError, match=wanted):
        ops.update_scale_(scale, growth_tracker, [torch.zeros(())], **options, hysteresis=3)
    assert (scale.item(), growth_tracker.item()) == (4, 0)


# State dict, pickle, copy


def test_the_state_dict_has_torchs_keys_and_the_hysteresis_only_if_there_is_one(device):
    torchs_keys = list(TorchScaler("cpu").state_dict())
    plain = ready(device, min_scale=1.0, max_scale=8.0, dynamic=False, hysteresis=1, warn_after=3)
    assert list(plain.state_dict()) == torchs_keys
    for patient in (ready(device, hysteresis=3), amp_ext.GradScaler(device.type, hysteresis=3)):
        state = patient.state_dict()
        assert list(state) == [*torchs_keys, "_hysteresis_tracker"]
        assert {type(value) for value in state.values()} == {float, int}


SAVED = {
    "full": (3, 3, [8, 8, 4]),
    "one-used-up": (3, 2, [8, 4, 2]),
    "used-up": (3, 1, [4, 2, 1]),
    "more-than-it-has-itself": (2, 5, [8, 4, 2]),
    "has-none-itself": (1, 5, [4, 2, 1]),
    "torchs": (3, None, [8, 8, 4]),
}


@pytest.mark.parametrize("made", [False, True], ids=["before-its-tensors", "with-its-tensors"])
@pytest.mark.parametrize(("hysteresis", "saved", "expected"), rows(SAVED))
def test_the_hysteresis_goes_on_where_it_was_saved(hysteresis, saved, expected, made, device):
    state = TorchScaler("cpu", init_scale=8.0).state_dict()
    if saved is not None:
        state["_hysteresis_tracker"] = saved
    scaler = amp_ext.GradScaler(device.type, hysteresis=hysteresis)
    if made:
        scaler.scale(torch.ones((), device=device))
        scales(scaler, "xx", device)
    scaler.load_state_dict(state)
    assert scales(scaler, "xxx", device) == expected


def test_limits_stay_as_constructed_when_a_state_is_loaded(device):
    wide = ready(device, min_scale=0.5, max_scale=2.0**30)
    wide.load_state_dict(ready(device, min_scale=4.0, max_scale=4.0).state_dict())
    assert scales(wide, "xxxx", device) == [2, 1, 0.5, 0.5]


# update(new_scale)


FULL = torch.tensor(512.0)
NEW_SCALES = [512.0, 512, FULL, FULL.view(1, 1), FULL.long(), FULL.double()]


@pytest.mark.parametrize("new_scale", NEW_SCALES, ids=repr)
@pytest.mark.parametrize("value", [None, 1.0, INF], ids=["no-step", "clean", "overflow"])
def test_a_new_scale_replaces_the_rules_for_one_update(value, new_scale, device):
    scaler = ready(device, growth_interval=2, hysteresis=2)
    if isinstance(new_scale, Tensor):
        new_scale = new_scale.to(device, copy=True)
    scales(scaler, ".", device)
    scale, optimizer = scaler._scale, filled(value or 1.0, device)
    if value is not None:
        scaler.step(optimizer)
    scaler.update(new_scale)
    if isinstance(new_scale, Tensor):
        new_scale.fill_(99)
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["_hysteresis_tracker"]) == (512, 1, 2)
    assert scaler._scale is scale
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states.clear()
    assert scales(scaler, ".", device) == [1024], "the count of clean iterations went on"
