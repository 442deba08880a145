"""``denominator_floor``: Adam divides by ``sqrt(max(v, floor)) + eps``, v the corrected moment."""

from __future__ import annotations

import math

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import BF16, F32, F64, FEW_DTYPES, SHAPES, Dtypes
from harness.optimizer_cases import give_grads, make_params, ours
from harness.reference import adam, assert_close, same_bits

with_and_without_amsgrad = pytest.mark.parametrize(
    "amsgrad", [{}, cases.AMSGRAD], ids=["adam", "amsgrad"]
)


@with_and_without_amsgrad
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_a_floor_changes_what_lies_below_it(device, dtypes, amsgrad):
    before = cases.build("adam_", amsgrad, SHAPES, dtypes, device)
    for options in ({"denominator_floor": 0.7, "eps": 0.0}, {"denominator_floor": 100.0}):
        lists, without = cases.copied(before), cases.copied(before)
        cases.run("adam_", lists, **options)
        cases.assert_is_the_formula("adam_", lists, before, **options)
        cases.run("adam_", without, **options | {"denominator_floor": 0.0})
        changed = lists["params"][-1] != without["params"][-1]
        assert changed.any()
        assert not changed.all() or "eps" not in options


@with_and_without_amsgrad
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_a_floor_of_0_or_below_all_moments_changes_no_bit(device, dtypes, amsgrad):
    plain = cases.build("adam_", amsgrad, cases.SMALL, dtypes, device)
    zero, low = cases.copied(plain), cases.copied(plain)
    cases.run("adam_", plain)
    cases.run("adam_", zero, denominator_floor=0.0)
    cases.run("adam_", low, denominator_floor=1e-12)
    cases.assert_same(zero, plain)
    cases.assert_same(low, plain)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_the_floor_stands_under_the_root_and_eps_outside(device, dtype):
    lists = cases.build("adam_", {}, [(3,)], Dtypes(dtype, dtype, dtype), device, step=0)
    for name, value in {"params": 0.0, "grads": 0.0, "exp_avgs": 1.25, "exp_avg_sqs": 0.0}.items():
        lists[name][0].fill_(value)
    # The first moment becomes 1, and 5 when it is corrected; the denominator 1 / 4 + 1.
    cases.run("adam_", lists, lr=0.5, eps=1.0, denominator_floor=1 / 16)
    assert_close(lists["params"][0], torch.full((3,), -0.5 * 5.0 / 1.25))


@with_and_without_amsgrad
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_zero_moments_without_eps_are_harmless(device, dtypes, amsgrad):
    lists = cases.build("adam_", amsgrad, [(5,), (70,)], dtypes, device, step=0)
    for name in lists.keys() - {"params", "master_params", "steps"}:
        torch._foreach_zero_(lists[name])
    spoiled, before = cases.copied(lists), cases.copied(lists)
    cases.run("adam_", lists, eps=0.0, denominator_floor=1e-12)
    assert all(map(same_bits, lists["params"], before["params"]))
    cases.run("adam_", spoiled, eps=0.0)
    assert all(param.isnan().all() for param in spoiled["params"])


@pytest.mark.parametrize("floor", [1e-12, 0.2, math.inf], ids=str)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_nan_passes_the_floor(device, dtypes, floor):
    for name in ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        amsgrad = cases.AMSGRAD if name == "max_exp_avg_sqs" else {}
        lists = cases.build("adam_", amsgrad, [(70,)], dtypes, device)
        lists[name][0][7] = math.nan
        cases.run("adam_", lists, denominator_floor=floor)
        assert lists["params"][0][7].isnan(), name
        assert lists["params"][0].isnan().sum() == 1, name


@pytest.mark.parametrize(("moment", "floor"), [(None, math.inf), (math.inf, 0.2)])
def test_an_infinite_floor_or_moment_moves_nothing(device, moment, floor):
    lists = cases.build("adam_", {}, [(70,)], cases.IN_FLOAT, device)
    if moment is not None:
        lists["exp_avg_sqs"][0].fill_(moment)
    before = cases.copied(lists)
    cases.run("adam_", lists, denominator_floor=floor)
    assert same_bits(lists["params"][0], before["params"][0])


# The optimizer classes.


@pytest.mark.parametrize("floor", [1e-12, 0.5, 4.0], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [("Adam", {"amsgrad": True, "maximize": True}), ("AdamW", {"weight_decay": 0.5})],
)
@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
def test_ten_steps_follow_the_formula(device, dtype, name, options, floor):
    (param,) = make_params(dtype, device, [(1025,)])
    mine = ours(name)([param], lr=0.05, denominator_floor=floor, **options)
    formula = {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "denominator_floor": floor}
    formula |= {"decoupled_weight_decay": name == "AdamW"} | options
    names = ["exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq"]
    names = names if formula.pop("amsgrad", False) else names[:3]
    expected = dict.fromkeys(names, torch.zeros_like(param)) | {"param": param.detach().double()}
    for _ in range(10):
        give_grads([param])
        moments = [expected[key] for key in names]
        expected = adam(expected["param"], param.grad, *moments, **formula)
        mine.step()
    for key, value in {"master_param": param, **mine.state[param]}.items():
        if key != "step":
            assert_close(value, expected[key.replace("master_param", "param")], steps=10, what=key)
    assert same_bits(param, mine.state[param].get("master_param", param).to(dtype))


def test_sgd_has_no_denominator():
    with pytest.raises(TypeError, match="denominator_floor"):
        ours("SGD")(make_params(F32), denominator_floor=1e-12)
