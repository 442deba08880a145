"""What single formulas have beyond any list operation; test_steps.py has what all of them have."""

from __future__ import annotations

import decimal
import math
import random

import pytest
import torch
from harness import list_operations as cases
from harness.edge_shapes import BF16, F16, F32, FEW_DTYPES
from harness.gradient_lists import equal
from harness.reference import same_bits

from amp_ext import ops

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
