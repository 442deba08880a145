"""``amp_ext.ops.lion_``: what no other optimizer does."""

from __future__ import annotations

import math

import pytest
import torch
from harness.list_operations import IN_FLOAT, build, run

from amp_ext import ops


def test_every_element_moves_by_the_learning_rate(device):
    lists = build("lion_", {}, [(1000,)], IN_FLOAT, device)
    before = lists["params"][0].double()
    run("lion_", lists, lr=2.0**-7)
    moved = (lists["params"][0].double() - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 2.0**-7), rtol=1e-4, atol=0)


def test_an_average_of_zero_and_no_decay_leave_a_parameter_alone(device):
    lists = build("lion_", {}, [(5,)], IN_FLOAT, device)
    before = lists["params"][0].clone()
    lists["grads"][0].zero_(), lists["exp_avgs"][0].zero_()
    run("lion_", lists)
    assert torch.equal(lists["params"][0], before)


def test_the_step_looks_further_back_than_the_average(device):
    params, grads, averages = ([torch.full((3,), v, device=device)] for v in (1.0, -3.0, 1.0))
    ops.lion_(params, grads, averages, lr=0.5, beta1=0.5, beta2=0.9)
    assert params[0].tolist() == [1.5] * 3
    torch.testing.assert_close(averages[0], torch.full((3,), 0.6, device=device))


@pytest.mark.parametrize(("bad", "next_too"), [(math.nan, True), (math.inf, False)])
def test_a_bad_gradient_shows_at_once_or_at_the_next_step(device, bad, next_too):
    lists = build("lion_", {}, [(4,)], IN_FLOAT, device)
    lists["grads"][0][1] = bad
    run("lion_", lists)
    assert lists["params"][0].isnan().tolist() == [False, next_too, False, False]
    lists["grads"][0][1] = 1.0
    run("lion_", lists)
    assert lists["exp_avgs"][0].isfinite().tolist() == [True, False, True, True]
