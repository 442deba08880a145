"""``denominator_floor``: Adam divides by ``sqrt(max(v, floor)) + eps``, v the corrected moment."""

from __future__ import annotations

import math

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import F32, F64, FEW_DTYPES, Dtypes
from harness.reference import assert_close, same_bits

with_and_without_amsgrad = pytest.mark.parametrize(
    "amsgrad", [{}, cases.AMSGRAD], ids=["adam", "amsgrad"]
)


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
