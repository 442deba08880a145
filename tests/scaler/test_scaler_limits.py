"""Tests of what ``GradScaler`` adds to torch's rules: limits, a static scale and hysteresis."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import io
import pickle
import random
from typing import Any

import pytest
import scaler_cases as cases
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scaler_cases import INF, NAN, TorchScaler, as_torch, error_of, filled, params_of, ready, scales
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

    def hysteresis_tracker(self) -> int:
        """Returns how many overflows are left until one backs off, that one included."""
        return max(self.hysteresis - self.overflows_since_growth, 1)


# The rules


LIMITS_OF_ONE = {"growth_interval": 1, "min_scale": 4.0, "max_scale": 4.0}
STATIC = {"growth_interval": 1, "dynamic": False}


@pytest.mark.parametrize(
    ("options", "sequence", "expected"),
    [
        pytest.param({}, "xx.", [2, 1, 1], id="torchs-rules"),
        pytest.param({"growth_interval": 3}, ".......", [4, 4, 8, 8, 8, 16, 16], id="growth"),
        pytest.param({"min_scale": 3.0}, "xxx", [3, 3, 3], id="backs-off-to-the-minimum"),
        pytest.param({"min_scale": 4.0}, "x.", [4, 4], id="starts-at-the-minimum"),
        pytest.param({"min_scale": 0.0}, "xx", [2, 1], id="a-minimum-of-zero"),
        pytest.param({"min_scale": 1, "growth_interval": 1}, "xxx..", [2, 1, 1, 2, 4], id="again"),
        pytest.param({"max_scale": 10, "growth_interval": 1}, "...x", [8, 10, 10, 5], id="maximum"),
        pytest.param({"max_scale": 4, "growth_interval": 1}, "..x.", [4, 4, 2, 4], id="at-maximum"),
        pytest.param({"max_scale": INF, "growth_interval": 1}, "..", [8, 16], id="no-maximum"),
        pytest.param(LIMITS_OF_ONE, ".x.", [4, 4, 4], id="no-room-between-the-limits"),
        pytest.param(STATIC, "..xx.", [4, 4, 4, 4, 4], id="static"),
        pytest.param(STATIC | {"hysteresis": 2}, "xxx.", [4] * 4, id="static-with-hysteresis"),
        pytest.param({"hysteresis": 3}, "xxxxx", [4, 4, 2, 1, 0.5], id="from-the-third-on"),
        pytest.param({"hysteresis": 3}, "x.x.x.x", [4, 4, 4, 4, 2, 2, 1], id="not-in-a-row"),
        pytest.param(
            {"hysteresis": 2, "growth_interval": 2},
            "xx.x..xx",
            [4, 2, 2, 1, 1, 2, 2, 1],
            id="a-growth-refills",
        ),
        pytest.param(
            {"hysteresis": 2, "growth_interval": 3}, "x..x", [4, 4, 4, 2], id="clean-steps-do-not"
        ),
        pytest.param(
            {"hysteresis": 2, "growth_interval": 1, "max_scale": 4.0},
            "x..x",
            [4, 4, 4, 2],
            id="nor-does-a-growth-that-the-maximum-forbids",
        ),
        pytest.param(
            {"hysteresis": 2, "growth_interval": 2}, ".x.x", [4, 4, 4, 2], id="the-count-restarts"
        ),
        pytest.param({"hysteresis": 2, "min_scale": 3}, "xxxx", [4, 3, 3, 3], id="both"),
        pytest.param(
            {"init_scale": LARGEST, "max_scale": 1e300, "growth_interval": 1},
            ".",
            [LARGEST],
            id="a-maximum-above-float32",
        ),
        pytest.param(
            {"backoff_factor": 1e-30, "min_scale": 2.0**-14}, "xxx", [2.0**-14] * 3, id="never-zero"
        ),
        pytest.param({"growth_interval": 2, "min_scale": 0.3, "max_scale": 77.7}, "", [], id="any"),
        pytest.param(
            {"growth_interval": 2, "growth_factor": 1.7, "backoff_factor": 0.3, "max_scale": 1e6},
            "",
            [],
            id="factors-that-round",
        ),
        pytest.param(
            {"growth_interval": 2, "init_scale": 2.0**126, "min_scale": 2.0**120},
            "....",
            [2.0**126, *[2.0**127] * 3],
            id="near-the-largest",
        ),
    ],
)
def test_the_scale_follows_the_overflows(options, sequence, expected, device):
    rules, scaler = Rules(**options), ready(device, **options)
    assert scales(scaler, sequence, device) == expected
    assert [rules.update(letter == "x") for letter in sequence] == expected
    draw = random.Random(0)
    for _ in range(20):
        longer = "".join(draw.choices(".x", [0.65, 0.35], k=10))
        assert scales(scaler, longer, device) == [rules.update(letter == "x") for letter in longer]
        assert_follows(scaler, rules)


def assert_follows(scaler, rules):
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (rules.scale, rules.clean_steps)
    assert state.get("_hysteresis_tracker", 1) == rules.hysteresis_tracker()


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


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    options=options_of_scalers,
    before=st.text("..x", max_size=12),
    after=st.text("..x", max_size=12),
    how=st.sampled_from(["as it is", "state dict", "pickle", "deepcopy"]),
)
def test_any_sequence_follows_the_rules_and_checkpoints(device, options, before, after, how):
    rules = Rules(**options)
    scaler = ready(device, **options)
    assert scales(scaler, before, device) == [rules.update(letter == "x") for letter in before]
    if how == "state dict":
        state = scaler.state_dict()
        scaler = amp_ext.GradScaler(device.type, **options)
        scaler.load_state_dict(state)
    elif how != "as it is":
        scaler = pickle.loads(pickle.dumps(scaler)) if how == "pickle" else copy.deepcopy(scaler)
    assert scales(scaler, after, device) == [rules.update(letter == "x") for letter in after]
    assert_follows(scaler, rules)


@as_torch
def test_any_walk_through_updates_and_setters_is_torchs(scaler_class, device):
    draw, optimizer = random.Random(1), filled(1.0, device)
    scaler, log = ready(device, scaler_class, init_scale=0.1, growth_interval=2), []
    for _ in range(300):
        kind = draw.randrange(12)
        if kind == 0:
            scaler.set_growth_interval(draw.randrange(1, 5))
        elif kind == 1:
            scaler.set_growth_factor(draw.uniform(1.1, 3))
        elif kind == 2:
            scaler.set_backoff_factor(draw.uniform(0.1, 0.9))
        elif kind == 3:
            scaler.update(draw.uniform(1, 1e6))
        else:
            scaler.step(optimizer)
            cases.set_recorded(scaler, optimizer, draw.choice([0, 0, 0, 1]))
            scaler.update()
        log.append(scaler.state_dict())
    return log


def test_growth_comes_when_the_counter_equals_the_interval(device):
    scaler = ready(device, growth_interval=3)
    scaler._growth_tracker.fill_(3)
    assert scales(scaler, ".", device) == [4]
    assert scaler._get_growth_tracker() == 4


@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_any_number_of_overflowing_optimizers_is_one_backoff(bad, device):
    optimizers = [filled(1.0, device, make) for make in cases.OPTIMIZERS]
    for index in bad:
        cases.grads_of(optimizers[index])[0][1] = INF
    scaler, found = ready(device, hysteresis=2), []
    for _ in range(3):
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    assert found == [4, 2, 1]
    changed = [bool((params_of(optimizer)[0] != 1).any()) for optimizer in optimizers]
    assert changed == [index not in bad for index in range(3)]


def test_a_static_scale_skips_overflows_and_counts_nothing(device):
    scaler = ready(device, dynamic=False, growth_interval=3)
    optimizer = amp_ext.optim.SGD(cases.new_params(device, 1), lr=1.0)
    for bad, expected in (([], 0.75), ([0], 0.75), ([], 0.5), ([], 0.25)):
        cases.iterate(scaler, optimizer, bad=bad)
        assert params_of(optimizer)[0].tolist() == [expected] * 5
        assert scaler.last_step_skipped(optimizer, wait=True) is bool(bad)
    assert scaler.state_dict() == TorchScaler("cpu", 4.0, growth_interval=3).state_dict()
    scaler.update(16.0)
    assert scales(scaler, "x.", device) == [16, 16]
    assert scales(pickle.loads(pickle.dumps(scaler)), "x...", device) == [16] * 4


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


@pytest.mark.parametrize(
    ("smallest", "largest"),
    [(8, None), (-1, None), (NAN, None), (INF, None), (None, 2), (None, 0), (None, NAN), (5, 3)],
)
def test_limits_that_do_not_enclose_the_scale_are_refused(smallest, largest):
    options = {"init_scale": 4.0, "min_scale": smallest, "max_scale": largest}
    with pytest.raises(
        ValueError,
        match="^GradScaler: init_scale must lie between min_scale and max_scale, got "
        f"init_scale=4.0, min_scale={smallest}, max_scale={largest}$",
    ):
        amp_ext.GradScaler("cpu", **options)
    assert not amp_ext.GradScaler("cpu", **options, enabled=False).is_enabled()


@pytest.mark.parametrize("count", [0, -3, 1.5, 0.5, NAN, None, "2"], ids=repr)
@pytest.mark.parametrize("name", ["hysteresis", "warn_after"])
def test_counts_that_are_none_are_refused(name, count):
    with pytest.raises(ValueError, match=rf"^GradScaler: {name} must be an int of at least 1, got"):
        amp_ext.GradScaler("cpu", **{name: count})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hysteresis_tracker": None}, "must be given with a hysteresis of 3, got None"),
        ({"hysteresis_tracker": torch.ones(())}, "must be Int, got Float"),
        ({"hysteresis_tracker": torch.ones(2).int()}, r"must be one element, got sizes \[2\]"),
        ({"first_nonfinites": [torch.zeros(()).int()]}, "must be Long, got Int"),
    ],
    ids=["no-tracker", "float-tracker", "two-trackers", "int-first"],
)
def test_bad_tensors_are_named_and_nothing_is_written(change, text):
    scale, growth_tracker = torch.full((), 4.0), torch.zeros((), dtype=torch.int32)
    arguments: dict[str, Any] = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1,
        "hysteresis": 3,
        "hysteresis_tracker": torch.ones((), dtype=torch.int32),
    }
    name = "hysteresis_tracker" if "hysteresis_tracker" in change else r"first_nonfinites\[0\]"
    with pytest.raises(RuntimeError, match=f"^update_scale_: {name} {text}"):
        ops.update_scale_(scale, growth_tracker, [torch.zeros(())], **arguments | change)
    assert (scale.item(), growth_tracker.item()) == (4, 0)


# State dict, pickle, copy


def test_the_state_dict_has_torchs_keys_and_the_hysteresis_only_if_there_is_one(device):
    torchs_keys = list(TorchScaler("cpu").state_dict())
    plain = ready(device, min_scale=1.0, max_scale=8.0, dynamic=False, hysteresis=1, warn_after=3)
    assert list(plain.state_dict()) == torchs_keys
    patient = ready(device, hysteresis=3)
    assert list(patient.state_dict()) == [*torchs_keys, "_hysteresis_tracker"]
    scales(patient, "x", device)
    state = patient.state_dict()
    assert state["_hysteresis_tracker"] == 2
    assert {type(value) for value in state.values()} == {float, int}


def test_the_hysteresis_is_in_the_state_dict_before_the_first_scale():
    scaler = amp_ext.GradScaler("cpu", hysteresis=3)
    assert scaler.state_dict()["_hysteresis_tracker"] == 3
    scaler.load_state_dict(scaler.state_dict() | {"_hysteresis_tracker": 2})
    assert scaler.state_dict()["_hysteresis_tracker"] == 2
    assert scales(scaler, "xx") == [65536, 32768]


@pytest.mark.parametrize("made", [False, True], ids=["before-its-tensors", "with-its-tensors"])
@pytest.mark.parametrize(
    ("hysteresis", "saved", "expected"),
    [
        pytest.param(3, 3, [8, 8, 4], id="full"),
        pytest.param(3, 2, [8, 4, 2], id="one-used-up"),
        pytest.param(3, 1, [4, 2, 1], id="used-up"),
        pytest.param(2, 5, [8, 4, 2], id="more-than-it-has-itself"),
        pytest.param(1, 5, [4, 2, 1], id="has-none-itself"),
        pytest.param(3, None, [8, 8, 4], id="torchs"),
    ],
)
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


def test_a_state_with_hysteresis_loads_into_torchs_through_a_file():
    patient = ready(hysteresis=3, min_scale=2.0)
    scales(patient, ".x")
    file = io.BytesIO()
    torch.save(patient.state_dict(), file)
    file.seek(0)
    theirs = TorchScaler("cpu")
    theirs.load_state_dict(torch.load(file, weights_only=True))
    saved = patient.state_dict()
    assert saved.pop("_hysteresis_tracker") == 2
    assert theirs.state_dict() == saved
    patient.load_state_dict(theirs.state_dict())
    assert patient.state_dict() == saved | {"_hysteresis_tracker": 3}
    before = patient.state_dict()
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        patient.load_state_dict({})
    assert patient.state_dict() == before


def test_limits_stay_as_constructed_when_a_state_is_loaded(device):
    wide = ready(device, min_scale=0.5, max_scale=2.0**30)
    wide.load_state_dict(ready(device, min_scale=4.0, max_scale=4.0).state_dict())
    assert scales(wide, "xxxx", device) == [2, 1, 0.5, 0.5]


@pytest.mark.parametrize("made", [False, True], ids=["before-its-tensors", "with-its-tensors"])
@pytest.mark.parametrize(
    "duplicate", [lambda scaler: pickle.loads(pickle.dumps(scaler)), copy.copy, copy.deepcopy]
)
def test_a_duplicate_goes_on_alike_and_shares_nothing(duplicate, made, device):
    options = {"hysteresis": 3, "min_scale": 0.03, "max_scale": 0.2, "growth_interval": 2}
    options |= {"init_scale": 0.1, "growth_factor": 1.7, "backoff_factor": 0.3}
    rules, scaler = Rules(**options), amp_ext.GradScaler(device.type, **options)
    done, rest = "x." if made else "", "xxx....xxxx"
    assert scales(scaler, done, device) == [rules.update(letter == "x") for letter in done]
    twin = duplicate(scaler)
    assert type(twin) is amp_ext.GradScaler
    expected = [rules.update(letter == "x") for letter in rest]
    assert scales(twin, rest, device) == expected
    assert scales(scaler, rest, device) == expected
    assert twin.state_dict() == scaler.state_dict()


# update(new_scale)


NEW_SCALES = {
    "float": lambda device: 512.0,
    "int": lambda device: 512,
    "tensor": lambda device: torch.full((), 512.0, device=device),
    "one-element-vector": lambda device: torch.full((1,), 512.0, device=device),
    "matrix": lambda device: torch.full((1, 1), 512.0, device=device),
    "integer-tensor": lambda device: torch.tensor(512, device=device),
    "half": lambda device: torch.full((), 512.0, dtype=torch.float16, device=device),
    "double": lambda device: torch.full((), 512.0, dtype=torch.float64, device=device),
}


@pytest.mark.parametrize("kind", NEW_SCALES)
@pytest.mark.parametrize("value", [None, 1.0, INF], ids=["no-step", "clean", "overflow"])
def test_a_new_scale_replaces_the_rules_for_one_update(value, kind, device):
    scaler, new_scale = ready(device, growth_interval=2, hysteresis=2), NEW_SCALES[kind](device)
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


BAD_TENSORS = [torch.ones(2), torch.ones(0), torch.ones((), device="meta")]
BAD_TENSORS += [torch.ones((), requires_grad=True)]


@pytest.mark.parametrize("new_scale", [*BAD_TENSORS, "much", [2.0]])
def test_a_bad_new_scale_is_refused_and_the_iteration_can_still_be_updated(new_scale):
    scaler, optimizer = ready(), filled(INF)
    scaler.step(optimizer)
    if isinstance(new_scale, Tensor):
        text = error_of(AssertionError, ready(scaler_class=TorchScaler).update, new_scale)
        assert error_of(AssertionError, scaler.update, new_scale) == text
    else:
        with pytest.raises((TypeError, ValueError)):
            scaler.update(new_scale)
    assert (scaler.get_scale(), scaler.stats().updates) == (4, 0)
    scaler.update()
    assert scaler.get_scale() == 2
    assert (scaler.stats().updates, scaler.stats().last_nonfinite) == (1, "group 0, param 0")
