"""``skip_nonfinite``: elements whose gradient is inf or NaN are left alone, all others step."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from awkward import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FEW_DTYPES,
    LAYOUT_SHAPE,
    LAYOUTS,
    SHAPES,
    Dtypes,
    neighbours_untouched,
    placed,
)
from reference import adam, assert_close, clipped, left_alone, same_bits, sgd, tolerance
from torch import Tensor
from torch.nn import Parameter
from training import (
    AS_TORCH,
    EACH_CLASS,
    OPTIMIZERS,
    assert_same_bits,
    bits_of,
    give_grads,
    make_params,
    ours,
    params_of,
    theirs,
    twins,
)

import amp_ext
from amp_ext import ops

INF, NAN = float("inf"), float("nan")
DECOUPLED = {"weight_decay": 0.3, "decoupled_weight_decay": True}

# A large eps and step, so that a lost or a needless update shows in 8 bits as well.
HYPER: dict[str, dict[str, float]] = {
    "adam_": {"lr": 0.3, "beta1": 0.8, "beta2": 0.99, "eps": 0.05, "weight_decay": 0.0},
    "sgd_": {"lr": 0.3},
}

STEPS = [
    pytest.param("adam_", {}, id="adam"),
    pytest.param("adam_", {"weight_decay": 0.3}, id="adam-decay"),
    pytest.param("adam_", DECOUPLED, id="adamw"),
    pytest.param("adam_", {"amsgrad": True}, id="amsgrad"),
    pytest.param("adam_", {"amsgrad": True, "maximize": True} | DECOUPLED, id="amsgradw-maximize"),
    pytest.param("sgd_", {}, id="sgd"),
    pytest.param("sgd_", DECOUPLED, id="sgdw"),
    pytest.param("sgd_", {"momentum": 0.7}, id="momentum"),
    pytest.param("sgd_", {"momentum": 0.7, "dampening": 0.4} | DECOUPLED, id="dampening-decoupled"),
    pytest.param("sgd_", {"momentum": 0.7, "nesterov": True} | DECOUPLED, id="nesterov-decoupled"),
    pytest.param(
        "sgd_",
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.3, "maximize": True},
        id="nesterov-decay-maximize",
    ),
]
FEW_STEPS = [row for row in STEPS if row.id in {"amsgradw-maximize", "nesterov-decoupled", "sgd"}]
STEP = ("operation", "options")

# A block of the CPU and one more, and everything smaller that is odd.
SMALL = [(0,), (), (1,), (3,), (5,), (7, 5), (1025,)]

Lists = dict[str, list[Tensor]]


def build(
    operation: str, options: dict[str, Any], shapes, dtypes: Dtypes, device, *, step: int = 3
) -> Lists:
    """Makes the arguments of a step that ``step`` others went before, by their names."""

    def normal(dtype):
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    def squares(dtype):
        return [(torch.rand(shape, device=device) * 0.05 + 1e-3).to(dtype) for shape in shapes]

    masters = normal(F32 if dtypes.master else dtypes.param)
    lists = {
        "params": [master.to(dtypes.param, copy=True) for master in masters],
        "grads": normal(dtypes.grad),
    }
    if dtypes.master:
        lists["master_params"] = masters
    if operation == "adam_":
        lists |= {"exp_avgs": normal(dtypes.state), "exp_avg_sqs": squares(dtypes.state)}
    if "amsgrad" in options:
        lists["max_exp_avg_sqs"] = squares(dtypes.state)
    if "momentum" in options:
        lists["momentum_buffers"] = normal(dtypes.state)
    if operation == "adam_" or "dampening" in options:
        lists["steps"] = [torch.tensor(float(step), device=device) for _ in shapes]
    return lists


def spoil(grads: list[Tensor]) -> None:
    """Makes a fifth of the elements inf, -inf or NaN, and all of every fourth tensor."""
    for index, grad in enumerate(grads):
        bad = torch.rand(grad.shape) < (1.0 if index % 4 == 1 else 0.2)
        kinds = torch.tensor([INF, -INF, NAN])[torch.randint(3, grad.shape)]
        grad.copy_(torch.where(bad.to(grad.device), kinds.to(grad), grad))


def spoiled(*arguments: Any, **keywords: Any) -> Lists:
    lists = build(*arguments, **keywords)
    spoil(lists["grads"])
    return lists


def copied(lists: Lists) -> Lists:
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}


def run(operation: str, lists: Lists, skip_nonfinite: bool = True, **options: Any) -> None:
    options.pop("amsgrad", None)
    step = getattr(ops, operation)
    step(**lists, skip_nonfinite=skip_nonfinite, **(HYPER[operation] | options))


def assert_same(actual: Lists, expected: Lists) -> None:
    for name, tensors in expected.items():
        for index, tensor in enumerate(tensors):
            assert same_bits(actual[name][index], tensor), f"{name}[{index}] {tuple(tensor.shape)}"


def formula(
    operation: str, old: dict[str, Tensor], grad: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Returns one step of the reference for one tensor, from a gradient without a scale."""
    options = HYPER[operation] | options
    options.pop("amsgrad", None)
    param = old.get("master_params", old["params"])
    if operation == "sgd_":
        result = sgd(param, grad, old.get("momentum_buffers"), first=False, **options)
    else:
        moments = (old["exp_avgs"], old["exp_avg_sqs"], old["steps"], old.get("max_exp_avg_sqs"))
        result = adam(param, grad, *moments, **options)
    before = {name.removesuffix("s"): tensor for name, tensor in old.items()}
    return left_alone(result, before | {"param": param}, grad)


def assert_is_the_formula(
    operation: str, after: Lists, before: Lists, grads: list[Tensor], **options: Any
) -> None:
    """Compares one step with the reference, and asserts that skipped elements kept their bits."""
    for index, grad in enumerate(grads):
        old = {name: tensors[index] for name, tensors in before.items()}
        new = {name: tensors[index] for name, tensors in after.items()}
        expected = formula(operation, old, grad, **options)
        computed = {name.removesuffix("s"): tensor for name, tensor in new.items()}
        computed["param"] = new.get("master_params", new["params"])
        bad = ~grad.isfinite()
        for name, wanted in expected.items():
            assert_close(computed[name], wanted, what=f"{name}[{index}]")
        for name in new.keys() - {"steps"}:
            assert same_bits(new[name][bad], old[name][bad]), f"{name}[{index}]"
        if "master_params" in new:
            assert torch.equal(new["params"], new["master_params"].to(new["params"].dtype))
        if "steps" in new:
            assert new["steps"].item() == old["steps"].item() + 1


@pytest.mark.parametrize(STEP, STEPS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_finite_elements_follow_the_formula_and_others_keep_their_bits(
    device, dtypes, operation, options
):
    lists = spoiled(operation, options, SMALL, dtypes, device)
    before = copied(lists)
    run(operation, lists, **options)
    assert_is_the_formula(operation, lists, before, before["grads"], **options)
    assert all(map(same_bits, lists["grads"], before["grads"]))


@pytest.mark.parametrize(STEP, FEW_STEPS)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_finite_elements_have_the_bits_of_a_step_without_bad_ones(
    device, dtypes, operation, options
):
    lists = spoiled(operation, options, SHAPES, dtypes, device)
    clean, before = copied(lists), copied(lists)
    finite = [grad.isfinite() for grad in lists["grads"]]
    clean["grads"] = [grad.nan_to_num(0.5, 0.5, 0.5) for grad in lists["grads"]]
    run(operation, lists, **options)
    run(operation, clean, False, **options)
    for name in lists.keys() - {"grads", "steps"}:
        for index, keep in enumerate(finite):
            expected = torch.where(keep, clean[name][index], before[name][index])
            assert same_bits(lists[name][index], expected), f"{name}[{index}]"


@pytest.mark.parametrize(STEP, STEPS)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_clean_gradients_step_as_without_the_option(device, dtypes, operation, options):
    plain = build(operation, options, [(5,), (16385,)], dtypes, device)
    skipping = copied(plain)
    run(operation, plain, False, max_grad_norm=3.0, **options)
    run(operation, skipping, max_grad_norm=3.0, **options)
    assert_same(skipping, plain)


@pytest.mark.parametrize(STEP, STEPS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_nothing_but_the_step_count_changes_where_no_gradient_is_finite(
    device, bad, operation, options
):
    dtypes = Dtypes(BF16, BF16, F32, master=True)
    lists = build(operation, options, [(5,), (70,)], dtypes, device)
    for grad in lists["grads"]:
        grad.fill_(bad)
    before = copied(lists)
    run(operation, lists, max_grad_norm=1.0, clip_value=0.5, **options)
    for step in before.get("steps", []):
        step.add_(1)
    assert_same(lists, before)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("param_dtype", ["float32", "same"])
def test_every_16_bit_gradient_is_judged_right(device, dtype, param_dtype):
    grad = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    start = torch.full((2**16,), 3.0, dtype=F32 if param_dtype == "float32" else dtype)
    param = start.to(device, copy=True)
    ops.sgd_([param], [grad], lr=1.0, skip_nonfinite=True)
    expected = (3.0 - grad.float()).to(param.dtype)
    assert same_bits(param, torch.where(grad.isfinite(), expected, start.to(device)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(STEP, FEW_STEPS)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_any_layout_gives_the_bits_of_contiguous_tensors(
    device, dtypes, operation, options, layout
):
    expected = spoiled(operation, options, [LAYOUT_SHAPE] * 2, dtypes, device)
    actual = {
        name: [t.clone() if t.dim() == 0 else placed(t, layout) for t in tensors]
        for name, tensors in expected.items()
    }
    more = {"max_grad_norm": 2.0, "write_back_grads": True}
    run(operation, expected, **more, **options)
    run(operation, actual, **more, **options)
    for name in actual.keys() - {"steps"}:
        assert all(neighbours_untouched(view) for view in actual[name]), name
    if layout.__name__ in ("contiguous", "misaligned"):
        assert_same(actual, expected)
    else:  # the norm is summed in the order of the memory
        for name in actual:
            for left, right in zip(actual[name], expected[name], strict=True):
                torch.testing.assert_close(left, right, equal_nan=True, **tolerance(left.dtype))


CLIPPING = [
    pytest.param({"max_grad_norm": 3.0}, id="norm"),
    pytest.param({"max_grad_norm": 1e6}, id="large-norm"),
    pytest.param({"max_grad_norm": 0.0}, id="norm-0"),
    pytest.param({"clip_value": 0.25}, id="value"),
    pytest.param({"max_grad_norm": 30.0, "clip_value": 0.25}, id="norm-and-value"),
]


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize(STEP, FEW_STEPS)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_clipping_counts_finite_elements_only(device, dtypes, operation, options, clipping):
    lists = spoiled(operation, options, SMALL, dtypes, device)
    before = copied(lists)
    norm = torch.full((), -1.0, device=device)
    scale = torch.tensor(4.0, device=device)
    run(operation, lists, grad_norm=norm, grad_scale=scale, **clipping, **options)
    grads, expected_norm = clipped(before["grads"], grad_scale=scale, **clipping)
    assert_is_the_formula(operation, lists, before, grads, **options)
    assert all(map(same_bits, lists["grads"], before["grads"]))
    if "max_grad_norm" in clipping:
        assert norm.item() == pytest.approx(expected_norm, rel=1e-6)


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_skipped_gradient_is_not_written_back(device, dtypes, clipping):
    operation, options = "sgd_", {"momentum": 0.7} | DECOUPLED
    lists = spoiled(operation, options, SMALL, dtypes, device)
    plain, before = copied(lists), copied(lists)
    scale = torch.tensor(4.0, device=device)
    run(operation, lists, grad_scale=scale, write_back_grads=True, **clipping, **options)
    run(operation, plain, grad_scale=scale, **clipping, **options)
    grads, _ = clipped(before["grads"], grad_scale=scale, **clipping)
    for index, (written, wanted) in enumerate(zip(lists.pop("grads"), grads, strict=True)):
        old = before["grads"][index]
        bad = ~old.isfinite()
        assert same_bits(written[bad], old[bad]), f"grads[{index}]"
        # Gradients of float64 for parameters of float32 are read in float32.
        rounding = F32 if written.dtype == F64 and dtypes.param == F32 else written.dtype
        torch.testing.assert_close(
            written[~bad].double(), wanted[~bad], **tolerance(rounding), msg=f"grads[{index}]"
        )
    del plain["grads"]
    assert_same(lists, plain)


@pytest.mark.parametrize("write_back_grads", [False, True], ids=["read-only", "write-back"])
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_the_gradient_as_it_came_decides_not_the_unscaled_one(device, dtypes, write_back_grads):
    largest = torch.finfo(dtypes.grad).max
    start = torch.zeros(70, dtype=dtypes.param, device=device)
    masters = [start.float()] if dtypes.master else None
    grad = torch.full((70,), largest, dtype=dtypes.grad, device=device)
    grad[7] = INF
    ops.sgd_(
        [start],
        [grad],
        master_params=masters,
        lr=1.0,
        grad_scale=torch.tensor(2.0**-10, device=device),
        clip_value=2.0,
        skip_nonfinite=True,
        write_back_grads=write_back_grads,
    )
    expected = torch.full_like(start, -2.0)
    expected[7] = 0.0
    assert same_bits(start, expected)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_a_gradient_that_overflows_when_it_is_unscaled_steps_the_same_with_write_back(
    device, dtype
):
    largest = torch.finfo(dtype).max
    results = []
    for write_back_grads in (False, True):
        param = torch.zeros(5, dtype=dtype, device=device)
        grad = torch.tensor([largest, 1.0, -largest, NAN, 2.0], dtype=dtype, device=device)
        scale = torch.tensor(0.5, device=device)
        options = {"grad_scale": scale, "skip_nonfinite": True}
        ops.sgd_([param], [grad], lr=1.0, write_back_grads=write_back_grads, **options)
        results.append(param)
    assert same_bits(*results)
    expected = torch.tensor([-INF, -2.0, INF, 0.0, -4.0], dtype=dtype, device=device)
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize("size", [1e-25, 1e30], ids=["tiny", "huge"])
def test_the_norm_keeps_its_range_beside_infinite_elements(device, size):
    lists = spoiled("sgd_", {}, [(16385,), (70,), (5,)], Dtypes(F32, F32, F32), device)
    lists["grads"] = [grad * size for grad in lists["grads"]]
    norm = torch.zeros((), device=device)
    _, expected = clipped(lists["grads"])
    before = copied(lists)
    run("sgd_", lists, max_grad_norm=1.0, grad_norm=norm)
    assert 0 < norm.item() < INF
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    grads, _ = clipped(before["grads"], max_grad_norm=1.0)
    assert_is_the_formula("sgd_", lists, before, grads)


def test_a_norm_too_large_for_float64_clips_finite_elements_to_zero_as_torch_does(device):
    param = torch.ones(4, dtype=F64, device=device)
    grad = torch.tensor([1e300, 1.0, INF, NAN], dtype=F64, device=device)
    norm = torch.zeros((), device=device)
    options = {"max_grad_norm": 1.0, "grad_norm": norm, "skip_nonfinite": True}
    ops.sgd_([param], [grad], lr=1.0, weight_decay=0.5, decoupled_weight_decay=True, **options)
    assert norm.item() == INF
    assert param.tolist() == [0.5, 0.5, 1.0, 1.0]


def test_without_the_option_a_nan_reaches_the_norm_and_everything_else(device):
    lists = build("sgd_", {}, [(5,), (70,)], Dtypes(F32, F32, F32), device)
    lists["grads"][0][2] = NAN
    norm = torch.zeros((), device=device)
    run("sgd_", lists, False, max_grad_norm=1.0, grad_norm=norm)
    assert math.isnan(norm.item())
    assert all(param.isnan().all() for param in lists["params"])


@pytest.mark.parametrize(STEP, FEW_STEPS)
def test_overflow_changes_not_a_bit(device, operation, options):
    lists = spoiled(operation, options, SMALL, Dtypes(F16, F16, F32, master=True), device)
    before = copied(lists)
    run(operation, lists, found_inf=torch.ones((), device=device), max_grad_norm=1.0, **options)
    assert_same(lists, before)


def test_the_number_of_threads_does_not_change_a_bit():
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.manual_seed(0)
            torch.set_num_threads(count)
            lists = spoiled("sgd_", {}, [(200_001,), (5,), (70_000,)], Dtypes(F32, F32, F32), "cpu")
            norm = torch.zeros(())
            run("sgd_", lists, max_grad_norm=1.0, grad_norm=norm)
            results.append(lists | {"norm": [norm]})
    finally:
        torch.set_num_threads(threads)
    assert_same(*results)


def sample_results() -> list[Lists]:
    """Steps every combination of dtypes and options, for comparison between engines."""
    results = []
    for dtypes in DTYPES:
        for row in STEPS:
            operation, options = row.values
            lists = spoiled(operation, options, [(), (1,), (5,), (3001,)], *dtypes.values, "cpu")
            clipping = {"max_grad_norm": 30.0, "clip_value": 0.5, "grad_scale": torch.tensor(3.0)}
            run(operation, lists, **options)
            run(operation, lists, write_back_grads=True, **clipping, **options)
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


def give_spoiled_grads(*sides: list[Parameter]) -> None:
    """Gives all sides the same new gradients, of which a fifth is inf or NaN."""
    give_grads(*sides)
    first, *others = sides
    spoil([param.grad for param in first])
    for params in others:
        for param, other in zip(params, first, strict=True):
            param.grad.copy_(other.grad)


def step_finite_elements(optimizer: torch.optim.Optimizer) -> None:
    """Steps an optimizer of torch, then takes back what became of inf and NaN."""
    before = bits_of(optimizer)
    bad = [~param.grad.isfinite() for param in params_of(optimizer)]
    for param, where in zip(params_of(optimizer), bad, strict=True):
        param.grad.masked_fill_(where, 0.0)
    optimizer.step()
    for param, where, old in zip(params_of(optimizer), bad, before, strict=True):
        for name, tensor in {"param": param.detach(), **optimizer.state[param]}.items():
            if name != "step" and tensor is not None:
                tensor.copy_(torch.where(where, old.get(name, torch.zeros(())).to(tensor), tensor))


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ten_steps_match_torch_where_gradients_are_finite(device, dtype, name, options):
    shapes = [(1025,), (3, 5), (), (0,), (7,)]
    mine = ours(name)(
        make_params(dtype, device, shapes), skip_nonfinite=True, **options, **AS_TORCH
    )
    other = theirs(name)(twins(params_of(mine)), foreach=False, **options)
    for _ in range(10):
        give_spoiled_grads(params_of(mine), params_of(other))
        mine.step()
        step_finite_elements(other)
    for param, twin in zip(params_of(mine), params_of(other), strict=True):
        assert_close(param, twin, steps=10, what="param")
        for key, tensor in other.state[twin].items():
            if tensor is not None:
                assert_close(mine.state[param][key], tensor, steps=10, what=key)


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_masters_match_float32_training_where_gradients_are_finite(device, dtype, name, options):
    mine = ours(name)(make_params(dtype, device, [(1025,), (7,)]), skip_nonfinite=True, **options)
    other = theirs(name)(twins(params_of(mine), F32), foreach=False, **options)
    for _ in range(10):
        give_spoiled_grads(params_of(mine))
        for param, twin in zip(params_of(mine), params_of(other), strict=True):
            twin.grad = param.grad.float()
        mine.step()
        step_finite_elements(other)
    for param, twin in zip(params_of(mine), params_of(other), strict=True):
        master = mine.state[param]["master_param"]
        assert_close(master, twin, steps=10)
        assert same_bits(param, master.to(dtype))


@pytest.mark.parametrize("write_back_grads", [False, True], ids=["read-only", "write-back"])
@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_the_norm_of_all_groups_runs_over_finite_elements(device, name, options, write_back_grads):
    params = make_params(F32, device, [(1025,), (7,), (5,)])
    give_spoiled_grads(params)
    before = [param.grad.clone() for param in params]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.01}]
    limits = {"max_grad_norm": 3.0, "clip_value": 0.5, "write_back_grads": write_back_grads}
    optimizer = ours(name)(groups, skip_nonfinite=True, **limits, **options)
    optimizer.step()
    grads, norm = clipped(before, max_grad_norm=3.0, clip_value=0.5)
    assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    for param, old, wanted in zip(params, before, grads, strict=True):
        if write_back_grads:
            assert same_bits(param.grad[~old.isfinite()], old[~old.isfinite()])
            keep = old.isfinite()
            assert_close(param.grad[keep], wanted[keep])
        else:
            assert same_bits(param.grad, old)


SCALERS = [
    pytest.param(amp_ext.GradScaler, False, id="ours"),
    pytest.param(amp_ext.GradScaler, True, id="ours-unscale"),
    pytest.param(torch.amp.GradScaler, False, id="torch"),
    pytest.param(torch.amp.GradScaler, True, id="torch-unscale"),
]


@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 1.0}], ids=["plain", "norm"])
@pytest.mark.parametrize(("scaler_class", "unscale_first"), SCALERS)
@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_a_scaler_skips_an_overflow_whole_all_the_same(
    device, name, options, scaler_class, unscale_first, clipping
):
    skipping = ours(name)(make_params(F32, device), skip_nonfinite=True, **clipping, **options)
    plain = ours(name)(twins(params_of(skipping)), **clipping, **options)
    for optimizer in (skipping, plain):
        scaler = scaler_class(device.type, init_scale=1024.0)
        scaler.scale(torch.ones((), device=device))
        torch.manual_seed(1)
        for iteration in range(3):
            give_grads(params_of(optimizer))
            for param in params_of(optimizer):
                param.grad.mul_(1024.0)
            if iteration == 1:
                params_of(optimizer)[0].grad[5] = NAN
            before = bits_of(optimizer)
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if iteration == 1:
                assert_same_bits(optimizer, before)
            else:
                assert not same_bits(params_of(optimizer)[0], before[0]["param"])
        assert scaler.get_scale() == 512.0
    assert_same_bits(skipping, plain)


def with_another_setting(device, max_grad_norm: float | None = None) -> Any:
    """Returns an optimizer whose second group, added later, does not skip as the first does."""
    params = make_params(F32, device, [(5,), (7,)])
    give_grads(params)
    optimizer = ours("SGD")(
        params[:1], lr=1.0, skip_nonfinite=True, max_grad_norm=max_grad_norm, momentum=0.9
    )
    optimizer.add_param_group({"params": params[1:], "skip_nonfinite": False})
    return optimizer


@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["plain", "norm"])
@pytest.mark.parametrize("scaled", [False, True], ids=["alone", "scaler"])
def test_different_settings_in_groups_are_refused(device, scaled, max_grad_norm):
    optimizer = with_another_setting(device, max_grad_norm)
    before = [param.detach().clone() for param in params_of(optimizer)]
    scaler = amp_ext.GradScaler(device.type, enabled=scaled)
    scaler.scale(torch.ones((), device=device))
    with pytest.raises(
        ValueError, match=r"SGD: skip_nonfinite must be the same .*\[True, False\]$"
    ):
        scaler.step(optimizer)
    assert all(map(same_bits, params_of(optimizer), before))


def test_a_group_added_later_takes_the_setting_over(device):
    optimizer = ours("SGD")(make_params(F32, device, [(5,)]), lr=1.0, skip_nonfinite=True)
    optimizer.add_param_group({"params": make_params(F32, device, [(7,)])})
    late = params_of(optimizer)[1]
    give_grads(params_of(optimizer))
    late.grad[3] = NAN
    before = late.detach().clone()
    optimizer.step()
    assert late.isfinite().all()
    assert late[3] == before[3]


@pytest.mark.parametrize("setting", [False, True])
@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_a_checkpoint_does_not_change_the_setting(name, options, setting):
    optimizer = ours(name)(make_params(F32), skip_nonfinite=setting, **options)
    for source in (ours(name), theirs(name)):
        more = {"skip_nonfinite": not setting} if source is ours(name) else {}
        other = source(twins(params_of(optimizer)), **more, **options)
        give_grads(params_of(other))
        other.step()
        optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["skip_nonfinite"] is setting
        assert optimizer.defaults["skip_nonfinite"] is setting
    assert optimizer.state_dict()["param_groups"][0]["skip_nonfinite"] is setting


def through_pickle(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


def through_a_file(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("carry", [through_pickle, through_a_file, copy.deepcopy])
@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_copies_go_on_skipping(name, options, carry):
    optimizer = ours(name)(make_params(BF16), skip_nonfinite=True, max_grad_norm=1.0, **options)
    give_spoiled_grads(params_of(optimizer))
    optimizer.step()
    other = carry(optimizer)
    give_spoiled_grads(params_of(optimizer), params_of(other))
    optimizer.step()
    other.step()
    assert_same_bits(other, optimizer)
    assert all(param.isfinite().all() for param in params_of(other))


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_an_optimizer_of_an_older_file_does_not_skip(name, options):
    optimizer = ours(name)(make_params(F32), **options)
    state = optimizer.__getstate__()
    for group in state["param_groups"]:
        del group["skip_nonfinite"]
    optimizer.__setstate__(state)
    give_spoiled_grads(params_of(optimizer))
    optimizer.step()
    assert params_of(optimizer)[0].isnan().any()
