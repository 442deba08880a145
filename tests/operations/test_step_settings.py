"""Settings of an optimizer class that are not part of its state: what keeps them and what not."""

from __future__ import annotations

import math

import pytest
import torch
from harness import optimizer_cases as cases
from harness.awkward import BF16, F32
from harness.optimizer_cases import give_grads, make_params, ours, params_of
from harness.reference import same_bits

# A setting, its default, one that shows in a step, and a third.
SKIP = ("skip_nonfinite", False, True, False)
FLOOR = ("denominator_floor", 0.0, 4.0, 0.25)
each_setting = pytest.mark.parametrize(
    ("name", "options", "setting"),
    [
        pytest.param(*row.values, setting, id=f"{row.id}-{setting[0]}")
        for row in cases.EACH_CLASS
        for setting in (SKIP, FLOOR)
        if setting is SKIP or "adam" in row.id
    ],
)


def give_grads_with_nan(*sides: list[torch.nn.Parameter]) -> None:
    give_grads(*sides)
    for params in sides:
        params[0].grad[5] = math.nan


@each_setting
def test_a_checkpoint_does_not_change_the_setting(name, options, setting):
    key, default, value, other_value = setting
    for mine in {default, value}:
        optimizer = ours(name)(make_params(F32), **{key: mine}, **options)
        other_value = not mine if isinstance(mine, bool) else other_value
        theirs = [(cases.theirs(name), {})] if name in cases.IN_TORCH else []
        for source, more in [(ours(name), {key: other_value}), *theirs]:
            other = source(cases.twins(params_of(optimizer)), **more, **options)
            give_grads(params_of(other))
            other.step()
            optimizer.load_state_dict(other.state_dict())
            assert optimizer.param_groups[0][key] == mine
            assert optimizer.defaults[key] == mine
        assert optimizer.state_dict()["param_groups"][0][key] == mine


@cases.COPIES
@each_setting
def test_copies_keep_the_setting(name, options, setting, copied):
    key, _, value, _ = setting
    optimizer = ours(name)(make_params(BF16), **{key: value}, max_grad_norm=1.0, **options)
    plain = ours(name)(cases.twins(params_of(optimizer)), max_grad_norm=1.0, **options)
    give = give_grads_with_nan if setting is SKIP else give_grads
    give(params_of(optimizer), params_of(plain))
    optimizer.step()
    plain.step()
    other = copied(optimizer)
    give(params_of(optimizer), params_of(other), params_of(plain))
    for each in (optimizer, other, plain):
        each.step()
    cases.assert_same_bits(other, optimizer)
    assert all(param.isfinite().all() for param in params_of(other))
    assert not same_bits(params_of(plain)[0], params_of(optimizer)[0])


@each_setting
def test_an_optimizer_of_an_older_file_has_the_default(name, options, setting):
    key, default, *_ = setting
    optimizer = ours(name)(make_params(F32), **options)
    plain = ours(name)(cases.twins(params_of(optimizer)), **{key: default}, **options)
    state = optimizer.__getstate__()
    for group in state["param_groups"]:
        del group[key]
    optimizer.__setstate__(state)
    give_grads_with_nan(params_of(optimizer), params_of(plain))
    optimizer.step()
    plain.step()
    cases.assert_same_bits(optimizer, plain)
