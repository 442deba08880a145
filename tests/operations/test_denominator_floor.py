"""``denominator_floor``: Adam divides by ``sqrt(max(v, floor)) + eps``, v the corrected moment."""

from __future__ import annotations

import math

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import FEW_DTYPES
from harness.reference import same_bits

with_and_without_amsgrad = pytest.mark.parametrize(
    "amsgrad", [{}, cases.AMSGRAD], ids=["adam", "amsgrad"]
)


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
