"""``amp_ext.ops.optimizer_update_``: one step for people who keep their own loop and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import list_operations as cases
from harness.edge_shapes import BF16, F32, FEW_DTYPES, Dtypes
from harness.reference import assert_close, clipped, same_bits
from harness.rows import rows
from torch.nn import Parameter

import amp_ext
from amp_ext import ops
from amp_ext.ops import OptimizerType

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


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    rows(
        {
            "sgd": (SGD, amp_ext.optim.SGD, {}),
            "momentum": (MOMENTUM, amp_ext.optim.SGD, {"momentum": 0.8}),
            "adam": (ADAM, amp_ext.optim.Adam, AS_ADAM),
        }
    ),
)
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
