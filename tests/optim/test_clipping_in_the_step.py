"""Tests of clipping inside the step: the same as clipping apart, whoever scales the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import clipping_cases
from harness import optimizer_cases as cases
from harness.clipping_cases import (
    CLIPPING,
    HARMLESS,
    WAYS,
    assert_nearly,
    clipped,
    fused_step,
    step_apart,
)
from harness.edge_shapes import F32, F64
from harness.optimizer_cases import (
    EACH_CLASS,
    assert_same_bits,
    give_grads,
    grads_of,
    pair,
    params_of,
)
from harness.reference import same_bits, snapshot
from harness.rows import rows
from torch import Tensor
from torch.nn import Parameter

import amp_ext

# Equal to clipping apart.


@clipped([*CLIPPING, *HARMLESS[:2]], WAYS)
def test_the_bits_are_those_of_clipping_apart(name, options, clipping, way, device):
    """Of parameters and states, of the norm, and of the gradients where they are written back."""
    fused, apart = pair(name, options, device=device, **clipping)
    scalers = way.make_scaler(device), way.make_scaler(device)
    for step in range(3):
        fused.param_groups[0]["write_back_grads"] = step == 1
        give_grads(fused, apart)
        exact = clipping_cases.norm_of(grads_of(fused))
        fused_step(fused, way, scalers[0])
        norm = step_apart(apart, scalers[1], clipping)
        assert_same_bits(fused, apart)
        if "max_grad_norm" in clipping:
            assert same_bits(fused.grad_norm, norm)
            assert fused.grad_norm.item() == pytest.approx(exact, rel=1e-6)
        else:
            assert fused.grad_norm is None
        if step == 1:
            assert all(map(same_bits, grads_of(fused), grads_of(apart)))


@clipped([*CLIPPING, *HARMLESS[3:]], [WAYS[0], WAYS[1], WAYS[3]], EACH_CLASS)
def test_gradients_of_all_groups_and_dtypes_are_clipped_together_without_a_rounding(
    name, options, clipping, way, device
):
    """As if the gradients had been clipped in float32 (float64) and stored so."""
    fused, apart = clipping_cases.of_all_dtypes(way, name, options, device, **clipping)
    scaler = way.make_scaler(device, 2.0**4)
    for param in params_of(apart):
        param.grad_dtype = None

    def clip(params: list[Parameter], limit: float) -> Tensor:
        return amp_ext.clip_grad_norm_(params, limit, total_norm=fused.grad_norm)

    for _ in range(3):
        give_grads(fused)
        for param, twin in zip(params_of(fused), params_of(apart), strict=True):
            twin.grad = param.grad.to(F64 if param.dtype == F64 else F32, copy=True)
        norm = clipping_cases.norm_of(grads_of(apart))
        fused_step(fused, way, scaler)
        step_apart(apart, None, clipping, clip)
        assert_same_bits(fused, apart)
        if "max_grad_norm" in clipping:
            assert fused.grad_norm.item() == pytest.approx(norm, rel=1e-6)


# The norm.


def test_the_norm_is_one_float32_that_each_step_writes_anew(device):
    optimizer, _ = pair("AdamW", {}, device=device, max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    for _ in range(3):
        norm = optimizer.grad_norm
        cases.train([optimizer])
        assert norm is None or optimizer.grad_norm is norm
        assert optimizer.grad_norm.item() == pytest.approx(
            clipping_cases.norm_of(grads_of(optimizer)), rel=1e-6
        )
    assert (norm.shape, norm.dtype, norm.device) == ((), F32, params_of(optimizer)[0].device)
    assert not norm.requires_grad


VALUES = (math.inf, -math.inf, math.nan)


@clipped([CLIPPING[1], CLIPPING[2], HARMLESS[1]], clipping_cases.SCALERS, EACH_CLASS)
def test_an_overflow_changes_not_a_bit_and_shows_in_the_norm(name, options, clipping, way, device):
    """At the first step it is as if it never was, later too."""
    fused, apart = pair(name, options, device=device, **clipping)
    scaler = way.make_scaler(device)
    for value in VALUES:
        start, scale = snapshot(params_of(fused)), scaler.get_scale()
        give_grads(fused)
        params_of(fused)[0].grad[77] = value
        fused_step(fused, way, scaler)
        assert all(map(same_bits, params_of(fused), start))
        assert scaler.get_scale() == scale / 2
        if "max_grad_norm" in clipping:
            assert fused.grad_norm.isnan() if math.isnan(value) else fused.grad_norm.isinf()
        give_grads(fused, apart)
        norm = clipping_cases.norm_of(grads_of(apart))
        fused_step(fused, way, scaler)
        step_apart(apart, None, clipping)
        assert_same_bits(fused, apart)
        if "max_grad_norm" in clipping:
            assert fused.grad_norm.item() == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6, math.inf])
@pytest.mark.parametrize("value", VALUES)
def test_without_a_scaler_a_norm_that_is_not_finite_acts_as_in_torch(
    value: float, limit: float, device
):
    for name, options in (row.values for row in EACH_CLASS):
        mine, _ = pair(name, options, device=device, max_grad_norm=limit)
        other = cases.theirs(name)(cases.twins(mine), foreach=False, **options)
        for step in range(2):
            give_grads(mine, other)
            if step == 1:
                for optimizer in (mine, other):
                    params_of(optimizer)[0].grad[77] = value
            mine.step()
            norm = step_apart(other, None, {"max_grad_norm": limit}, torch.nn.utils.clip_grad_norm_)
            assert_nearly(mine, other, norm, 2)


# Gradients that change between the look and the step.


def with_grad(params: list[Parameter]) -> list[Parameter]:
    return [param for param in params if param.grad is not None]


def recycle_grad(param: Parameter) -> None:
    """Replaces a gradient by three times itself, a tensor of the same version in the same memory.

    Allocators do so all the time: they give memory again that was freed just before.
    """
    version = param.grad._version
    torch.from_dlpack(param.grad).mul_(3)
    param.grad = torch.from_dlpack(param.grad)  # counts its versions from 0
    while param.grad._version < version:
        param.grad.add_(0)


CHANGES: dict[str, Callable[[list[Parameter]], Any]] = {
    "replace_at_the_same_address": lambda params: [*map(recycle_grad, with_grad(params))],
    "edit_one": lambda params: params[-1].grad.mul_(100),
    "drop_one": lambda params: setattr(params[0], "grad", None),
    "add_one": lambda params: setattr(params[2], "grad", torch.full_like(params[2], 7e4)),
}


@pytest.mark.parametrize("change", rows(CHANGES))
@pytest.mark.parametrize("way", WAYS[:3])
def test_the_norm_is_of_the_gradients_that_are_stepped(way, change, device):
    """Whatever a step hook does to them after the look."""
    clipping = {"max_grad_norm": 3.0}
    shapes = [(40, 50), (7,), (), (7,)]
    fused, apart = pair("SGD", {"lr": 0.1}, device=device, shapes=shapes, **clipping)
    scaler = way.make_scaler(device)

    def change_grads(*_: Any) -> None:
        change(params_of(fused))

    fused.register_step_pre_hook(change_grads)
    for step in range(3):
        give_grads(fused, apart)
        if step == 0:
            params_of(fused)[2].grad = params_of(apart)[2].grad = None
        clipping_cases.scale_grads(fused, scaler)
        scaled = 1.0 if scaler is None or way.unscale_first else scaler.get_scale()
        for param in with_grad(params_of(apart)):
            param.grad = param.grad * scaled
        change(params_of(apart))
        for param in with_grad(params_of(apart)):
            param.grad = param.grad.contiguous() / scaled
        way.step(fused, scaler)
        norm = step_apart(apart, None, clipping)
        assert_nearly(fused, apart, norm)


# Gradients that are written back.


@pytest.mark.parametrize("write_back", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_only_a_write_back_moves_the_version_of_gradients(transposed, write_back: bool, device):
    options = {"max_grad_norm": 3.0, "clip_value": 0.5, "write_back_grads": write_back}
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
