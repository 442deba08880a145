"""Tests of gradients that change between the scaler's look and the step, which then looks again."""

from __future__ import annotations

import math

import pytest
import torch
from clipping_cases import SCALE, WAYS, Way, assert_nearly, fused_step, scale_grads, step_apart
from optimizer_cases import assert_same_bits, bits_of, give_grads, grads_of, pair, params_of
from reference import same_bits
from torch import Tensor
from torch.nn import Parameter

import amp_ext


def with_grad(params: list[Parameter]) -> list[Parameter]:
    return [param for param in params if param.grad is not None]


def replace(params: list[Parameter]) -> None:
    for param in with_grad(params):
        param.grad = param.grad * 3


def recycle_grad(param: Parameter, new: Tensor) -> None:
    """Replaces a gradient by another tensor of the same version in the same memory.

    Allocators do so all the time: they give memory again that was freed just before.
    """
    version = param.grad._version
    torch.from_dlpack(param.grad).copy_(new)
    param.grad = torch.from_dlpack(param.grad)  # counts its versions from 0
    while param.grad._version < version:
        param.grad.add_(0)


def replace_at_the_same_address(params: list[Parameter]) -> None:
    for param in with_grad(params):
        recycle_grad(param, param.grad * 3)


def edit(params: list[Parameter]) -> None:
    for param in with_grad(params):
        param.grad.mul_(3)


def edit_one(params: list[Parameter]) -> None:
    params[-1].grad.mul_(100)


def replace_one(params: list[Parameter]) -> None:
    params[0].grad = torch.ones_like(params[0])


def drop_one(params: list[Parameter]) -> None:
    params[0].grad = None


def add_one(params: list[Parameter]) -> None:
    params[2].grad = torch.full_like(params[2], 7e4)


def swap_two(params: list[Parameter]) -> None:
    params[1].grad, params[-1].grad = params[-1].grad * 2, params[1].grad * 2


def expand_one(params: list[Parameter]) -> None:
    params[0].grad = torch.full((), 2.0, device=params[0].device).expand_as(params[0])


CHANGES = [
    pytest.param(change, id=change.__name__.replace("_", "-"))
    for change in (
        replace,
        replace_at_the_same_address,
        edit,
        edit_one,
        replace_one,
        drop_one,
        add_one,
        swap_two,
        expand_one,
    )
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS[:3])
def test_the_norm_is_of_the_gradients_that_are_stepped(way: Way, change, device) -> None:
    """Whatever a step hook does to them after the look."""
    clipping = {"max_grad_norm": 3.0}
    fused, apart = pair(
        "SGD", {"lr": 0.1}, device=device, shapes=[(40, 50), (7,), (), (7,)], **clipping
    )
    scaler = way.make_scaler(device)
    fused.register_step_pre_hook(lambda optimizer, args, kwargs: change(params_of(optimizer)))
    for step in range(3):
        give_grads(fused, apart)
        for optimizer in (fused, apart):
            if step == 0:
                params_of(optimizer)[2].grad = None
        scale_grads(fused, scaler)
        scaled = 1.0 if scaler is None or way.unscale_first else scaler.get_scale()
        for param in params_of(apart):
            param.grad = None if param.grad is None else param.grad * scaled
        change(params_of(apart))
        for param in params_of(apart):
            param.grad = None if param.grad is None else param.grad.contiguous() / scaled
        way.step(fused, scaler)
        norm = step_apart(apart, None, clipping)
        assert_nearly(fused, apart, norm)


def spoiled(param: Parameter, value: float) -> Tensor:
    grad = param.grad.clone()
    grad[77] = value
    return grad


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda p, value: p.grad.__setitem__(77, value), id="edit"),
        pytest.param(lambda p, value: setattr(p, "grad", spoiled(p, value)), id="replace"),
        pytest.param(lambda p, value: recycle_grad(p, spoiled(p, value)), id="recycle"),
    ],
)
@pytest.mark.parametrize(
    ("clipping", "way"),
    [
        pytest.param({}, Way(amp_ext.GradScaler), id="our-scaler"),
        pytest.param({"clip_value": 0.5}, Way(amp_ext.GradScaler), id="value-our-scaler"),
        pytest.param({"max_grad_norm": 3.0}, Way(amp_ext.GradScaler), id="norm-our-scaler"),
        pytest.param({"max_grad_norm": 3.0}, Way(torch.amp.GradScaler), id="norm-torch-scaler"),
        pytest.param(
            {"max_grad_norm": 3.0},
            Way(amp_ext.GradScaler, unscale_first=True),
            id="norm-our-scaler-unscale",
        ),
    ],
)
def test_an_inf_that_a_hook_brings_in_skips_the_step(clipping, way: Way, spoil, device) -> None:
    optimizer, _ = pair("AdamW", {}, device=device, **clipping)
    scaler = way.make_scaler(device)
    for value in (math.inf, -math.inf, math.nan):
        moving = params_of(optimizer)[0].detach().clone()
        give_grads(optimizer)
        fused_step(optimizer, way, scaler)
        assert not same_bits(params_of(optimizer)[0], moving)
        before = bits_of(optimizer)
        hook = optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs, value=value: spoil(params_of(optimizer)[0], value)
        )
        give_grads(optimizer)
        fused_step(optimizer, way, scaler)
        hook.remove()
        assert_same_bits(optimizer, before)
        assert "max_grad_norm" not in clipping or not optimizer.grad_norm.isfinite()


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda params: give_grads(params), id="new-gradients"),
        pytest.param(edit, id="edit"),
        pytest.param(drop_one, id="drop-one"),
        pytest.param(replace_at_the_same_address, id="recycled"),
    ],
)
def test_a_look_without_a_step_does_not_reach_the_next_step(between, device) -> None:
    fused, apart = pair("SGD", {"lr": 0.1}, device=device, max_grad_norm=3.0)
    give_grads(fused)
    fused._check_finite(torch.zeros((), device=device), torch.tensor(8.0, device=device))
    between(params_of(fused))
    for param, twin in zip(params_of(fused), params_of(apart), strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    fused.step()
    norm = step_apart(apart, None, {"max_grad_norm": 3.0})
    assert same_bits(fused.grad_norm, norm)
    assert_same_bits(fused, apart)


def test_a_look_serves_one_step_only(device) -> None:
    fused, apart = pair("SGD", {"lr": 0.1, "momentum": 0.9}, device=device, max_grad_norm=3.0)
    scaler = amp_ext.GradScaler(torch.device(device).type, SCALE)
    give_grads(fused, apart)
    fused_step(fused, Way(amp_ext.GradScaler), scaler)
    step_apart(apart, None, {"max_grad_norm": 3.0})
    fused.step()  # without the scaler: as the gradients are
    for grad in grads_of(fused):
        grad.zero_()
    fused.step()
    assert fused.grad_norm.item() == 0
