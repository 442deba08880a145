"""What ``GradScaler`` refuses in Python alone, which changes nothing, beside ``refused_calls``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.refused_calls import A_SCALE, RANGES
from harness.scaler_cases import INF, filled, ready

import amp_ext

DEVICE = "device must be a type of device such as 'cuda' or 'cpu', got"
LIMITS = "min_scale, max_scale, dynamic and hysteresis need device 'cuda' or 'cpu', got 'xpu'"
ONLY_LIMITED = {"min_scale": 1.0, "max_scale": 2.0**20, "dynamic": False, "hysteresis": 2}
NO_NUMBERS = {"init_scale": "4", "min_scale": "1", "max_scale": [1], "growth_factor": "2"}
NO_NUMBERS |= {"backoff_factor": None, "growth_interval": 2.0, "hysteresis": 1.5}
NO_NUMBERS |= {"warn_after": True}


def no_number(name: str, value: Any) -> str:
    return f"{name} must be {RANGES[name]}, got {value!r}"


# Arguments, and the error.
CONSTRUCTORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"device": name}, ValueError, f"{DEVICE} {name!r}") for name in ("1024", "gpu")),
    *(
        ({"device": value}, TypeError, f"{DEVICE} {value!r}. Pass the scale as init_scale=.")
        for value in (2.0**10, True, None)
    ),
    ({"enabled": "no"}, TypeError, "enabled must be a bool, got 'no'"),
    ({"dynamic": "no"}, TypeError, "dynamic must be a bool, got 'no'"),
    *(({name: value}, TypeError, no_number(name, value)) for name, value in NO_NUMBERS.items()),
    *(({"device": "xpu", name: value}, ValueError, LIMITS) for name, value in ONLY_LIMITED.items()),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), CONSTRUCTORS)
def test_what_sets_no_scaler_is_named(arguments, kind, text):
    arguments = {"device": "cpu"} | arguments
    with pytest.raises(kind) as caught:
        amp_ext.GradScaler(**arguments)
    assert (caught.type, str(caught.value)) == (kind, f"GradScaler: {text}")
    if "enabled" not in arguments:
        assert not amp_ext.GradScaler(**arguments, enabled=False).is_enabled()


ONE, LINEAR = torch.ones(()), torch.nn.Linear(1, 1)
SAVED = amp_ext.GradScaler("cpu", hysteresis=3).state_dict()
OF_SGD = torch.optim.SGD([ONE], lr=0.1).state_dict()
# Entries in no range, beside those of refused_calls.
DAMAGED = {"scale": torch.ones(2), "backoff_factor": torch.nan, "growth_interval": 2**63}
DAMAGED |= {"_growth_tracker": 2**31, "_hysteresis_tracker": "2"}
STATE_DICTS: list[tuple[Any, type[Exception], str]] = [
    ("a.pt", TypeError, "be a dict, got 'a.pt': read the file with torch.load first"),
    (LINEAR, TypeError, "be a dict, got Linear"),
    (OF_SGD, KeyError, "have 'scale', got ['state', 'param_groups']"),
    (LINEAR.state_dict(), KeyError, "have 'scale', got ['weight', 'bias']"),
    ({"a": OF_SGD, "b": SAVED}, KeyError, "have 'scale', got ['a', 'b']"),
    ({"scale": 4.0}, KeyError, "have 'growth_factor', got ['scale']"),
]
NO_OPTIMIZER = "optimizer must have param_groups, as a torch.optim.Optimizer, got Linear"
NEW_SCALE = f"new_scale must be {A_SCALE}, got"
NEW_SCALES = [("much", TypeError), ([2.0], TypeError), (1j * ONE, TypeError), (-1.0, ValueError)]
NEW_SCALES += [(10**400, RuntimeError), (1e39, RuntimeError)]
METHODS = [
    *((name, LINEAR, TypeError, NO_OPTIMIZER) for name in ("step", "unscale_")),
    ("last_step_skipped", LINEAR, TypeError, NO_OPTIMIZER),
    ("set_growth_factor", "2", TypeError, no_number("growth_factor", "2")),
    ("set_backoff_factor", "2", TypeError, no_number("backoff_factor", "2")),
    ("set_growth_interval", "2", TypeError, no_number("growth_interval", "2")),
    *(
        ("load_state_dict", given, kind, f"state_dict must {text}")
        for given, kind, text in STATE_DICTS
    ),
    *(
        ("load_state_dict", SAVED | {name: value}, ValueError, no_number(name, value))
        for name, value in DAMAGED.items()
    ),
    *(("update", new_scale, kind, NEW_SCALE) for new_scale, kind in NEW_SCALES),
]


@pytest.mark.parametrize(("name", "argument", "kind", "text"), METHODS)
def test_what_is_refused_changes_nothing_and_the_iteration_goes_on(name, argument, kind, text):
    scaler, optimizer = ready(hysteresis=3), filled(INF)
    scaler.step(optimizer)
    loads = name == "load_state_dict"
    for each in (scaler, *[amp_ext.GradScaler("cpu", hysteresis=3)] * loads):
        before = each.state_dict()
        with pytest.raises(kind) as caught:
            getattr(each, name)(argument)
        assert caught.type is kind
        assert caught.value.args[0].startswith(f"GradScaler.{name}: {text}")
        assert each.state_dict() == before
    assert list(scaler._per_optimizer_states) == [id(optimizer)]
    assert scaler.stats().updates == 0
    scaler.update()
    assert scaler.state_dict() == {**SAVED, "scale": 4.0, "_hysteresis_tracker": 2}
    assert (scaler.stats().updates, scaler.stats().last_nonfinite) == (1, "group 0, param 0")


NOT_ONE_NUMBER = torch.ones(2), torch.ones(0), torch.ones((), requires_grad=True)


@pytest.mark.parametrize("new_scale", [*NOT_ONE_NUMBER, torch.ones((), device="meta")])
def test_a_tensor_that_torch_does_not_take_leaves_the_iteration_as_it_was(new_scale):
    scaler = ready()
    scaler.step(filled(INF))
    with pytest.raises(AssertionError, match=r"^new_scale should be a float or a 1-element torch"):
        scaler.update(new_scale)
    assert (scaler.get_scale(), scaler.stats().updates) == (4, 0)
    scaler.update()
    assert scaler.get_scale() == 2


def test_a_scaler_that_is_disabled_is_given_anything_and_knows_its_options():
    """torch's raises AttributeError here until a setter was called."""
    scaler = amp_ext.GradScaler("cpu", 8.0, 3.0, 0.25, 7, enabled=0, dynamic="no", hysteresis=3)
    options = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert options == (3.0, 0.25, 7)
    assert scaler._get_scale_async() is None
    scaler.set_growth_interval(-5)
    scaler.update(-1.0)
    for given, _, _ in STATE_DICTS:
        scaler.load_state_dict(given)
    assert scaler.get_growth_interval() == -5
