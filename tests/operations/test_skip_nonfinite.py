"""``skip_nonfinite``: elements whose gradient is inf or NaN are left alone, all others step."""

from __future__ import annotations

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import BF16, F16, F32, F64, FEW_DTYPES, INF, NAN
from harness.reference import same_bits

from amp_ext import ops

SKIP = {"skip_nonfinite": True}


@cases.few_steps_and_updates
def test_nothing_but_the_step_count_changes_where_no_gradient_is_finite(device, operation, options):
    for bad in (INF, -INF, NAN):
        lists = cases.build(operation, options, [(5,), (70,)], cases.WITH_MASTERS, device)
        for grad in lists["grads"]:
            grad.fill_(bad)
        before = cases.copied(lists)
        skipping = SKIP if cases.OPERATIONS[operation].has_scaler else {}  # the others always do
        cases.run(operation, lists, max_grad_norm=1.0, clip_value=0.5, **skipping, **options)
        for step in before.get("steps", []):
            step.add_(1)
        cases.assert_same(lists, before)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        pytest.param(F16, torch.tensor([0x7FC1, -0x3F, 0x7F80]).short().view(BF16), id="nan"),
        pytest.param(BF16, torch.tensor([0x7E01, -0x1FF, 0x7C00]).short().view(F16), id="nan16"),
        pytest.param(F32, torch.tensor([1e300, -1e39, NAN], dtype=F64), id="too-large"),
    ],
)
def test_a_skipped_gradient_keeps_what_a_conversion_would_change(device, dtype, bad):
    """No kernel takes its dtype beside that of the parameter: a copy in float32 is stepped."""
    before = torch.cat([bad, torch.full((5,), 2.0, dtype=bad.dtype)])
    grad, param = before.to(device, copy=True), torch.ones(8, dtype=dtype, device=device)
    scale = torch.tensor(4.0, device=device)
    ops.sgd_([param], [grad], lr=0.5, grad_scale=scale, write_back_grads=True, **SKIP)
    before[3:] = 0.5
    assert same_bits(grad, before)
    assert param.tolist() == [1.0] * 3 + [0.75] * 5


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_the_gradient_as_it_came_decides_not_the_unscaled_one(device, dtypes):
    largest = torch.finfo(dtypes.grad).max
    for write_back_grads in (False, True):
        start = torch.zeros(70, dtype=dtypes.param, device=device)
        grad = torch.full((70,), largest, dtype=dtypes.grad, device=device)
        grad[7] = INF
        ops.sgd_(
            *([start], [grad]),
            master_params=[start.float()] if dtypes.master else None,
            lr=1.0,
            grad_scale=torch.tensor(2.0**-10, device=device),
            clip_value=2.0,
            write_back_grads=write_back_grads,
            **SKIP,
        )
        expected = torch.full_like(start, -2.0)
        expected[7] = 0.0
        assert same_bits(start, expected)


@pytest.mark.parametrize("size", [1e-25, 1e30], ids=["tiny", "huge"])
def test_the_norm_keeps_its_range_beside_infinite_elements(device, size):
    lists = cases.build("sgd_", {}, [(16385,), (70,), (5,)], cases.IN_FLOAT, device, bad=True)
    lists["grads"] = [grad * size for grad in lists["grads"]]
    norm = torch.zeros((), device=device)
    before, options = cases.copied(lists), {"max_grad_norm": 1.0, "grad_norm": norm} | SKIP
    cases.run("sgd_", lists, **options)
    assert 0 < norm.item() < INF
    cases.assert_is_the_formula("sgd_", lists, before, **options)


def test_a_norm_too_large_for_float64_clips_finite_elements_to_zero_as_torch_does(device):
    param = torch.ones(4, dtype=F64, device=device)
    grad = torch.tensor([1e300, 1.0, INF, NAN], dtype=F64, device=device)
    norm = torch.zeros((), device=device)
    options = {"max_grad_norm": 1.0, "grad_norm": norm, "weight_decay": 0.5} | SKIP
    ops.sgd_([param], [grad], lr=1.0, decoupled_weight_decay=True, **options)
    assert norm.item() == INF
    assert param.tolist() == [0.5, 0.5, 1.0, 1.0]
