"""Tests of which gradients a scaler knows to be unscaled: once, whoever asks, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import scaler_cases as cases
from harness.rows import rows
from harness.scaler_cases import (
    INF,
    Deriving,
    WithCopiedFlag,
    error_of,
    filled,
    fused_sgd,
    looping_sgd,
    params_of,
    plain_sgd,
    ready,
)
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

import amp_ext
from amp_ext.scaler.grad_scaler import _inside as optimizer_inside

every_sgd = cases.over([plain_sgd, fused_sgd, looping_sgd])


class Holding(WithCopiedFlag):
    """Has the optimizer in a list or a dict, and its groups in a list of its own."""

    def __init__(self, optimizer: Any, hold: Callable[[Any], Any]) -> None:
        super().__init__(optimizer)
        self.held = hold(self.__dict__.pop("optimizer"))

    def inside(self) -> Any:
        return next(iter(self.held.values() if isinstance(self.held, dict) else self.held))

    @property
    def param_groups(self) -> Any:
        return list(self.inside().param_groups)

    def step(self, closure: Any = None) -> Any:
        return self.inside().step()


WRAPPERS = {
    "delegating": cases.Delegating,
    "deriving": Deriving,
    "copied-flag": WithCopiedFlag,
    "in-a-list": partial(Holding, hold=lambda optimizer: [optimizer]),
    "in-a-dict": partial(Holding, hold=lambda optimizer: {"all": optimizer}),
}
wrappers = pytest.mark.parametrize("wrap", rows(WRAPPERS))


def values(optimizer: Any) -> list[float]:
    return params_of(optimizer)[0].tolist()


# An object and the optimizer inside are one.


@wrappers
@every_sgd
@pytest.mark.parametrize("wrapped_call", ["unscale_", "step", "both"])
@cases.clean_or_overflow
def test_an_optimizer_is_the_one_inside_an_object(make, wrap, wrapped_call, value, device):
    inside, scaler = filled(value, device, make), ready(device, growth_interval=1)
    wrapper = wrap(wrap(inside))
    assert optimizer_inside(wrapper) is inside
    scaler.unscale_(inside if wrapped_call == "step" else wrapper)
    for each in (inside, wrapper):
        error_of(RuntimeError, scaler.unscale_, each)
        assert scaler._per_optimizer_states[id(each)]["stage"] is OptState.UNSCALED
    scaler.step(inside if wrapped_call == "unscale_" else wrapper)
    assert values(inside) == [0.5 if value == 4.0 else 1.0] * 3
    for each in (inside, wrapper):
        error_of(RuntimeError, scaler.step, each)
        assert not hasattr(each, "grad_scale")
        assert not hasattr(each, "found_inf")
    scaler.update()
    assert scaler.get_scale() == (8.0 if value == 4.0 else 2.0)
    stats = scaler.stats(wait=True)
    assert (stats.updates, stats.skips) == (1, int(value == INF))
    for each in (inside, wrapper):
        assert scaler.last_step_skipped(each, wait=True) == (value == INF)


@cases.clean_or_overflow
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("makes", [(plain_sgd, fused_sgd), (fused_sgd, plain_sgd)])
@pytest.mark.parametrize("shows", ["all", "groups"])
def test_an_object_that_steps_two_optimizers_steps_with_unscaled_gradients(
    shows, makes, unscale, value, device
):
    class Both:
        _step_supports_amp_scaling = True

        def __init__(self) -> None:
            self.optimizers = [filled(4.0, device, makes[0]), filled(value, device, makes[1])]
            self.param_groups = [each.param_groups[0] for each in self.optimizers]

        def __getattr__(self, name: str) -> Any:
            if shows == "groups":
                raise AttributeError(name)
            return getattr(self.__dict__["optimizers"][0], name)

        def step(self) -> None:
            for each in self.optimizers:
                each.step()

    both, scaler = Both(), ready(device)
    if unscale:
        scaler.unscale_(both)
    scaler.step(both)
    scaler.update()
    assert values(both.optimizers[0]) == values(both.optimizers[1])
    assert values(both.optimizers[0]) == [0.5 if value == 4.0 else 1.0] * 3
    assert scaler.get_scale() == (4.0 if value == 4.0 else 2.0)


@cases.clean_or_overflow
def test_an_object_that_unscales_by_itself_is_not_given_a_scale_twice(value, device):
    class Unscaling(WithCopiedFlag):
        def step(self, closure: Any = None) -> None:
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", 0)
            if not found_inf:
                for param in params_of(self):
                    param.grad /= 1.0 if scale is None else scale
                self.optimizer.step()

    optimizer, scaler = filled(value, device, fused_sgd), ready(device)
    scaler.step(Unscaling(optimizer))
    scaler.update()
    assert values(optimizer) == [0.5 if value == 4.0 else 1.0] * 3


@wrappers
@every_sgd
def test_what_a_client_writes_into_a_state_holds_for_both(make, wrap, device):
    inside, scaler = filled(4.0, device, make), ready(device)
    wrapper = wrap(inside)
    assert scaler._per_optimizer_states[id(wrapper)]["stage"] is OptState.READY
    scaler.unscale_(inside)
    scaler.step(wrapper)
    fresh = {"stage": OptState.UNSCALED, "found_inf_per_device": {device: torch.zeros(())}}
    scaler._per_optimizer_states[id(wrapper)] = fresh
    scaler.step(wrapper)
    assert values(inside) == [0.0] * 3
    error_of(RuntimeError, scaler.step, inside)


# Gradients that come after unscale_.

MAY_CARRY_THE_SCALE = (
    "GradScaler.step: a gradient was changed after unscale_() and a later scale(), so it may carry "
    "the scale again. Call optimizer.zero_grad() and scaler.update(), then run backward() again."
)


def of_loss(optimizer: Any, scaler: Any) -> None:
    """A backward pass through a scaled loss, whose gradients are 1."""
    scaler.scale(params_of(optimizer)[0].sum()).backward()


@every_sgd
@pytest.mark.parametrize("to_none", [True, False, None])
def test_gradients_of_a_loss_that_is_scaled_after_unscale_are_refused(make, to_none, device):
    """Torch takes them as they are, still scaled."""
    optimizer, scaler = filled(4.0, device, make), ready(device)
    scaler.unscale_(optimizer)
    if to_none is not None:
        optimizer.zero_grad(set_to_none=to_none)
    of_loss(optimizer, scaler)
    for _ in range(2):
        assert error_of(RuntimeError, scaler.step, optimizer) == MAY_CARRY_THE_SCALE
    assert values(optimizer) == [1.0] * 3
    optimizer.zero_grad()
    scaler.update()
    of_loss(optimizer, scaler)
    scaler.step(optimizer)
    assert values(optimizer) == [0.5] * 3


# Parameters of two optimizers.


@cases.over([plain_sgd, looping_sgd])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_gradient_that_another_optimizer_has_unscaled_is_refused(make, has_stepped, device):
    first, scaler = filled(4.0, device), ready(device)
    second = make([Parameter(torch.ones(1, device=device)), *params_of(first)])
    scaler.unscale_(first)
    amp_ext.clip_grad_norm_(params_of(first), 0.5)
    if has_stepped:
        scaler.step(first)
    before = values(first)
    calls = {"unscale_": scaler.unscale_}
    if make is plain_sgd:
        calls["step"] = scaler.step
    for call in calls.values():
        assert error_of(RuntimeError, call, second) == (
            "GradScaler: a gradient was already unscaled with another optimizer, which has the "
            "same parameter. Give each parameter to one optimizer."
        )
    assert values(first) == before
    if has_stepped:
        params_of(first)[0].grad = None
        of_loss(first, scaler)  # new, and scaled
        scaler.step(second)
        assert values(first) == [before[0] - 0.5] * 3
    scaler.update()


# Libraries that unscale before each step, as docs/clients.md describes them.


class LeavesScaled(amp_ext.GradScaler):
    def unscale_(self, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_scaler_that_leaves_gradients_alone_trains_fp16_in_a_library_that_unscales(
    max_grad_norm, device
):
    def train(scaler_class: Any, always_unscales: bool) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4).half().to(device)
        optimizer = amp_ext.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=max_grad_norm)
        scaler = scaler_class(device.type, init_scale=2.0**17, growth_interval=3)
        for x in torch.randn(8, 16, 8).half().to(device):
            optimizer.zero_grad()
            scaler.scale(model(x).float().square().mean()).backward()
            if always_unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [param.tolist() for param in model.parameters()], scaler.state_dict()

    expected = train(amp_ext.GradScaler, False)
    assert train(LeavesScaled, True) == expected
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients"):
        train(amp_ext.GradScaler, True)
