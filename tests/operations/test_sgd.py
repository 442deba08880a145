"""``amp_ext.ops.sgd_``: first steps, lists that options need, and every 16-bit number exactly."""

from __future__ import annotations

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import BF16, F16, F32
from harness.gradient_lists import equal
from harness.reference import same_bits


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


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_parameter_is_the_master_rounded_to_nearest_even(device, dtype):
    exact = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype).float()
    neighbour = exact.view(torch.int32)
    # Every 16-bit number, the middle to the next one, a bit beside the middle, and random bits.
    half = 1 << (15 if dtype == BF16 else 12)
    bits = [neighbour + offset for offset in (0, half - 1, half, half + 1)]
    bits.append(torch.randint(-(2**31), 2**31 - 1, (100_000,)).to(torch.int32).to(device))
    grad = torch.cat(bits).view(F32)
    master, param = torch.zeros_like(grad), torch.zeros_like(grad, dtype=dtype)
    cases.run("sgd_", {"params": [param], "grads": [grad], "master_params": [master]}, lr=1.0)
    expected = 0 - grad
    keep = ~expected.isnan()
    assert same_bits(master[keep], expected[keep])
    assert same_bits(param[keep], expected.to(dtype)[keep])
    assert param[~keep].isnan().all()


FITTING = "momentum_buffers must be given if and only if momentum is not 0, got mom"
FIRST = "steps must be given with dampening, whose first step differs"
MOMENTUM, DAMPENING = cases.MOMENTUM, cases.DAMPENING


@pytest.mark.parametrize(
    ("built_for", "options", "words"),
    [(MOMENTUM, {}, FITTING), ({}, MOMENTUM, FITTING), (MOMENTUM, DAMPENING, FIRST)],
)
def test_lists_that_do_not_fit_the_options_are_named(built_for, options, words):
    lists = cases.build("sgd_", built_for, [(5,)] * 3, cases.IN_FLOAT, "cpu")
    before = cases.copied(lists)
    with pytest.raises(RuntimeError, match=f"^sgd_: {words}"):
        cases.run("sgd_", lists, **options)
    assert all(map(same_bits, lists["params"], before["params"]))
