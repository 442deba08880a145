"""Tests of clipping inside the step: the same as clipping apart, whoever scales the gradients."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUT_SHAPE,
    LAYOUTS,
    Layout,
    neighbours_untouched,
    placed,
    transposed,
)
from optimizer_cases import (
    EACH_CLASS,
    SHAPES,
    assert_same_bits,
    bits_of,
    give_grads,
    in_another_process,
    make_params,
    ours,
    params_of,
    theirs,
    twins,
)
from reference import assert_close, same_bits, snapshot, tolerance
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext import ops

SCALE = 2.0**10
Clip = Callable[..., Tensor]

# Gradients of these tests have norms of about 128 and elements up to 4.
CLIPPING = [
    pytest.param({"max_grad_norm": 3.0}, id="norm"),
    pytest.param({"clip_value": 0.25}, id="value"),
    pytest.param({"max_grad_norm": 30.0, "clip_value": 0.25}, id="norm-and-value"),
    pytest.param({"max_grad_norm": 0.0}, id="norm-0"),
]
HARMLESS = [
    pytest.param({"max_grad_norm": 1e4}, id="large-norm"),
    pytest.param({"max_grad_norm": math.inf}, id="inf-norm"),
    pytest.param({"clip_value": 1e4}, id="large-value"),
    pytest.param({"clip_value": math.inf}, id="inf-value"),
    pytest.param({"max_grad_norm": 1e4, "clip_value": 1e4}, id="both"),
]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step is taken: under which scaler, if any, and whether ``unscale_`` goes before it."""

    scaler: type[torch.amp.GradScaler] | None
    unscale_first: bool = False

    def make_scaler(self, device, scale: float = SCALE) -> torch.amp.GradScaler | None:
        if self.scaler is None:
            return None
        return self.scaler(torch.device(device).type, scale, growth_interval=2)

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is None:
            optimizer.step()
            return
        if self.unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


WAYS = [
    pytest.param(Way(None), id="no-scaler"),
    pytest.param(Way(amp_ext.GradScaler), id="our-scaler"),
    pytest.param(Way(amp_ext.GradScaler, unscale_first=True), id="our-scaler-unscale"),
    pytest.param(Way(torch.amp.GradScaler), id="torch-scaler"),
    pytest.param(Way(torch.amp.GradScaler, unscale_first=True), id="torch-scaler-unscale"),
]
SCALERS = WAYS[1:]
UNSCALED_IN_THE_STEP = [WAYS[0], WAYS[1], WAYS[3]]


def cases(clippings: list[Any], ways: list[Any]) -> list[Any]:
    """Returns rows of one optimizer in every way, and of the others in the usual ones.

    The one is SGD, whose steps are as long as the gradients; those of Adam hardly change with them.
    """
    return [
        pytest.param(
            *optimizer.values,
            *clipping.values,
            *way.values,
            id=f"{optimizer.id}-{clipping.id}-{way.id}",
        )
        for optimizer in EACH_CLASS
        for clipping in clippings
        for way in ways
        if optimizer.id == "momentum" or clipping.id in ("norm-and-value", "both")
    ]


CASE = ("name", "options", "clipping", "way")


def scale_grads(params: list[Parameter], scaler: torch.amp.GradScaler | None) -> None:
    """Multiplies gradients as the backward pass of a scaled loss would have."""
    if scaler is None:
        return
    scale = scaler.scale(torch.ones((), device=params[0].device))
    for param in params:
        if param.grad is not None:
            param.grad = param.grad * scale.to(param.grad.dtype)


def fused_step(optimizer, way: Way, scaler: torch.amp.GradScaler | None) -> None:
    """Takes a step that clips inside, if its options say so."""
    scale_grads(params_of(optimizer), scaler)
    way.step(optimizer, scaler)


def step_apart(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    clipping: dict[str, float],
    clip: Clip = amp_ext.clip_grad_norm_,
) -> Tensor:
    """Unscales, clips by norm, clips by value, and steps an optimizer that does none of it."""
    params = params_of(optimizer)
    scale_grads(params, scaler)
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip(params, clipping.get("max_grad_norm", math.inf))
    if "clip_value" in clipping:
        torch.nn.utils.clip_grad_value_(params, clipping["clip_value"])
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return norm


def pair(name: str, options: dict[str, Any], clipping: dict[str, Any], device, dtype=F32, **kind):
    """Returns an optimizer that clips and one that does not, for equal parameters."""
    params = make_params(dtype, device, **kind)
    clips = ours(name)(params, **options, **clipping)
    return clips, ours(name)(twins(params), **options)


def norm_of(grads: list[Tensor | None]) -> float:
    squares = [grad.double().square().sum().item() for grad in grads if grad is not None]
    return math.sqrt(math.fsum(squares))


def grads_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param.grad for param in params_of(optimizer) if param.grad is not None]


# Equal to clipping apart.


@pytest.mark.parametrize(CASE, cases([*CLIPPING, HARMLESS[0]], WAYS))
def test_the_bits_are_those_of_clipping_apart(name, options, clipping, way: Way, device) -> None:
    fused, apart = pair(name, options, clipping, device)
    scalers = way.make_scaler(device), way.make_scaler(device)
    for _ in range(3):
        give_grads(params_of(fused), params_of(apart))
        fused_step(fused, way, scalers[0])
        norm = step_apart(apart, scalers[1], clipping)
        assert_same_bits(fused, apart)
        if "max_grad_norm" in clipping:
            assert same_bits(fused.grad_norm, norm)


@pytest.mark.parametrize(CASE, cases(CLIPPING, WAYS))
def test_the_results_are_those_of_torch(name, options, clipping, way: Way, device) -> None:
    mine, _ = pair(name, options, clipping, device)
    other = theirs(name)(twins(params_of(mine)), foreach=False, **options)
    scaler, torchs = way.make_scaler(device), way.make_scaler(device)
    for step in range(1, 4):
        give_grads(params_of(mine), params_of(other))
        fused_step(mine, way, scaler)
        norm = step_apart(other, torchs, clipping, torch.nn.utils.clip_grad_norm_)
        if "max_grad_norm" in clipping:
            torch.testing.assert_close(mine.grad_norm, norm, rtol=1e-6, atol=0)
        for param, wanted in zip(params_of(mine), params_of(other), strict=True):
            torch.testing.assert_close(param, wanted, **tolerance(F32, step, 4.0))


@pytest.mark.parametrize("scale", [3.0, 0.1, 12345.678])
@pytest.mark.parametrize(CASE, cases(CLIPPING[2:3], SCALERS))
def test_a_scale_that_rounds_costs_a_rounding(
    name, options, clipping, way: Way, scale, device
) -> None:
    fused, apart = pair(name, options, clipping, device)
    scalers = way.make_scaler(device, scale), way.make_scaler(device, scale)
    for step in range(1, 4):
        give_grads(params_of(fused), params_of(apart))
        fused_step(fused, way, scalers[0])
        norm = step_apart(apart, scalers[1], clipping)
        torch.testing.assert_close(fused.grad_norm, norm, rtol=1e-6, atol=0)
        for param, wanted in zip(params_of(fused), params_of(apart), strict=True):
            torch.testing.assert_close(param, wanted, **tolerance(F32, step, 4.0))


@pytest.mark.parametrize(CASE, cases(CLIPPING, UNSCALED_IN_THE_STEP))
def test_gradients_of_other_dtypes_are_clipped_without_a_rounding(
    name, options, clipping, way: Way, device
) -> None:
    """As if the gradients had been clipped in float32 (float64) and stored so."""
    for dtype, wide in ((F16, F32), (BF16, F32), (F64, F64)):
        fused, apart = pair(name, options, clipping, device, dtype)
        scaler = way.make_scaler(device, 2.0**4)
        for param in params_of(apart):
            param.grad_dtype = None

        def clip(params: list[Parameter], limit: float, fused=fused) -> Tensor:
            return amp_ext.clip_grad_norm_(params, limit, total_norm=fused.grad_norm)

        for _ in range(2):
            give_grads(params_of(fused))
            for param, twin in zip(params_of(fused), params_of(apart), strict=True):
                twin.grad = param.grad.to(wide, copy=True)
            norm = norm_of(grads_of(apart))
            fused_step(fused, way, scaler)
            step_apart(apart, None, clipping, clip)
            assert_same_bits(fused, apart)
            if "max_grad_norm" in clipping:
                assert fused.grad_norm.item() == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize(CASE, cases(HARMLESS, WAYS))
def test_small_gradients_are_stepped_exactly_as_without_clipping(
    name, options, clipping, way: Way, device
) -> None:
    for dtype in (F32, F16, BF16, F64):
        if way.unscale_first and dtype == F16:
            continue  # is refused: gradients in float16 are unscaled in the step
        clips, plain = pair(name, options, clipping, device, dtype)
        scalers = way.make_scaler(device, 2.0**4), way.make_scaler(device, 2.0**4)
        for _ in range(2):
            give_grads(params_of(clips), params_of(plain))
            fused_step(clips, way, scalers[0])
            fused_step(plain, way, scalers[1])
            assert_same_bits(clips, plain)


def test_the_norm_is_clipped_before_the_value(device) -> None:
    """(3, 4) has the norm 5 and becomes (0.6, 0.8); the other order would give 0.7 twice."""
    (param,) = make_params(F32, device, [(2,)])
    start = param.detach().clone()
    optimizer = amp_ext.optim.SGD([param], lr=1.0, max_grad_norm=1.0, clip_value=0.7)
    param.grad = torch.tensor([3.0, -4.0], device=device)
    optimizer.step()
    torch.testing.assert_close(start - param.detach(), torch.tensor([0.6, -0.7], device=device))


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_maximizing_clips_the_gradient_that_is_there(name, clipping, device) -> None:
    options = {"lr": 0.05, "maximize": True, "weight_decay": 0.1}
    fused, apart = pair(name, options, clipping, device)
    for _ in range(2):
        give_grads(params_of(fused), params_of(apart))
        fused.step()
        step_apart(apart, None, clipping)
        assert_same_bits(fused, apart)


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_weight_decay_is_not_part_of_the_norm(name, options, device) -> None:
    optimizer, _ = pair(name, options | {"weight_decay": 10.0}, {"max_grad_norm": 1.0}, device)
    give_grads(params_of(optimizer))
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(norm_of(grads_of(optimizer)), rel=1e-6)


# The norm.


def test_the_norm_is_one_float32_that_each_step_writes_anew(device) -> None:
    optimizer, _ = pair("AdamW", {}, {"max_grad_norm": 1.0}, device)
    assert optimizer.grad_norm is None
    give_grads(params_of(optimizer))
    optimizer.step()
    norm = optimizer.grad_norm
    assert (norm.shape, norm.dtype, norm.device) == ((), F32, params_of(optimizer)[0].device)
    assert not norm.requires_grad
    address = norm.data_ptr()
    for factor in (3.0, 0.5, 0.0):
        optimizer.rebuild()
        give_grads(params_of(optimizer))
        for grad in grads_of(optimizer):
            grad.mul_(factor)
        optimizer.step()
        assert optimizer.grad_norm is norm
        assert norm.data_ptr() == address
        assert norm.item() == pytest.approx(norm_of(grads_of(optimizer)), rel=1e-6)


@pytest.mark.parametrize("clipping", [{}, {"clip_value": 1.0}], ids=str)
def test_without_a_limit_nothing_is_measured(clipping, device) -> None:
    optimizer, _ = pair("AdamW", {}, clipping, device)
    give_grads(params_of(optimizer))
    optimizer.step()
    assert optimizer.grad_norm is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e5, math.inf])
def test_the_norm_is_that_of_the_unscaled_gradients_whatever_the_limit(
    limit: float, way: Way, device
) -> None:
    optimizer, _ = pair("SGD", {"lr": 0.1}, {"max_grad_norm": limit}, device)
    scaler = way.make_scaler(device)
    for _ in range(2):
        give_grads(params_of(optimizer))
        norm = norm_of(grads_of(optimizer))
        fused_step(optimizer, way, scaler)
        assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-6)


def test_a_step_without_gradients_has_the_norm_zero(device) -> None:
    optimizer, _ = pair("SGD", {"lr": 0.1}, {"max_grad_norm": 1.0}, device)
    give_grads(params_of(optimizer))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert optimizer.grad_norm.item() == 0


BAD = [pytest.param(value, id=name) for name, value in
       [("inf", math.inf), ("minus-inf", -math.inf), ("nan", math.nan)]]  # fmt: skip


@pytest.mark.parametrize(CASE, cases([*CLIPPING, HARMLESS[1]], SCALERS))
def test_an_overflow_changes_not_a_bit_and_shows_in_the_norm(
    name, options, clipping, way: Way, device
) -> None:
    optimizer, _ = pair(name, options, clipping, device)
    scaler = way.make_scaler(device)
    for value in (math.inf, -math.inf, math.nan):
        give_grads(params_of(optimizer))
        norm = norm_of(grads_of(optimizer))
        fused_step(optimizer, way, scaler)
        if "max_grad_norm" in clipping:
            assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-6)
        before, scale = bits_of(optimizer), scaler.get_scale()
        give_grads(params_of(optimizer))
        params_of(optimizer)[0].grad[77] = value
        fused_step(optimizer, way, scaler)
        assert_same_bits(optimizer, before)
        assert scaler.get_scale() == scale / 2
        if "max_grad_norm" in clipping:
            assert optimizer.grad_norm.isnan() if math.isnan(value) else optimizer.grad_norm.isinf()


@pytest.mark.parametrize(CASE, cases(CLIPPING[2:3], SCALERS))
def test_an_overflow_at_the_first_step_is_as_if_it_never_was(
    name, options, clipping, way: Way, device
) -> None:
    fused, apart = pair(name, options, clipping, device)
    scaler = way.make_scaler(device)
    give_grads(params_of(fused))
    params_of(fused)[1].grad.fill_(math.inf)
    fused_step(fused, way, scaler)
    for _ in range(2):
        give_grads(params_of(fused), params_of(apart))
        fused_step(fused, way, scaler)
        step_apart(apart, None, clipping)
    assert_same_bits(fused, apart)


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6, math.inf])
@pytest.mark.parametrize("value", BAD)
def test_without_a_scaler_a_norm_that_is_not_finite_acts_as_in_torch(
    value: float, limit: float, device
) -> None:
    for name in ("Adam", "AdamW", "SGD"):
        mine, _ = pair(name, {"lr": 0.05}, {"max_grad_norm": limit}, device)
        other = theirs(name)(twins(params_of(mine)), lr=0.05, foreach=False)
        for step in range(2):
            give_grads(params_of(mine), params_of(other))
            if step == 1:
                for optimizer in (mine, other):
                    params_of(optimizer)[0].grad[77] = value
            mine.step()
            norm = step_apart(other, None, {"max_grad_norm": limit}, torch.nn.utils.clip_grad_norm_)
            torch.testing.assert_close(mine.grad_norm, norm, rtol=1e-6, atol=0, equal_nan=True)
        for param, wanted in zip(params_of(mine), params_of(other), strict=True):
            torch.testing.assert_close(param, wanted, **tolerance(F32, 2, 4.0), equal_nan=True)


@pytest.mark.parametrize("exponent", [60, -60])
def test_a_scale_may_push_the_squares_out_of_float32(exponent: int, device) -> None:
    fused, apart = pair("SGD", {"lr": 0.1}, {"max_grad_norm": 3.0}, device)
    give_grads(params_of(fused), params_of(apart))
    norm = step_apart(apart, None, {"max_grad_norm": 3.0})
    for grad in grads_of(fused):
        grad.mul_(2.0**exponent)
    fused.grad_scale = torch.tensor(2.0**exponent, device=device)
    fused.step()
    torch.testing.assert_close(fused.grad_norm, norm, rtol=1e-6, atol=0)
    for param, wanted in zip(params_of(fused), params_of(apart), strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(F32))


@pytest.mark.parametrize("scale", [0.0, 1e-39, math.nan])
def test_a_scale_without_a_finite_inverse_skips_the_step(scale: float, device) -> None:
    optimizer, _ = pair("AdamW", {}, {"max_grad_norm": 1.0, "clip_value": 1.0}, device)
    before = snapshot(params_of(optimizer))
    give_grads(params_of(optimizer))
    optimizer.grad_scale = torch.tensor(scale, device=device)
    optimizer.step()
    assert all(map(same_bits, params_of(optimizer), before))


# Groups.


def of_all_dtypes(device) -> list[dict[str, Any]]:
    return [
        {"params": make_params(dtype, device), "lr": 0.01 * (index + 1)}
        for index, dtype in enumerate([F32, F16, BF16, F64, F32])
    ]


@pytest.mark.parametrize("way", UNSCALED_IN_THE_STEP)
@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_one_norm_is_taken_over_all_groups_and_dtypes(name, options, way: Way, device) -> None:
    groups = of_all_dtypes(device)
    copied = [group | {"params": twins(group["params"])} for group in groups]
    fused, apart = ours(name)(groups, **options, max_grad_norm=3.0), ours(name)(copied, **options)
    scaler = way.make_scaler(device, 2.0**4)
    for param in params_of(apart):
        param.grad_dtype = None
    for _ in range(3):
        give_grads(params_of(fused))
        for param, twin in zip(params_of(fused), params_of(apart), strict=True):
            twin.grad = param.grad.to(F64 if param.dtype == F64 else F32, copy=True)
        norm = norm_of(grads_of(fused))
        fused_step(fused, way, scaler)
        assert fused.grad_norm.item() == pytest.approx(norm, rel=1e-6)
        amp_ext.clip_grad_norm_(params_of(apart), 3.0, total_norm=fused.grad_norm)
        apart.step()
        assert_same_bits(fused, apart)


def test_each_group_may_have_a_value_to_clip_at(device) -> None:
    limits = [0.1, None, 2.0]
    groups = [{"params": make_params(F32, device), "clip_value": limit} for limit in limits]
    optimizer = amp_ext.optim.SGD(groups, lr=1.0, clip_value=0.7)
    before = [snapshot(group["params"]) for group in optimizer.param_groups]
    give_grads(params_of(optimizer))
    optimizer.step()
    for limit, group, old in zip(limits, optimizer.param_groups, before, strict=True):
        assert group["clip_value"] == limit
        for param, start in zip(group["params"], old, strict=True):
            step = param.grad if limit is None else param.grad.clamp(-limit, limit)
            assert same_bits(param, start - step)


def test_different_limits_of_the_norm_in_groups_are_refused(device) -> None:
    params = make_params(F32, device)
    groups = [
        {"params": params[:2], "max_grad_norm": 1.0},
        {"params": params[2:], "max_grad_norm": 2.0},
    ]
    give_grads(params)
    before = snapshot(params)
    with pytest.raises(ValueError, match=r"max_grad_norm must be the same .*\[1\.0, 2\.0\]"):
        amp_ext.optim.SGD(groups, lr=1.0).step()
    optimizer = amp_ext.optim.SGD(params[:2], max_grad_norm=1.0)

    def add_and_step() -> None:
        optimizer.add_param_group({"params": params[2:], "max_grad_norm": None})
        optimizer.step()

    with pytest.raises(ValueError, match=r"max_grad_norm must be the same .*\[1\.0, None\]"):
        add_and_step()
    assert all(map(same_bits, params, before))


def test_a_group_added_later_takes_the_limit_over(device) -> None:
    fused, apart = pair("AdamW", {}, {"max_grad_norm": 3.0}, device)
    for step in range(4):
        if step == 2:
            late = make_params(BF16, device)
            fused.add_param_group({"params": late})
            apart.add_param_group({"params": twins(late)})
        give_grads(params_of(fused), params_of(apart))
        norm = norm_of(grads_of(fused))
        fused.step()
        assert fused.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    assert fused.param_groups[1]["max_grad_norm"] == 3


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_limits_may_be_scheduled(name, options, device) -> None:
    fused, apart = pair(name, options, {}, device)
    for clipping in (
        {},
        {"max_grad_norm": 30.0},
        {"max_grad_norm": 3.0, "clip_value": 0.01},
        {"clip_value": 0.1},
        {"max_grad_norm": math.inf},
        {},
    ):
        for group in fused.param_groups:
            group["max_grad_norm"] = clipping.get("max_grad_norm")
            group["clip_value"] = clipping.get("clip_value")
        give_grads(params_of(fused), params_of(apart))
        fused.step()
        step_apart(apart, None, clipping)
        assert_same_bits(fused, apart)


# Gradients of every kind.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS[:2])
def test_gradients_of_any_layout_are_clipped(layout: Layout, way: Way, device) -> None:
    clipping = {"max_grad_norm": 3.0, "clip_value": 0.1}
    fused, apart = pair("AdamW", {}, clipping, device, shapes=[LAYOUT_SHAPE, (5,)])
    scaler = way.make_scaler(device)
    for _ in range(3):
        give_grads(params_of(fused), params_of(apart))
        scale_grads(params_of(fused), scaler)
        param = params_of(fused)[0]
        view = param.grad = placed(param.grad, layout)
        kept = view.clone()
        way.step(fused, scaler)
        norm = step_apart(apart, None, clipping)
        torch.testing.assert_close(fused.grad_norm, norm, rtol=1e-6, atol=0)
        assert same_bits(view, kept)
        assert neighbours_untouched(view)
    for param, wanted in zip(params_of(fused), params_of(apart), strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(F32, 3, 4.0))


@pytest.mark.parametrize("shape", [(1,), (6, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("way", WAYS[:2])
def test_an_expanded_gradient_counts_every_element(shape, way: Way, device) -> None:
    clipping = {"max_grad_norm": 0.5, "clip_value": 0.1}
    fused, apart = pair("AdamW", {}, clipping, device, shapes=[(6, 5), (5,)])
    scaler = way.make_scaler(device)
    for _ in range(3):
        give_grads(params_of(fused), params_of(apart))
        scale_grads(params_of(fused), scaler)
        small = torch.randn(shape, device=device)
        params_of(apart)[0].grad = small.expand(6, 5).clone()
        small = small if scaler is None else scaler.scale(small)
        params_of(fused)[0].grad = small.expand(6, 5)
        way.step(fused, scaler)
        norm = step_apart(apart, None, clipping)
        torch.testing.assert_close(fused.grad_norm, norm, rtol=1e-6, atol=0)
    for param, wanted in zip(params_of(fused), params_of(apart), strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(F32, 3, 4.0))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_may_be_missing_and_come_late(way: Way, device) -> None:
    clipping = {"max_grad_norm": 3.0, "clip_value": 0.5}
    fused, apart = pair("AdamW", {}, clipping, device)
    scalers = way.make_scaler(device), way.make_scaler(device)
    for missing in ([0, 1], [1], [], [4], [2, 3, 4]):
        give_grads(params_of(fused), params_of(apart))
        for optimizer in (fused, apart):
            for index in missing:
                params_of(optimizer)[index].grad = None
        fused_step(fused, way, scalers[0])
        norm = step_apart(apart, scalers[1], clipping)
        assert same_bits(fused.grad_norm, norm)
        assert_same_bits(fused, apart)


def test_a_closure_makes_the_gradients_that_are_clipped(device) -> None:
    fused, apart = pair("SGD", {"lr": 0.1}, {"max_grad_norm": 3.0}, device)

    def closure(optimizer, *, clips: bool):
        optimizer.zero_grad()
        loss = sum((param**3).sum() for param in params_of(optimizer))
        loss.backward()
        if clips:
            amp_ext.clip_grad_norm_(params_of(optimizer), 3.0)
        return loss

    for _ in range(3):
        fused.step(lambda: closure(fused, clips=False))
        apart.step(lambda: closure(apart, clips=True))
        assert_same_bits(fused, apart)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[4]])
def test_a_gradient_clipped_by_hand_before_is_clipped_again(way: Way, device) -> None:
    fused, apart = pair("SGD", {"lr": 0.1}, {"max_grad_norm": 1.0}, device)
    scaler = way.make_scaler(device)
    give_grads(params_of(fused), params_of(apart))
    scale_grads(params_of(fused), scaler)
    if scaler is not None:
        scaler.unscale_(fused)
    for optimizer in (fused, apart):
        torch.nn.utils.clip_grad_value_(params_of(optimizer), 0.5)
    norm = step_apart(apart, None, {"max_grad_norm": 1.0})
    (fused.step if scaler is None else lambda: scaler.step(fused))()
    assert same_bits(fused.grad_norm, norm)
    assert_same_bits(fused, apart)


# Gradients that change between the look and the step.


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
@pytest.mark.parametrize("way", WAYS)
def test_the_norm_is_of_the_gradients_that_are_stepped(way: Way, change, device) -> None:
    """Whatever a step hook does to them after the look."""
    clipping = {"max_grad_norm": 3.0}
    fused, apart = pair("SGD", {"lr": 0.1}, clipping, device, shapes=[(40, 50), (7,), (), (7,)])
    scaler = way.make_scaler(device)
    fused.register_step_pre_hook(lambda optimizer, args, kwargs: change(params_of(optimizer)))
    for step in range(3):
        give_grads(params_of(fused), params_of(apart))
        for optimizer in (fused, apart):
            if step == 0:
                params_of(optimizer)[2].grad = None
        scale_grads(params_of(fused), scaler)
        scaled = 1.0 if scaler is None or way.unscale_first else scaler.get_scale()
        for param in params_of(apart):
            param.grad = None if param.grad is None else param.grad * scaled
        change(params_of(apart))
        for param in params_of(apart):
            param.grad = None if param.grad is None else param.grad.contiguous() / scaled
        way.step(fused, scaler)
        norm = step_apart(apart, None, clipping)
        torch.testing.assert_close(fused.grad_norm, norm, rtol=1e-6, atol=0)
        for param, wanted in zip(params_of(fused), params_of(apart), strict=True):
            torch.testing.assert_close(param, wanted, **tolerance(F32, 3, 4.0))


def edit_in(value: float) -> Callable[[list[Parameter]], None]:
    def spoil(params: list[Parameter]) -> None:
        params[0].grad[77] = value

    return spoil


def replace_by(value: float) -> Callable[[list[Parameter]], None]:
    def spoil(params: list[Parameter]) -> None:
        grad = params[0].grad.clone()
        grad[77] = value
        params[0].grad = grad

    return spoil


def recycle(value: float) -> Callable[[list[Parameter]], None]:
    """Puts a gradient where the old one was."""

    def spoil(params: list[Parameter]) -> None:
        grad = params[0].grad.clone()
        grad[77] = value
        recycle_grad(params[0], grad)

    return spoil


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("spoil", [edit_in, replace_by, recycle])
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
def test_an_inf_that_a_hook_brings_in_skips_the_step(
    clipping, way: Way, spoil, value: float, device
) -> None:
    optimizer, _ = pair("AdamW", {}, clipping, device)
    scaler = way.make_scaler(device)
    give_grads(params_of(optimizer))
    fused_step(optimizer, way, scaler)
    before = bits_of(optimizer)
    bring_in = spoil(value)
    hook = optimizer.register_step_pre_hook(lambda o, args, kwargs: bring_in(params_of(o)))
    give_grads(params_of(optimizer))
    fused_step(optimizer, way, scaler)
    assert_same_bits(optimizer, before)
    if "max_grad_norm" in clipping:
        assert not optimizer.grad_norm.isfinite()
    hook.remove()
    give_grads(params_of(optimizer))
    fused_step(optimizer, way, scaler)
    assert not same_bits(params_of(optimizer)[0], before[0]["param"])


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
    fused, apart = pair("SGD", {"lr": 0.1}, {"max_grad_norm": 3.0}, device)
    give_grads(params_of(fused))
    fused._check_finite(torch.zeros((), device=device), torch.tensor(8.0, device=device))
    between(params_of(fused))
    for param, twin in zip(params_of(fused), params_of(apart), strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    fused.step()
    norm = step_apart(apart, None, {"max_grad_norm": 3.0})
    assert same_bits(fused.grad_norm, norm)
    assert_same_bits(fused, apart)


def test_a_look_serves_one_step_only(device) -> None:
    fused, apart = pair("SGD", {"lr": 0.1, "momentum": 0.9}, {"max_grad_norm": 3.0}, device)
    scaler = amp_ext.GradScaler(torch.device(device).type, SCALE)
    give_grads(params_of(fused), params_of(apart))
    fused_step(fused, Way(amp_ext.GradScaler), scaler)
    step_apart(apart, None, {"max_grad_norm": 3.0})
    fused.step()  # without the scaler: as the gradients are
    for grad in grads_of(fused):
        grad.zero_()
    fused.step()
    assert fused.grad_norm.item() == 0


# Checkpoints and copies.

OPTIONS = {"max_grad_norm": 3.0, "clip_value": 0.5, "write_back_grads": True}


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: group[name] for name in OPTIONS} for group in optimizer.param_groups]


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_options_are_in_defaults_groups_and_state_dicts(name, options) -> None:
    plain = ours(name)(make_params(F32), **options)
    none = dict.fromkeys(OPTIONS) | {"write_back_grads": False}
    assert options_of(plain) == [none]
    optimizer = ours(name)(make_params(F32), **options, **OPTIONS)
    assert options_of(optimizer) == [OPTIONS]
    assert {key: optimizer.defaults[key] for key in OPTIONS} == OPTIONS
    saved = optimizer.state_dict()
    assert {key: saved["param_groups"][0][key] for key in OPTIONS} == OPTIONS
    assert saved.keys() == plain.state_dict().keys()


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda value: pickle.loads(pickle.dumps(value)), id="pickle"),
    ],
)
@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_copies_clip_on_and_share_nothing(name, options, copied, device) -> None:
    original, _ = pair(name, options, OPTIONS, device)
    give_grads(params_of(original))
    original.step()
    norm = original.grad_norm.item()
    twin = copied(original)
    assert options_of(twin) == [OPTIONS]
    give_grads(params_of(twin))
    twin.step()
    assert twin.grad_norm.item() != norm
    assert original.grad_norm.item() == norm
    for optimizer in (original, twin):
        torch.manual_seed(1)
        give_grads(params_of(optimizer))
    for param, other in zip(params_of(original), params_of(twin), strict=True):
        param.data.copy_(other.data)
    original.step()
    twin.step()
    assert same_bits(original.grad_norm, twin.grad_norm)


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_a_checkpoint_keeps_clipping(name, options, device) -> None:
    first, second = pair(name, options, OPTIONS, device)
    second = ours(name)(params_of(second), **options, **OPTIONS)
    file = io.BytesIO()
    for _ in range(2):
        give_grads(params_of(first))
        first.step()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for param, other in zip(params_of(second), params_of(first), strict=True):
        param.data.copy_(other.data)
    assert options_of(second) == [OPTIONS]
    for _ in range(2):
        give_grads(params_of(first), params_of(second))
        first.step()
        second.step()
        assert_same_bits(first, second)
        assert same_bits(first.grad_norm, second.grad_norm)


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_a_checkpoint_of_torch_leaves_the_configured_options(name, options, device) -> None:
    """Those of each group, not the defaults."""
    first, second = make_params(F32, device), make_params(F32, device)
    other = theirs(name)([{"params": first}, {"params": second}], **options)
    give_grads(params_of(other))
    other.step()
    values = [0.5, 0.25]
    mine = ours(name)(
        [
            {"params": twins(params), "clip_value": value}
            for params, value in zip([first, second], values, strict=True)
        ],
        **options,
        max_grad_norm=3.0,
        write_back_grads=True,
    )
    wanted = [OPTIONS | {"clip_value": value} for value in values]
    assert options_of(mine) == wanted
    mine.load_state_dict(other.state_dict())
    assert options_of(mine) == wanted
    give_grads(params_of(mine))
    mine.step()
    assert mine.grad_norm.item() > 100
    assert norm_of(grads_of(mine)) == pytest.approx(3.0, rel=1e-3)
    theirs(name)(
        [{"params": make_params(F32)}, {"params": make_params(F32)}], **options
    ).load_state_dict(mine.state_dict())


# Write-back.


def expected_grads(
    before: list[Tensor], clipping: dict[str, float], norm: Tensor | None, scale: float
) -> list[Tensor]:
    """Returns unscaled, clipped gradients, computed in float32 (float64) and rounded once."""
    coefficient = torch.tensor(1.0)
    if "max_grad_norm" in clipping:
        coefficient = torch.tensor(clipping["max_grad_norm"] / (norm.item() + 1e-6)).clamp(max=1)
    limit = clipping.get("clip_value", math.inf)
    results = []
    for grad in before:
        wide = grad.cpu() if grad.dtype == F64 else grad.cpu().float()
        wide = (wide * (coefficient.item() / scale)).clamp(-limit, limit)
        results.append(wide.to(grad.dtype))
    return results


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clipping", [pytest.param({}, id="unclipped"), *CLIPPING, HARMLESS[0]])
def test_a_write_back_leaves_what_was_stepped(clipping, way: Way, device) -> None:
    for dtype in (F32, F16, BF16, F64):
        if way.unscale_first and dtype == F16:
            continue  # is refused: gradients in float16 are unscaled in the step
        params = make_params(dtype, device)
        writes = amp_ext.optim.AdamW(params, **clipping, write_back_grads=True)
        plain = amp_ext.optim.AdamW(twins(params), **clipping)
        scalers = [way.make_scaler(device, 2.0**4) for _ in range(2)]
        for _ in range(2):
            give_grads(params_of(writes), params_of(plain))
            before = snapshot(grads_of(writes))
            fused_step(writes, way, scalers[0])
            fused_step(plain, way, scalers[1])
            assert_same_bits(writes, plain)
            expected = expected_grads(before, clipping, writes.grad_norm, 1.0)
            assert all(map(same_bits, grads_of(writes), expected)), dtype


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_float32_gradients_written_back_are_those_of_clipping_apart(
    name, options, way: Way, device
) -> None:
    clipping = {"max_grad_norm": 30.0, "clip_value": 0.25}
    fused, apart = pair(name, options, clipping | {"write_back_grads": True}, device)
    scalers = way.make_scaler(device), way.make_scaler(device)
    give_grads(params_of(fused), params_of(apart))
    fused_step(fused, way, scalers[0])
    step_apart(apart, scalers[1], clipping)
    assert all(map(same_bits, grads_of(fused), grads_of(apart)))


@pytest.mark.parametrize("clipping", CLIPPING)
def test_a_write_back_has_no_sign_of_maximizing_and_no_decay(clipping, device) -> None:
    for name in ("Adam", "AdamW", "SGD"):
        options = {"lr": 0.05, "maximize": True, "weight_decay": 0.5, "write_back_grads": True}
        optimizer, _ = pair(name, options, clipping, device)
        give_grads(params_of(optimizer))
        before = snapshot(grads_of(optimizer))
        optimizer.step()
        expected = expected_grads(before, clipping, optimizer.grad_norm, 1.0)
        assert all(map(same_bits, grads_of(optimizer), expected)), name


def test_a_write_back_covers_all_groups_and_dtypes(device) -> None:
    optimizer = amp_ext.optim.AdamW(of_all_dtypes(device), max_grad_norm=3.0, write_back_grads=True)
    give_grads(params_of(optimizer))
    for grad in grads_of(optimizer):
        grad.mul_(8)
    before = snapshot(grads_of(optimizer))
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    optimizer.step()
    expected = expected_grads(before, {"max_grad_norm": 3.0}, optimizer.grad_norm, 8.0)
    assert all(map(same_bits, grads_of(optimizer), expected))


@pytest.mark.parametrize("first", [True, False])
def test_one_group_may_write_back_alone(first: bool, device) -> None:
    groups = [
        {"params": make_params(F32, device), "write_back_grads": first},
        {"params": make_params(F32, device), "write_back_grads": not first},
    ]
    optimizer = amp_ext.optim.SGD(groups, max_grad_norm=3.0)
    give_grads(params_of(optimizer))
    before = snapshot(grads_of(optimizer))
    optimizer.step()
    expected = expected_grads(before, {"max_grad_norm": 3.0}, optimizer.grad_norm, 1.0)
    half = len(SHAPES)
    written, alone = (slice(half), slice(half, None)) if first else (slice(half, None), slice(half))
    assert all(map(same_bits, grads_of(optimizer)[written], expected[written]))
    assert all(map(same_bits, grads_of(optimizer)[alone], before[alone]))


@pytest.mark.parametrize("param_dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("grad_dtype", [F32, F16, BF16, F64], ids=str)
def test_a_write_back_keeps_the_dtype_of_the_gradient(param_dtype, grad_dtype, device) -> None:
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
def test_a_write_back_goes_into_the_gradient_of_any_layout(dtype, layout: Layout, device) -> None:
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


@pytest.mark.parametrize("way", UNSCALED_IN_THE_STEP[1:])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_skipped_step_leaves_gradients_scaled(dtype, way: Way, device) -> None:
    optimizer, _ = pair("AdamW", {}, OPTIONS, device, dtype)
    scaler = way.make_scaler(device, 16.0)
    give_grads(params_of(optimizer))
    params_of(optimizer)[1].grad.view(-1)[2] = math.inf
    scale_grads(params_of(optimizer), scaler)
    before = snapshot(grads_of(optimizer))
    scaler.step(optimizer)
    assert all(map(same_bits, grads_of(optimizer), before))


def test_a_skipped_step_on_the_cpu_moves_no_version() -> None:
    """On a GPU the host does not know of the skip."""
    optimizer, _ = pair("AdamW", {}, OPTIONS, "cpu")
    give_grads(params_of(optimizer))
    optimizer.step()
    optimizer.found_inf = torch.ones(())
    tensors = [*params_of(optimizer), *grads_of(optimizer)]
    versions = [tensor._version for tensor in tensors]
    optimizer.step()
    assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("write_back", [True, False])
@pytest.mark.parametrize("layout", [None, transposed])
def test_only_a_write_back_moves_the_version_of_gradients(
    layout: Layout | None, write_back: bool, device
) -> None:
    options = {"max_grad_norm": 3.0, "clip_value": 0.5, "write_back_grads": write_back}
    optimizer, _ = pair("AdamW", {}, options, device, shapes=[(6, 5), (3,)])
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    give_grads(params_of(optimizer))
    if layout is not None:
        (first, _) = params_of(optimizer)
        first.grad = placed(first.grad, layout)
    before = snapshot(grads_of(optimizer))
    versions = [grad._version for grad in grads_of(optimizer)]
    optimizer.step()
    after = [grad._version for grad in grads_of(optimizer)]
    assert [new > old for new, old in zip(after, versions, strict=True)] == [write_back] * 2
    assert all(map(same_bits, grads_of(optimizer), before)) != write_back


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_an_expanded_gradient_cannot_be_written_back(name, options, device) -> None:
    optimizer, _ = pair(name, options, {"write_back_grads": True}, device, shapes=[(5,), (6, 5)])
    give_grads(params_of(optimizer))
    optimizer.step()
    give_grads(params_of(optimizer))
    params_of(optimizer)[1].grad = torch.ones(5, device=device).expand(6, 5)
    before, grads = bits_of(optimizer), snapshot(grads_of(optimizer))
    with pytest.raises(RuntimeError, match=r"grad of group 0, param 1 .*must not overlap"):
        optimizer.step()
    assert_same_bits(optimizer, before)
    assert all(map(same_bits, grads_of(optimizer), grads))
    params_of(optimizer)[1].grad = torch.ones(6, 5, device=device)
    optimizer.step()


def test_gradients_that_share_memory_cannot_be_written_back() -> None:
    optimizer, _ = pair("SGD", {}, {"write_back_grads": True}, "cpu", shapes=[(5,), (5,)])
    first, second = params_of(optimizer)
    bucket = torch.ones(9)
    first.grad, second.grad = bucket[:5], bucket[4:]
    with pytest.raises(RuntimeError, match=r"grad of group 0, param [01] .*share memory"):
        optimizer.step()
    first.grad, second.grad = bucket[:5], first.detach()
    with pytest.raises(RuntimeError, match="share memory"):
        optimizer.step()
    bucket = torch.ones(10)
    first.grad, second.grad = bucket[:5], bucket[5:]
    optimizer.step()
    optimizer.param_groups[0]["write_back_grads"] = False
    first.grad = second.grad = bucket[5:]
    optimizer.step()


def test_autograd_notices_a_write_back() -> None:
    optimizer, _ = pair("SGD", {}, {"write_back_grads": True, "clip_value": 0.1}, "cpu")
    give_grads(params_of(optimizer))
    grad = params_of(optimizer)[0].grad
    weight = torch.ones_like(grad, requires_grad=True)
    loss = (grad * weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Bad values.


@pytest.mark.parametrize("option", ["max_grad_norm", "clip_value"])
@pytest.mark.parametrize("value", [-1.0, -1e-30, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_limits_below_zero_are_refused(name, value: float, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        ours(name)(make_params(F32), **{option: value})


@pytest.mark.parametrize("option", ["max_grad_norm", "clip_value"])
@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_limits_below_zero_are_refused_in_a_group(value: float, option: str) -> None:
    params = make_params(F32)
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        amp_ext.optim.SGD([{"params": params, option: value}])
    optimizer = amp_ext.optim.SGD(params[:2])
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        optimizer.add_param_group({"params": params[2:], option: value})
    assert len(optimizer.param_groups) == 1


# The operations.


def sgd(params: list[Tensor], grads: list[Tensor], **options: Any) -> None:
    ops.sgd_(params, grads, lr=1.0, **options)


def adam(params: list[Tensor], grads: list[Tensor], **options: Any) -> None:
    states = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    steps = [torch.zeros((), device=param.device) for param in params]
    hyper = {"lr": 1.0, "beta1": 0.5, "beta2": 0.5, "eps": 1.0, "weight_decay": 0.0}
    ops.adam_(params, grads, *states, steps, **hyper, **options)


OPERATIONS = [pytest.param(sgd, id="sgd"), pytest.param(adam, id="adam")]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_takes_the_sum_that_it_is_given(operation, shape, device) -> None:
    """The sum is of the gradients as they are, the norm of the unscaled ones."""
    params = [torch.randn(70, device=device), torch.randn(5, device=device)]
    grads = [torch.randn_like(param) for param in params]
    expected = snapshot(params)
    operation(expected, [grad / 8 / 4 for grad in grads])
    total = torch.full(shape, 2.0**22, dtype=F64, device=device)  # 2048 scaled, 256 unscaled
    norm = torch.full(shape, -1.0, device=device)
    operation(
        params,
        grads,
        grad_scale=torch.tensor(8.0, device=device),
        max_grad_norm=64.0,
        sum_of_squares=total,
        grad_norm=norm,
    )
    assert norm.item() == 256
    assert total.item() == 2.0**22
    for param, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(F32))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_without_a_sum_takes_its_own(operation, device) -> None:
    params = [torch.randn(70, device=device), torch.randn(5, device=device)]
    grads = [torch.randn_like(param) for param in params]
    given, own = snapshot(params), snapshot(params)
    total = torch.zeros((), dtype=F64, device=device)
    norm = torch.zeros((), device=device)
    ops.check_finite_(grads, torch.zeros((), device=device), sum_of_squares=total)
    operation(given, grads, max_grad_norm=1.0, sum_of_squares=total)
    operation(own, grads, max_grad_norm=1.0, grad_norm=norm)
    assert all(map(same_bits, own, given))
    assert norm.item() == pytest.approx(norm_of(grads), rel=1e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_clips_by_value_and_writes_back(operation, device) -> None:
    params = [torch.randn(70, device=device), torch.randn(5, device=device)]
    grads = [torch.randn_like(param) for param in params]
    clipped = [(grad / 2).clamp(-0.25, 0.25) for grad in grads]
    expected, kept = snapshot(params), snapshot(grads)
    operation(expected, clipped)
    half = {"clip_value": 0.25, "grad_scale": torch.tensor(2.0, device=device)}
    operation(snapshot(params), grads, **half)
    assert all(map(same_bits, grads, kept))
    operation(params, grads, **half, write_back_grads=True)
    assert all(map(same_bits, params, expected))
    assert all(map(same_bits, grads, clipped))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_skips_writes_no_gradient_but_the_norm(operation, device) -> None:
    params = [torch.randn(70, device=device)]
    grads = [torch.randn_like(param) for param in params]
    before, kept = snapshot(params), snapshot(grads)
    norm = torch.zeros((), device=device)
    operation(
        params,
        grads,
        found_inf=torch.ones((), device=device),
        max_grad_norm=0.5,
        grad_norm=norm,
        write_back_grads=True,
    )
    assert all(map(same_bits, params, before))
    assert all(map(same_bits, grads, kept))
    assert norm.item() == pytest.approx(norm_of(grads), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"sum_of_squares": torch.ones(())}, "sum_of_squares must be Double", id="sum"),
        pytest.param(
            {"sum_of_squares": torch.ones(2, dtype=F64)}, "sum_of_squares must be one", id="sums"
        ),
        pytest.param(
            {"grad_norm": torch.ones((), dtype=F64)}, "grad_norm must be Float", id="norm"
        ),
        pytest.param({"grad_norm": torch.ones(2)}, "grad_norm must be one element", id="norms"),
        pytest.param(
            {"grad_norm": torch.ones((), device="meta")}, "grad_norm must .*meta", id="elsewhere"
        ),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bad_arguments_of_an_operation_are_named(operation, options, text: str) -> None:
    params = [torch.ones(5)]
    with pytest.raises(RuntimeError, match=f"^{operation.__name__}_: {text}"):
        operation(params, [torch.ones(5)], max_grad_norm=1.0, **options)
    assert torch.equal(params[0], torch.ones(5))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_writes_no_expanded_gradient_back(operation) -> None:
    params = [torch.ones(5), torch.ones(5)]
    grads = [torch.ones(5), torch.ones(1).expand(5)]
    operation([torch.ones(5), torch.ones(5)], grads)
    with pytest.raises(RuntimeError, match=rf"^{operation.__name__}_: grads\[1\] .*must not over"):
        operation(params, grads, write_back_grads=True)
    assert all(torch.equal(param, torch.ones(5)) for param in params)


# Reproducibility.


def trained(threads: int | None = None) -> list[dict[str, Tensor]]:
    """Returns what some clipped steps of every class and dtype lead to."""
    before = torch.get_num_threads()
    results = []
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(0)
        for name in ("AdamW", "SGD"):
            groups = [
                {"params": make_params(dtype, shapes=[(100_001,), (5,)])}
                for dtype in (F32, F16, BF16, F64)
            ]
            optimizer = ours(name)(
                groups, max_grad_norm=3.0, clip_value=0.01, write_back_grads=True
            )
            optimizer.grad_scale = torch.tensor(3.0)
            for _ in range(2):
                give_grads(params_of(optimizer))
                optimizer.step()
                results.append({"norm": optimizer.grad_norm.clone()})
            amp_ext.clip_grad_norm_(params_of(optimizer), 1.0)
            results += [{"grad": grad} for grad in grads_of(optimizer)]
            results += bits_of(optimizer)
    finally:
        torch.set_num_threads(before)
    return results


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    alone = trained(1)
    assert_same_bits(trained(2), alone)
    assert_same_bits(trained(3), alone)


def trained_under_isa() -> tuple[str, list[dict[str, Tensor]]]:
    return ops.cpu_isa(), trained()


def test_every_instruction_set_gives_the_same_bits() -> None:
    if ops.cpu_isa() == "plain":
        pytest.skip("this process has the plain engine itself")
    plain_isa, plain = in_another_process(trained_under_isa, AMP_EXT_CPU_ISA="plain")
    assert plain_isa == "plain"
    assert_same_bits(trained(), plain)


@pytest.mark.parametrize("option", ["max_grad_norm", "clip_value"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), "1", [1.0]])
def test_a_limit_that_is_none_is_refused(option, value):
    with pytest.raises(ValueError, match=rf"Invalid {option} value: "):
        amp_ext.optim.SGD([Parameter(torch.zeros(1))], **{option: value})


@pytest.mark.parametrize("option", ["max_grad_norm", "clip_value"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_the_operation_refuses_a_limit_that_is_none(option, value, device):
    param, grad = torch.zeros(1, device=device), torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match=rf"sgd_: {option} must be at least 0, got "):
        ops.sgd_([param], [grad], lr=0.1, **{option: value})
    assert param.item() == 0.0
