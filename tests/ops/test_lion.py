"""``amp_ext.ops.lion_``: what no other optimizer does."""

from __future__ import annotations

import math

import pytest
import torch
from harness.list_operations import IN_FLOAT, build, run


def test_an_average_of_zero_and_no_decay_leave_a_parameter_alone(device):
    lists = build("lion_", {}, [(5,)], IN_FLOAT, device)
    before = lists["params"][0].clone()
    lists["grads"][0].zero_(), lists["exp_avgs"][0].zero_()
    run("lion_", lists)
    assert torch.equal(lists["params"][0], before)


@pytest.mark.parametrize(("bad", "next_too"), [(math.nan, True), (math.inf, False)])
def test_a_bad_gradient_shows_at_once_or_at_the_next_step(device, bad, next_too):
    lists = build("lion_", {}, [(4,)], IN_FLOAT, device)
    lists["grads"][0][1] = bad
    run("lion_", lists)
    assert lists["params"][0].isnan().tolist() == [False, next_too, False, False]
    lists["grads"][0][1] = 1.0
    run("lion_", lists)
    assert lists["exp_avgs"][0].isfinite().tolist() == [True, False, True, True]
