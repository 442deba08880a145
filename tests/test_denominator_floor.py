"""``denominator_floor``: Adam divides by ``sqrt(max(v, floor)) + eps``, v the corrected moment."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from awkward import BF16, DTYPES, F16, F32, F64, FEW_DTYPES, SHAPES, Dtypes
from reference import adam_with_floor, assert_close, same_bits
from torch import Tensor
from torch.nn import Parameter
from training import assert_same_bits, give_grads, make_params, ours, params_of, theirs, twins

from amp_ext import ops

HYPER = {"lr": 0.3, "beta1": 0.8, "beta2": 0.99, "eps": 0.05, "weight_decay": 0.0}
DECOUPLED = {"weight_decay": 0.3, "decoupled_weight_decay": True}

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"weight_decay": 0.3}, id="decay"),
    pytest.param(DECOUPLED, id="decoupled"),
    pytest.param({"amsgrad": True}, id="amsgrad"),
    pytest.param({"amsgrad": True, "maximize": True} | DECOUPLED, id="amsgrad-decoupled-maximize"),
    pytest.param({"eps": 0.0}, id="eps-0"),
]
SMALL = [(0,), (), (1,), (5,), (1025,)]
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

Lists = dict[str, list[Tensor]]


def build(
    shapes, dtypes: Dtypes, device, *, amsgrad: bool = False, step: int = 3, squares: float = 0.02
) -> Lists:
    """Makes the arguments of a step whose second moments lie around ``squares``."""

    def normal(dtype, size=1.0):
        return [(torch.randn(shape, device=device) * size).to(dtype) for shape in shapes]

    def positive(dtype):
        return [(torch.rand(shape, device=device) * squares).to(dtype) for shape in shapes]

    masters = normal(F32 if dtypes.master else dtypes.param)
    lists = {
        "params": [master.to(dtypes.param, copy=True) for master in masters],
        "grads": normal(dtypes.grad, math.sqrt(squares)),
        "exp_avgs": normal(dtypes.state, math.sqrt(squares)),
        "exp_avg_sqs": positive(dtypes.state),
        "steps": [torch.tensor(float(step), device=device) for _ in shapes],
    }
    if amsgrad:
        lists["max_exp_avg_sqs"] = positive(dtypes.state)
    if dtypes.master:
        lists["master_params"] = masters
    return lists


def copied(lists: Lists) -> Lists:
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}


def run(lists: Lists, **options: Any) -> None:
    options.pop("amsgrad", None)
    ops.adam_(**lists, **(HYPER | options))


def assert_same(actual: Lists, expected: Lists) -> None:
    for name, tensors in expected.items():
        for index, tensor in enumerate(tensors):
            assert same_bits(actual[name][index], tensor), f"{name}[{index}] {tuple(tensor.shape)}"


def assert_is_the_formula(after: Lists, before: Lists, floor: float, **options: Any) -> None:
    """Compares every written tensor with one step of the reference from ``before``."""
    options.pop("amsgrad", None)
    for index in range(len(before["params"])):
        old = {name: tensors[index] for name, tensors in before.items()}
        new = {name: tensors[index] for name, tensors in after.items()}
        expected = adam_with_floor(
            old.get("master_params", old["params"]),
            *(old["grads"], old["exp_avgs"], old["exp_avg_sqs"], old["steps"]),
            old.get("max_exp_avg_sqs"),
            denominator_floor=floor,
            **(HYPER | options),
        )
        param = new.get("master_params", new["params"])
        assert_close(param, expected["param"], what=f"param[{index}]")
        for name in MOMENTS:
            if name in expected:
                assert_close(new[f"{name}s"], expected[name], what=f"{name}[{index}]")
        if "master_params" in new:
            assert torch.equal(new["params"], new["master_params"].to(new["params"].dtype))


# 0.2 is the corrected moment of some elements of a test and not of others at the fourth step.
@pytest.mark.parametrize("floor", [0.2, 100.0], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_one_step_is_the_formula(device, dtypes, options, floor):
    lists = build(SMALL, dtypes, device, amsgrad="amsgrad" in options)
    before = copied(lists)
    run(lists, denominator_floor=floor, **options)
    assert_is_the_formula(lists, before, floor, **options)


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_tensors_of_every_size_take_the_floor(device, dtypes):
    lists = build(SHAPES, dtypes, device)
    before = copied(lists)
    run(lists, denominator_floor=0.2)
    assert_is_the_formula(lists, before, 0.2)
    without = copied(before)
    run(without)
    changed = lists["params"][-1] != without["params"][-1]
    assert changed.any()
    assert not changed.all()


@pytest.mark.parametrize("step", [0, 1, 999, 100_000])
def test_the_floor_is_of_the_corrected_moment_at_any_age(device, step):
    lists = build([(70,)], Dtypes(F32, F32, F32), device, step=step, squares=0.4)
    before = copied(lists)
    run(lists, beta2=0.999, denominator_floor=0.2)
    assert_is_the_formula(lists, before, 0.2, beta2=0.999)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_a_floor_of_0_or_below_all_moments_changes_no_bit(device, dtypes, options):
    plain = build(SMALL, dtypes, device, amsgrad="amsgrad" in options)
    for moments in (plain["exp_avg_sqs"], plain.get("max_exp_avg_sqs", [])):
        for moment in moments:
            moment.add_(1e-3)
    zero, low = copied(plain), copied(plain)
    run(plain, **options)
    run(zero, denominator_floor=0.0, **options)
    run(low, denominator_floor=1e-12, **options)
    assert_same(zero, plain)
    assert_same(low, plain)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_the_floor_stands_under_the_root_and_eps_outside(device, dtype):
    lists = build([(3,)], Dtypes(dtype, dtype, dtype), device, step=0)
    for name, value in {"params": 0.0, "grads": 0.0, "exp_avgs": 1.25, "exp_avg_sqs": 0.0}.items():
        lists[name][0].fill_(value)
    # The first moment becomes 1, and 5 when it is corrected; the denominator 1 / 4 + 1.
    run(lists, lr=0.5, eps=1.0, denominator_floor=1 / 16)
    assert_close(lists["params"][0], torch.full((3,), -0.5 * 5.0 / 1.25))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_zero_moments_without_eps_are_harmless(device, dtypes, options):
    lists = build([(5,), (70,)], dtypes, device, step=0, **options)
    for name in ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        for tensor in lists.get(name, []):
            tensor.zero_()
    spoiled, before = copied(lists), copied(lists)
    run(lists, eps=0.0, denominator_floor=1e-12)
    assert all(map(same_bits, lists["params"], before["params"]))
    run(spoiled, eps=0.0)
    assert all(param.isnan().all() for param in spoiled["params"])


@pytest.mark.parametrize("floor", [1e-12, 0.2, math.inf], ids=str)
@pytest.mark.parametrize(
    ("name", "amsgrad"),
    [("grads", False), ("exp_avgs", False), ("exp_avg_sqs", False), ("max_exp_avg_sqs", True)],
)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_nan_passes_the_floor(device, dtypes, name, amsgrad, floor):
    lists = build([(70,)], dtypes, device, amsgrad=amsgrad)
    lists[name][0][7] = float("nan")
    run(lists, denominator_floor=floor)
    assert lists["params"][0][7].isnan()
    assert lists["params"][0].isnan().sum() == 1


def test_an_infinite_floor_moves_nothing(device):
    lists = build([(70,)], Dtypes(F32, F32, F32), device)
    before = copied(lists)
    run(lists, denominator_floor=math.inf)
    assert same_bits(lists["params"][0], before["params"][0])


def test_an_infinite_moment_stays_above_the_floor(device):
    lists = build([(70,)], Dtypes(F32, F32, F32), device)
    lists["exp_avg_sqs"][0].fill_(math.inf)
    before = copied(lists)
    run(lists, denominator_floor=0.2)
    assert same_bits(lists["params"][0], before["params"][0])


def sample_results() -> list[Lists]:
    """Steps every combination of dtypes and options, for comparison between engines."""
    results = []
    for dtypes in DTYPES:
        for row in OPTIONS:
            (options,) = row.values
            lists = build([(), (5,), (1001,)], *dtypes.values, "cpu", amsgrad="amsgrad" in options)
            run(lists, denominator_floor=0.2, **options)
            run(lists, denominator_floor=1e-12, **options)
            results.append(lists)
    return results


def test_every_instruction_set_gives_the_same_bits(under_isa):
    plain_isa, plain = under_isa(sample_results, "plain")
    assert plain_isa == "plain"
    best_isa, best = under_isa(sample_results, None)
    if best_isa == "plain":
        pytest.skip("this machine has the plain engine only")
    for actual, expected in zip(best, plain, strict=True):
        assert_same(actual, expected)


# The optimizer classes.

CLASSES = [
    pytest.param("Adam", {"weight_decay": 0.1}, id="adam-decay"),
    pytest.param("Adam", {"amsgrad": True, "maximize": True}, id="adam-amsgrad-maximize"),
    pytest.param("AdamW", {"weight_decay": 0.5}, id="adamw"),
]


@pytest.mark.parametrize("floor", [1e-12, 0.5, 4.0], ids=str)
@pytest.mark.parametrize(("name", "options"), CLASSES)
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
def test_ten_steps_follow_the_formula(device, dtype, name, options, floor):
    mine = ours(name)(
        make_params(dtype, device, [(1025,)]), lr=0.05, denominator_floor=floor, **options
    )
    (param,) = params_of(mine)
    expected = {"param": param.detach().double(), "step": torch.zeros((), device=device)}
    for key in MOMENTS[: 3 if "amsgrad" in options else 2]:
        expected[key] = torch.zeros_like(expected["param"])
    formula = {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    formula |= {"decoupled_weight_decay": name == "AdamW"} | options
    formula.pop("amsgrad", None)
    for _ in range(10):
        give_grads([param])
        expected = adam_with_floor(
            *(expected["param"], param.grad, expected["exp_avg"], expected["exp_avg_sq"]),
            *(expected["step"], expected.get("max_exp_avg_sq")),
            denominator_floor=floor,
            **formula,
        )
        mine.step()
    state = mine.state[param]
    assert_close(state.get("master_param", param), expected["param"], steps=10)
    for key in MOMENTS:
        if key in expected:
            assert_close(state[key], expected[key], steps=10, what=key)
    if dtype in (F16, BF16):
        assert same_bits(param, state["master_param"].to(dtype))


def test_each_group_has_its_own_floor(device):
    params = make_params(F32, device, [(5,), (7,)])
    apart = twins(params)
    together = ours("Adam")(
        [{"params": params[:1]}, {"params": params[1:], "denominator_floor": 4.0}], lr=0.1
    )
    alone = [
        ours("Adam")(apart[:1], lr=0.1),
        ours("Adam")(apart[1:], lr=0.1, denominator_floor=4.0),
    ]
    give_grads(params, apart)
    together.step()
    for optimizer in alone:
        optimizer.step()
    assert all(map(same_bits, params, apart))


@pytest.mark.parametrize("wrong", [-1e-12, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_wrong_floor_is_refused(name, wrong):
    with pytest.raises(ValueError, match=r"^Invalid denominator_floor value: -?(1e-12|inf|nan)$"):
        ours(name)(make_params(F32), denominator_floor=wrong)


def test_sgd_has_no_denominator():
    with pytest.raises(TypeError, match="denominator_floor"):
        ours("SGD")(make_params(F32), denominator_floor=1e-12)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_checkpoint_does_not_change_the_floor(name):
    optimizer = ours(name)(make_params(F32), denominator_floor=0.5)
    assert optimizer.defaults["denominator_floor"] == 0.5
    for source, more in [(ours(name), {"denominator_floor": 0.25}), (theirs(name), {})]:
        other = source(twins(params_of(optimizer)), **more)
        give_grads(params_of(other))
        other.step()
        optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["denominator_floor"] == 0.5
    assert optimizer.state_dict()["param_groups"][0]["denominator_floor"] == 0.5


@pytest.mark.parametrize("carry", [lambda opt: pickle.loads(pickle.dumps(opt)), copy.deepcopy])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_copies_keep_the_floor(name, carry):
    optimizer = ours(name)(make_params(BF16), lr=0.1, denominator_floor=4.0)
    plain = ours(name)(twins(params_of(optimizer)), lr=0.1)
    other = carry(optimizer)
    give_grads(params_of(optimizer), params_of(other), params_of(plain))
    for each in (optimizer, other, plain):
        each.step()
    assert_same_bits(other, optimizer)
    assert not same_bits(params_of(plain)[0], params_of(optimizer)[0])


def test_an_optimizer_of_an_older_file_has_no_floor():
    optimizer = ours("Adam")([Parameter(torch.zeros(3))], lr=0.1)
    plain = ours("Adam")(twins(params_of(optimizer)), lr=0.1)
    state = optimizer.__getstate__()
    for group in state["param_groups"]:
        del group["denominator_floor"]
    optimizer.__setstate__(state)
    give_grads(params_of(optimizer), params_of(plain))
    optimizer.step()
    plain.step()
    assert_same_bits(optimizer, plain)
