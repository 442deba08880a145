"""Tests of gradients that a step writes back, and of the options that clip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import clipping_cases
from harness import optimizer_cases as cases
from harness.awkward import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUT_SHAPE,
    LAYOUTS,
    Layout,
    neighbours_untouched,
    placed,
)
from harness.clipping_cases import (
    CLIPPING,
    WAYS,
    expected_grads,
    fused_step,
    of_all_dtypes,
)
from harness.optimizer_cases import (
    assert_same_bits,
    give_grads,
    grads_of,
    make_params,
    pair,
    params_of,
)
from harness.reference import assert_close, same_bits, snapshot

import amp_ext

OPTIONS = {"max_grad_norm": 3.0, "clip_value": 0.5, "write_back_grads": True}

# What is written.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "clipping", [pytest.param({}, id="unclipped"), *CLIPPING, clipping_cases.HARMLESS[0]]
)
def test_a_write_back_leaves_what_was_stepped(clipping, way, device):
    writes, plain = of_all_dtypes(way, "AdamW", clipping, device, write_back_grads=True)
    scalers = [way.make_scaler(device, 2.0**4) for _ in range(2)]
    for _ in range(2):
        give_grads(writes, plain)
        before = snapshot(grads_of(writes))
        fused_step(writes, way, scalers[0])
        fused_step(plain, way, scalers[1])
        assert_same_bits(writes, plain)
        expected = expected_grads(before, clipping, writes.grad_norm, 1.0)
        assert all(map(same_bits, grads_of(writes), expected))


@pytest.mark.parametrize("first", [True, False])
def test_one_group_may_write_back_alone(first: bool, device):
    groups = [
        {"params": make_params(F32, device), "write_back_grads": writes}
        for writes in (first, not first)
    ]
    optimizer = amp_ext.optim.SGD(groups, max_grad_norm=3.0)
    give_grads(optimizer)
    before = snapshot(grads_of(optimizer))
    optimizer.step()
    clipped = expected_grads(before, {"max_grad_norm": 3.0}, optimizer.grad_norm, 1.0)
    half = len(cases.SHAPES)
    expected = clipped[:half] + before[half:] if first else before[:half] + clipped[half:]
    assert all(map(same_bits, grads_of(optimizer), expected))


@pytest.mark.parametrize("param_dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("grad_dtype", [F32, F16, BF16, F64], ids=str)
def test_a_write_back_keeps_the_dtype_of_the_gradient(param_dtype, grad_dtype, device):
    (param,) = make_params(param_dtype, device, [(1000,)])
    param.grad_dtype = None
    grad = param.grad = torch.randn(1000, device=device).to(grad_dtype)
    before = grad.clone()
    optimizer = amp_ext.optim.AdamW([param], clip_value=0.5, write_back_grads=True)
    optimizer.grad_scale = torch.tensor(2.0, device=device)
    optimizer.step()
    assert param.grad is grad
    assert_close(grad, (before.double() / 2).clamp(-0.5, 0.5))
    assert grad.dtype == grad_dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, F16, F64], ids=str)
def test_a_write_back_goes_into_the_gradient_of_any_layout(dtype, layout: Layout, device):
    (param,) = make_params(dtype, device, [LAYOUT_SHAPE])
    optimizer = amp_ext.optim.SGD([param], max_grad_norm=3.0, write_back_grads=True)
    for _ in range(2):
        view = param.grad = placed(torch.randn(LAYOUT_SHAPE, device=device).to(dtype), layout)
        before = view.clone()
        optimizer.step()
        expected = expected_grads([before], {"max_grad_norm": 3.0}, optimizer.grad_norm, 1.0)
        assert param.grad is view
        assert same_bits(view, expected[0])
        assert neighbours_untouched(view)


@pytest.mark.parametrize("way", clipping_cases.UNSCALED_IN_THE_STEP[1:])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_skipped_step_leaves_gradients_scaled(dtype, way, device):
    if not way.takes(dtype, device):
        pytest.skip(f"torch's scaler takes no {dtype} on {device}")
    optimizer, _ = pair("AdamW", {}, dtype, device, **OPTIONS)
    scaler = way.make_scaler(device, 16.0)
    give_grads(optimizer)
    params_of(optimizer)[1].grad.view(-1)[2] = math.inf
    clipping_cases.scale_grads(optimizer, scaler)
    before = snapshot(grads_of(optimizer))
    scaler.step(optimizer)
    assert all(map(same_bits, grads_of(optimizer), before))


def test_a_skipped_step_on_the_cpu_moves_no_version():
    """On a GPU the host does not know of the skip."""
    optimizer, _ = pair("AdamW", {}, **OPTIONS)
    cases.train([optimizer])
    optimizer.found_inf = torch.ones(())
    tensors = [*params_of(optimizer), *grads_of(optimizer)]
    versions = [tensor._version for tensor in tensors]
    optimizer.step()
    assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("write_back", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_only_a_write_back_moves_the_version_of_gradients(transposed, write_back: bool, device):
    options = OPTIONS | {"write_back_grads": write_back}
    optimizer, _ = pair("AdamW", {}, device=device, shapes=[(6, 5), (3,)], **options)
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    give_grads(optimizer)
    if transposed:
        params_of(optimizer)[0].grad = torch.randn(5, 6, device=device).t()
    before = snapshot(grads_of(optimizer))
    versions = [grad._version for grad in grads_of(optimizer)]
    optimizer.step()
    after = [grad._version for grad in grads_of(optimizer)]
    assert [new > old for new, old in zip(after, versions, strict=True)] == [write_back] * 2
    assert all(map(same_bits, grads_of(optimizer), before)) != write_back


@cases.each_class
def test_an_expanded_gradient_cannot_be_written_back(name, options, device):
    optimizer, _ = pair(name, options, device=device, shapes=[(5,), (6, 5)], write_back_grads=True)
    cases.train([optimizer])
    give_grads(optimizer)
    params_of(optimizer)[1].grad = torch.ones(5, device=device).expand(6, 5)
    before, grads = cases.bits_of(optimizer), snapshot(grads_of(optimizer))
    with pytest.raises(RuntimeError, match=r"grad of group 0, param 1 .*must not overlap"):
        optimizer.step()
    assert_same_bits(optimizer, before)
    assert all(map(same_bits, grads_of(optimizer), grads))
    params_of(optimizer)[1].grad = torch.ones(6, 5, device=device)
    optimizer.step()


def test_gradients_that_share_memory_cannot_be_written_back():
    optimizer, _ = pair("SGD", {}, shapes=[(5,), (5,)], write_back_grads=True)
    first, second = params_of(optimizer)
    bucket, where = torch.ones(9), "grad of group 0, param [01] .*"
    for shared, words in ((bucket[4:], f"{where}share memory"), (first.detach(), "share memory")):
        first.grad, second.grad = bucket[:5], shared
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
    bucket = torch.ones(10)
    first.grad, second.grad = bucket[:5], bucket[5:]
    optimizer.step()
    optimizer.param_groups[0]["write_back_grads"] = False
    first.grad = second.grad = bucket[5:]
    optimizer.step()


# Options.


def options_of(optimizer: cases.Optimizer) -> list[dict[str, Any]]:
    return [{name: group[name] for name in OPTIONS} for group in optimizer.param_groups]


@cases.each_class
def test_options_are_in_defaults_groups_and_state_dicts(name, options):
    optimizer, plain = pair(name, options, **OPTIONS)
    assert options_of(plain) == [dict.fromkeys(OPTIONS) | {"write_back_grads": False}]
    assert options_of(optimizer) == [OPTIONS]
    saved = optimizer.state_dict()
    assert saved.keys() == plain.state_dict().keys()
    for holder in (optimizer.defaults, saved["param_groups"][0]):
        assert {key: holder[key] for key in OPTIONS} == OPTIONS


# The operations.
