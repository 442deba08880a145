"""Norms of gradients: clipping inside the step, whoever scales them, and what a step reports."""

from __future__ import annotations

import copy
import math
import pickle
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
    Way,
    assert_nearly,
    clipped,
    fused_step,
    step_apart,
)
from harness.edge_shapes import BF16, F16, F32, F64, INF, NAN
from harness.optimizer_cases import (
    EACH_CLASS,
    assert_same_bits,
    give_grads,
    grads_of,
    ours,
    pair,
    params_of,
)
from harness.reference import same_bits
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


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e6, math.inf])
@pytest.mark.parametrize("value", VALUES)
def test_without_a_scaler_a_norm_that_is_not_finite_acts_as_in_torch(value, limit, device):
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


# What a step reports when it is asked to: the norm of each gradient, and whether it was taken.


# Less and more than a tile of any kernel, of many tiles, and of no element.
SIZES = [1, 7, 0, 8193, 16384, 16385, 200_003, 33]


def params_with_grads(way: Way, device: torch.device) -> list[Parameter]:
    """Parameters of all dtypes of a way, in turns; the last has no gradient."""
    torch.manual_seed(0)
    dtypes = [dtype for dtype in (F32, F16, BF16, F64) if way.takes(dtype, device)]
    params = []
    for index, size in enumerate(SIZES):
        dtype = dtypes[index % len(dtypes)]
        params.append(Parameter(torch.randn(size).to(dtype).to(device)))
        params[-1].grad = torch.randn(size).to(dtype).to(device)
    params[-1].grad = None
    return params


def norms_of(params: list[Parameter]) -> list[float]:
    return [
        math.nan if param.grad is None else param.grad.double().norm().item() for param in params
    ]


def optimizer_of(params: list[Parameter], name: str = "AdamW", **options: Any) -> Any:
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:]}]
    return ours(name)(groups, **options, track_grad_norms=True)


def assert_norms(actual: Tensor, expected: list[float]) -> None:
    assert actual.dtype == F32
    wanted = torch.tensor(expected, dtype=F64)
    torch.testing.assert_close(actual.double().cpu(), wanted, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 3.0}], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_unscaled_gradients(way: Way, clipping, device):
    params = params_with_grads(way, device)
    expected = norms_of(params)
    twins = copy.deepcopy(params)
    for param, twin in zip(params, twins, strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    optimizer, other = optimizer_of(params, **clipping), optimizer_of(twins, **clipping)
    other.track_grad_norms = False
    for side in (optimizer, other):
        fused_step(side, way, way.make_scaler(device))
    assert_norms(optimizer.grad_norms, expected)
    total = math.sqrt(math.fsum(norm**2 for norm in expected if not math.isnan(norm)))
    assert_norms(optimizer.grad_norm, total)
    assert other.grad_norms is None
    for param, twin in zip(params, twins, strict=True):
        assert same_bits(param, twin), "the step is the same"


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("skips", [False, True], ids=["", "finite-elements"])
def test_a_gradient_that_is_not_finite_has_an_infinite_norm(bad, skips, device):
    params = params_with_grads(Way(None), device)
    expected = norms_of(params)
    params[3].grad[8192], params[6].grad[-1] = bad, bad
    expected[3] = expected[6] = INF
    optimizer = optimizer_of(params, skip_nonfinite=skips)
    optimizer.step()
    assert_norms(optimizer.grad_norms, expected)
    assert optimizer.grad_norm.item() == INF


def test_a_skipped_step_has_norms_and_they_stay_until_the_next_step(device):
    params = params_with_grads(Way(amp_ext.GradScaler), device)
    optimizer, scaler = optimizer_of(params, "SGD", lr=0.1), amp_ext.GradScaler(device.type, 8.0)
    scaler.scale(torch.zeros((), device=device))
    before = params[0].detach().clone()
    params[0].grad.fill_(INF)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    first = optimizer.grad_norms
    assert optimizer.grad_norm.item() == INF
    assert first[0].item() == INF
    assert same_bits(params[0], before)
    for param in params:
        param.grad = torch.full_like(param, 4.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert first[0].item() == INF
    assert_norms(optimizer.grad_norms, [math.sqrt(size) for size in SIZES])


def test_they_are_those_before_a_step_that_writes_back_what_it_clipped(device):
    params = params_with_grads(Way(None), device)
    expected = norms_of(params)
    optimizer = optimizer_of(params, max_grad_norm=1.0, write_back_grads=True)
    optimizer.step()
    assert_norms(optimizer.grad_norms, expected)
    assert max(norms_of(params[:-1])) < 1.0


def test_they_follow_groups_and_end_with_the_attribute(device):
    params = params_with_grads(Way(None), device)
    optimizer = optimizer_of(params, "Lion")
    assert optimizer.grad_norms is None
    optimizer.step()
    assert_norms(optimizer.grad_norms, norms_of(params))
    new = Parameter(torch.ones(4, device=device))
    new.grad = torch.ones_like(new)
    optimizer.add_param_group({"params": [new]})
    for group in optimizer.param_groups[:2]:
        group["params"].clear()
    optimizer.step()
    assert_norms(optimizer.grad_norms, [2.0])
    optimizer.param_groups[2]["params"].clear()
    optimizer.step()
    assert optimizer.grad_norms is None
    optimizer.param_groups[2]["params"].append(new)
    optimizer.track_grad_norms = False
    optimizer.step()
    assert optimizer.grad_norms is None
    assert optimizer.grad_norm is None


def test_names_stand_beside_them_for_people():
    model = torch.nn.Linear(3, 2)
    optimizer = amp_ext.optim.SGD(model.named_parameters(), lr=0.1)
    message = r"^SGD\.named_grad_norms: no step has recorded gradient norms yet\. Set optimizer"
    with pytest.raises(RuntimeError, match=message):
        optimizer.named_grad_norms()
    with pytest.raises(TypeError, match=r"^SGD: track_grad_norms must be a bool, got 1$"):
        optimizer.track_grad_norms = 1
    optimizer.track_grad_norms = True
    model.weight.grad = torch.full_like(model.weight, 0.5)
    optimizer.step()
    joined = Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("more", joined)], "momentum": 0.9})
    optimizer.param_groups[0]["params"].reverse()
    optimizer.param_groups[0]["param_names"].reverse()
    assert optimizer.named_grad_norms() == {"weight": pytest.approx(math.sqrt(1.5))}
    # A step that is refused leaves no norms of the parameters that there are now.
    optimizer.state[joined] = {"momentum_buffer": torch.zeros(7)}
    joined.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="momentum_buffer of group 1, param 0"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        optimizer.named_grad_norms()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_track_them_and_files_know_nothing_of_it(copied):
    params = params_with_grads(Way(None), torch.device("cpu"))
    optimizer = optimizer_of(params)
    optimizer.step()
    state_dict = optimizer.state_dict()
    assert not [name for group in state_dict["param_groups"] for name in group if "track" in name]
    other = copied(optimizer)
    assert other.track_grad_norms
    assert other.grad_norms is None
    optimizer.load_state_dict(state_dict)
    assert optimizer.track_grad_norms
    assert optimizer.grad_norms is None


# Whether the last step was taken, which it leaves on the device for those who follow it.


def followed(device: torch.device) -> Any:
    """Returns an SGD with a gradient, that tracks whether a step was applied."""
    param = Parameter(torch.ones(5, device=device))
    param.grad = torch.ones_like(param)
    optimizer = amp_ext.optim.SGD([param], lr=0.1)
    optimizer.track_step_applied()
    return optimizer


def test_step_applied_stays_where_it_is_and_followers_outlive_a_load(device):
    optimizer = followed(device)
    optimizer.step()
    word = optimizer.step_applied
    optimizer.step()
    assert optimizer.step_applied.data_ptr() == word.data_ptr()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.step_applied.item() == 1.0
    other = copy.deepcopy(optimizer)
    give_grads(other)
    other.step()
    assert other.step_applied is None, "nobody follows the copy"


class CopyOfAttributes:
    """What Lightning puts around an optimizer: an object of its class with its attributes."""

    def __init__(self, optimizer: Any) -> None:
        vars(self).update(vars(optimizer))
        self.__class__ = type("Wrapped", (CopyOfAttributes, type(optimizer)), {})


def test_who_has_a_wrapper_with_a_copy_of_the_attributes_watches_the_optimizer_inside():
    inside = followed(torch.device("cpu"))
    wrapper = CopyOfAttributes(inside)
    inside.load_state_dict(inside.state_dict())
    wrapper.norm_guard, wrapper.track_grad_norms = amp_ext.optim.NormGuard(), True
    assert inside.norm_guard is wrapper.norm_guard
    inside.step()
    assert wrapper.grad_norm is inside.grad_norm
    assert wrapper.grad_norms.item() == wrapper.grad_norm.item() == pytest.approx(math.sqrt(5.0))
