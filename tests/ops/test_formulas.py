"""What single formulas have beyond any list operation; test_steps.py has what all of them have."""

from __future__ import annotations

import decimal
import math
import random
from typing import Any

import pytest
import torch
from harness import list_operations as cases
from harness.edge_shapes import BF16, F16, F32, F64, FEW_DTYPES, Dtypes
from harness.gradient_lists import equal
from harness.reference import assert_close, clipped, same_bits
from harness.rows import rows
from torch.nn import Parameter

import amp_ext
from amp_ext import ops
from amp_ext.ops import OptimizerType

# ``adam_``.


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_each_tensor_is_corrected_for_its_own_age(device, floor):
    ages = [0, 1, 7, 999, 100_000, 16_777_214]
    lists = cases.build("adam_", {}, [(64,)] * len(ages), cases.IN_FLOAT, device)
    for age, step, squares in zip(ages, lists["steps"], lists["exp_avg_sqs"], strict=True):
        step.fill_(age)
        squares.mul_(8 if floor else 1)  # some corrected moments are below the floor
    cases.assert_steps_by_the_formula("adam_", lists, beta2=0.999, denominator_floor=floor)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.99999])
def test_corrections_lose_no_digits_to_cancellation(beta):
    """They are within two units in the last place of ``1 - beta ** step``."""
    with decimal.localcontext() as context:
        context.prec = 60
        for step in [*range(1001), *random.Random(0).sample(range(1001, 2**24), 199), 2**24]:
            exact = 1 - decimal.Decimal(beta) ** step if step else decimal.Decimal(0)
            got = ops._C.complement_of_power(beta, step)
            distance = abs(decimal.Decimal(got) - exact) / decimal.Decimal(math.ulp(float(exact)))
            assert distance <= 2, f"step {step}: {got}, which is off by {distance} units"


def test_with_a_beta1_of_0_the_first_moment_is_the_gradient(device):
    lists = cases.build("adam_", {}, [(64,)], cases.IN_FLOAT, device)
    lists["exp_avgs"][0].fill_(1e8)  # of which nothing may be left, nor of what it rounds off
    cases.run("adam_", lists, beta1=0.0)
    assert same_bits(lists["exp_avgs"][0], lists["grads"][0])


@pytest.mark.parametrize("floor", [1e-12, 0.2, math.inf], ids=str)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_nan_passes_the_floor(device, dtypes, floor):
    for name in ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"):
        amsgrad = cases.AMSGRAD if name == "max_exp_avg_sqs" else {}
        lists = cases.build("adam_", amsgrad, [(70,)], dtypes, device)
        lists[name][0][7] = math.nan
        cases.run("adam_", lists, denominator_floor=floor)
        assert lists["params"][0].isnan().nonzero().tolist() == [[7]], name


# ``lion_``.


def test_an_average_of_zero_and_no_decay_leave_a_parameter_alone(device):
    lists = cases.build("lion_", {}, [(5,)], cases.IN_FLOAT, device)
    before = lists["params"][0].clone()
    lists["grads"][0].zero_(), lists["exp_avgs"][0].zero_()
    cases.run("lion_", lists)
    assert torch.equal(lists["params"][0], before)


# ``sgd_``: first steps, and every 16-bit gradient exactly.


@pytest.mark.parametrize("buffer", [0.0, 12345.0])
def test_first_and_later_steps_share_a_launch_and_the_first_ignores_the_buffer(device, buffer):
    lists = cases.build("sgd_", cases.DAMPENING, [(5,)] * 3, cases.IN_FLOAT, device)
    lists["steps"][1].zero_()
    lists["momentum_buffers"][1].fill_(buffer)
    cases.assert_steps_by_the_formula("sgd_", lists, **cases.DAMPENING)


@pytest.mark.parametrize("in_float", [True, False], ids=["float-param", "same-dtype"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_gradient_is_read_exactly_and_judged_right(device, dtype, in_float):
    grad = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    for start, skip in ((0.0, False), (3.0, True)):
        param = torch.full((2**16,), start, dtype=F32 if in_float else dtype, device=device)
        expected = (start - grad.float()).to(param.dtype)
        if skip:
            expected = torch.where(grad.isfinite(), expected, param)
        cases.run("sgd_", {"params": [param], "grads": [grad]}, lr=1.0, skip_nonfinite=skip)
        assert equal(param, expected)


# Cautious decay.


EDGES = torch.tensor([1.0, -1.0, 2.0**-100, -(2.0**-100), 0.0, -0.0])


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("operation", cases.BUFFERS)
def test_cautious_decay_compares_signs_also_where_a_product_would_be_0(
    device, operation, dtype, maximize
):
    params, grads = EDGES.repeat(6).to(device, dtype), EDGES.repeat_interleave(6).to(device, dtype)
    results = []
    for options in (cases.CAUTIOUS, cases.DECOUPLED, {"weight_decay": 0.0}):
        lists = cases.build(operation, {}, [(36,)], Dtypes(dtype, dtype, dtype), device, step=0)
        for name in cases.OPERATIONS[operation].buffers({}):
            lists[name][0].zero_()  # so that the update has the sign of the gradient
        lists["params"][0].copy_(params), lists["grads"][0].copy_(grads)
        cases.run(operation, lists, maximize=maximize, **options)
        results += lists["params"]
    cautious, decayed, kept = results
    agree = params.sign() * grads.sign() * (-1 if maximize else 1) >= 0
    assert same_bits(cautious, torch.where(agree, decayed, kept))


def test_cautious_decay_that_is_added_to_gradients_is_refused():
    lists = cases.build("sgd_", {}, [(3,)], cases.IN_FLOAT, "cpu")
    with pytest.raises(RuntimeError, match="cautious_weight_decay must be False"):
        cases.run("sgd_", lists, weight_decay=0.1, cautious_weight_decay=True)


# ``optimizer_update_``: one step for people who keep their own loop and buffers.


UPDATE = "optimizer_update_"
SGD, MOMENTUM, ADAM = ({"optimizer_type": kind} for kind in OptimizerType)


def fresh(kind: dict[str, Any], shapes, dtypes: Dtypes, device) -> dict[str, Any]:
    """Makes the lists of a first update, whose buffers are zeros."""
    lists = cases.build(UPDATE, kind, shapes, dtypes, device)
    for name in cases.UPDATE_BUFFERS[kind["optimizer_type"]]:
        torch._foreach_zero_(lists[name])
    return lists


def new_grads(lists, *, bad: bool = False) -> None:
    for grad in lists["grads"]:
        grad.copy_(torch.randn(grad.shape))
    if bad:
        cases.spoil(lists["grads"])


AS_ADAM = {"betas": (0.8, 0.99), "eps": 0.05, "denominator_floor": 1e-12}


AS_AN_OPTIMIZER = {
    "sgd": (SGD, amp_ext.optim.SGD, {}),
    "momentum": (MOMENTUM, amp_ext.optim.SGD, {"momentum": 0.8}),
    "adam": (ADAM, amp_ext.optim.Adam, AS_ADAM),
}


@pytest.mark.parametrize(("kind", "make", "options"), rows(AS_AN_OPTIMIZER))
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_it_has_the_bits_of_the_optimizer_with_these_options(device, dtypes, kind, make, options):
    lists = fresh(kind, cases.SMALL, dtypes, device)
    limits = {"max_grad_norm": 5.0, "clip_value": 0.5}
    optimizer = make(
        [Parameter(param.clone()) for param in lists["params"]],
        lr=0.3,
        weight_decay=0.3,
        decoupled_weight_decay=True,
        skip_nonfinite=True,
        master_weights=dtypes.master,
        state_dtype=None if dtypes.state == dtypes.param else torch.float32,
        **limits,
        **options,
    )
    if dtypes.master:
        lists["master_params"] = [param.float() for param in lists["params"]]
    params = optimizer.param_groups[0]["params"]
    workspace = ops.OptimizerWorkspace()
    for timestep in range(1, 4):
        new_grads(lists, bad=True)
        for param, grad in zip(params, lists["grads"], strict=True):
            param.grad = grad.clone()
        optimizer.step()
        cases.run(UPDATE, lists, **kind, timestep=timestep, workspace=workspace, **limits)
        assert same_bits(workspace.grad_norm, optimizer.grad_norm)
    for index, param in enumerate(params):
        assert same_bits(lists["params"][index], param)
        if dtypes.master:
            assert same_bits(lists["master_params"][index], optimizer.state[param]["master_param"])


def test_the_denominator_of_adam_has_a_floor_of_a_millionth(device):
    lists = fresh(ADAM, [(3,)], cases.IN_FLOAT, device)
    lists["params"][0].zero_()
    lists["grads"][0].copy_(torch.tensor([1e-9, 0.0, 1.0]))
    cases.run(UPDATE, lists, **ADAM, timestep=1, eps=0.0)
    # Where the gradient is above the floor, its first step has the length of the learning rate.
    assert_close(lists["params"][0], torch.tensor([-0.3e-3, 0.0, -0.3]))


# Workspaces.


def test_the_workspace_holds_the_norm_of_the_last_update_that_took_one(device):
    workspace = ops.OptimizerWorkspace()
    options = SGD | {"workspace": workspace}
    lists = cases.build(UPDATE, SGD, [(1025,)], Dtypes(BF16, BF16, F32), device)
    cases.run(UPDATE, lists, **options)
    cases.run(UPDATE, {"params": [], "grads": []}, max_grad_norm=1.0, **options)
    assert workspace.grad_norm is None
    for limit in (1.0, 1e6):
        new_grads(lists, bad=True)
        cases.run(UPDATE, lists, max_grad_norm=limit, **options)
        _, expected = clipped(lists["grads"])
        assert workspace.grad_norm.dtype == F32
        assert workspace.grad_norm.shape == ()
        assert workspace.grad_norm.item() == pytest.approx(expected, rel=1e-6)
    last = workspace.grad_norm.clone()
    new_grads(lists)
    cases.run(UPDATE, lists, **options)
    assert same_bits(workspace.grad_norm, last)
