"""``amp_ext.ops.adam_``: what Adam, AdamW and AMSGrad have beyond any list operation."""

from __future__ import annotations

import pytest
from harness import list_operations as cases
from harness.reference import same_bits


@pytest.mark.parametrize("step", [0, 1, 999, 100_000, 16_777_214])
@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_bias_correction_is_right_at_any_age(device, step, floor):
    lists = cases.build("adam_", {}, [(64,)], cases.IN_FLOAT, device, step=step)
    if floor:  # of the corrected moment, of which some are below it
        lists["exp_avg_sqs"][0].mul_(8)
    cases.assert_steps_by_the_formula("adam_", lists, beta2=0.999, denominator_floor=floor)


def test_each_tensor_has_its_own_step_count(device):
    lists = cases.build("adam_", {}, [(5,)] * 4, cases.IN_FLOAT, device)
    for count, step in zip([0, 1, 7, 50], lists["steps"], strict=True):
        step.fill_(count)
    cases.assert_steps_by_the_formula("adam_", lists)


def test_with_a_beta1_of_0_the_first_moment_is_the_gradient(device):
    lists = cases.build("adam_", {}, [(64,)], cases.IN_FLOAT, device)
    lists["exp_avgs"][0].fill_(1e8)  # of which nothing may be left, nor of what it rounds off
    cases.run("adam_", lists, beta1=0.0)
    assert same_bits(lists["exp_avgs"][0], lists["grads"][0])
