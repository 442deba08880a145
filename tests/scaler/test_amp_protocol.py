"""Tests of what a scaler hands to an optimizer that unscales inside its step, for one step."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import optimizer_cases
from harness import scaler_cases as cases
from harness.reference import same_bits
from harness.rows import rows
from harness.scaler_cases import (
    INF,
    Deriving,
    TorchScaler,
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

NO_CHECKS = r"^No inf checks were recorded for this optimizer\.$"
both_scalers = pytest.mark.parametrize("scaler_class", [TorchScaler, amp_ext.GradScaler])


def give(optimizer: Any, value: float) -> None:
    for param in params_of(optimizer):
        param.grad = torch.full_like(param, value)


def values(optimizer: Any) -> list[float]:
    return [value for param in params_of(optimizer) for value in param.tolist()]


def has_leftovers(optimizer: Any) -> bool:
    return hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")


# Gradients that a step has left with their scale.

CARRIES_A_SCALE = (
    r"^%s: grad of group 0, param 1 still carries the loss scale, because "
    r"scaler\.step\(optimizer\) has already used this gradient\. Don't call optimizer\.step\(\) "
    r"as well, and call zero_grad\(\) before the next backward\(\)\. If you unscaled the gradient "
    r"in a way that torch does not count, such as through \.data, add an in-place operation that "
    r"torch counts: grad\.mul_\(1\)\.$"
)


@both_scalers
@cases.clean_or_overflow
@pytest.mark.parametrize("through_data", [False, True])
@cases.our_optimizers
def test_a_gradient_that_carries_the_scale_of_a_step_is_refused(
    make, through_data, value, scaler_class, device
):
    optimizer, scaler = make(cases.new_params(device, 3)), ready(device, scaler_class)
    give(optimizer, value)
    params_of(optimizer)[0].grad = None
    scaler.step(optimizer)
    scaler.update()
    params_of(optimizer)[0].grad = torch.ones_like(params_of(optimizer)[0])
    if through_data:
        params_of(optimizer)[1].grad.data.div_(4.0)
    before = values(optimizer)
    with pytest.raises(RuntimeError, match=CARRIES_A_SCALE % type(optimizer).__name__):
        optimizer.step()
    assert values(optimizer) == before
    scaler.step(optimizer)  # has a scale


# Gradients that come after a look.


@both_scalers
@cases.clean_or_overflow
@cases.over([cases.torchs_sgd, cases.our_adam, cases.our_adamw_with_norm, plain_sgd])
def test_gradients_that_come_after_an_empty_look_are_an_error(make, value, scaler_class, device):
    late, early = make(cases.new_params(device)), filled(4.0, device, make)
    scaler = ready(device, scaler_class)
    scaler.unscale_(late)
    scaler.unscale_(early)
    give(late, value)
    with pytest.raises(AssertionError, match=NO_CHECKS):
        scaler.step(late)
    assert set(values(late)) == {1.0}
    scaler.step(early)
    scaler.update()
    assert set(values(early)) != {1.0}


@optimizer_cases.each_class
@pytest.mark.parametrize("found", [None, 0.0, 1.0, 2.0, 3.0, -1], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0**10], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_attributes_may_be_set_by_hand(name, options, found, scale, shape, device):
    """An int skips as well."""
    optimizer, plain = optimizer_cases.pair(name, options, device=device, shapes=[(33,), ()])
    is_float = isinstance(found, float)
    optimizer.found_inf = torch.full(shape, found, device=device) if is_float else found
    optimizer.grad_scale = None if scale is None else torch.full(shape, scale, device=device)
    for _ in range(2):
        optimizer_cases.give_grads(optimizer, plain)
        for grad in optimizer_cases.grads_of(optimizer):
            grad.mul_(scale or 1.0)
        optimizer.step()
        if not found:
            plain.step()
    assert all(map(same_bits, params_of(optimizer), params_of(plain)))


# Hooks before the step.


def clip(optimizer: Any, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)


def replace_grads(optimizer: Any, *_: Any) -> None:
    for param in params_of(optimizer):
        param.grad = param.grad * 2.0


WRITES_SCALED = "SGD: a step pre-hook has changed gradients that still carry the loss scale. Set"


@pytest.mark.parametrize("hook", [clip, replace_grads])
def test_a_hook_that_writes_scaled_gradients_is_told_of_once(hook, device):
    optimizer, scaler = filled(4.0, device, plain_sgd), ready(device)
    optimizer.register_step_pre_hook(hook)
    with pytest.warns(UserWarning, match=WRITES_SCALED):
        scaler.step(optimizer)
    scaler.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        give(optimizer, 4.0)
        scaler.step(optimizer)


def freeze(optimizer: Any, *_: Any) -> None:
    params_of(optimizer)[0].grad = None


def replace_states(optimizer: Any, *_: Any) -> None:
    for state in optimizer.state.values():
        state.update({name: tensor.clone() for name, tensor in state.items()})


@pytest.mark.parametrize("hook", [lambda *_: None, freeze, replace_states])
def test_a_hook_that_writes_no_gradient_is_not_warned_of(hook, device):
    optimizer, scaler = filled(4.0, device, cases.our_adam), ready(device)
    optimizer.register_step_pre_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
            give(optimizer, 4.0)


@cases.clean_or_overflow
def test_a_hook_may_take_all_gradients_away(value, device):
    optimizer, scaler = filled(value, device, cases.our_adamw_with_norm), ready(device)
    optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
    scaler.step(optimizer)
    scaler.update()
    assert values(optimizer) == [1.0] * 3
    assert optimizer.grad_norm.item() == 0.0
    assert scaler.get_scale() == (2.0 if value == INF else 4.0)


# A step that ends otherwise than well.


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_a_look_that_no_step_has_used_is_forgotten(device):
    """A write through ``.data`` shows in no version."""
    optimizer, scaler = filled(4.0, device, cases.our_adamw_with_norm), ready(device)
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    handle.remove()
    for param in params_of(optimizer):
        param.grad.data.fill_(3.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(3 * 3**0.5)


def test_a_step_on_the_instance_that_raises_leaves_no_attributes(device):
    optimizer, scaler = filled(4.0, device, plain_sgd), ready(device)
    optimizer.step = fail
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    del optimizer.step
    assert not has_leftovers(optimizer)


def test_a_scan_of_our_scaler_is_not_used_under_torchs(device):
    def make(params: Any) -> Any:
        return amp_ext.optim.SGD(params, lr=0.5, norm_guard=amp_ext.optim.NormGuard())

    optimizer = filled(4.0, device, make)
    for value, scaler_class in ((4.0, amp_ext.GradScaler), (400.0, TorchScaler)):
        give(optimizer, value)
        ready(device, scaler_class).step(optimizer)
        norm = value / 4.0 * 3**0.5
        assert optimizer.norm_guard.stats(wait=True).last_norm == pytest.approx(norm)


# Objects around an optimizer.


@cases.clean_or_overflow
@cases.over([plain_sgd, fused_sgd])
def test_an_object_that_shows_the_flag_of_an_optimizer_it_hides_is_unscaled(make, value, device):
    class Hiding:
        def __init__(self, optimizer: Any) -> None:
            self.param_groups, self.step = optimizer.param_groups, optimizer.step
            self.supports = optimizer._step_supports_amp_scaling

        def __getattr__(self, name: str) -> Any:
            if name == "_step_supports_amp_scaling":
                return self.supports
            raise AttributeError(name)

    optimizer, scaler = filled(value, device, make), ready(device)
    scaler.step(Hiding(optimizer))
    scaler.update()
    assert values(optimizer) == [0.5 if value == 4.0 else 1.0] * 3
    assert not has_leftovers(optimizer)


def itself(optimizer: Any) -> Any:
    return optimizer


BY_PLACE = [
    *itertools.product(
        [amp_ext.GradScaler],
        [plain_sgd, cases.our_adamw_with_norm, fused_sgd],
        [itself, cases.Delegating],
        [False, True],
    ),
    *((TorchScaler, make, itself, False) for make in (cases.our_sgd, cases.our_adam)),
]


@pytest.mark.parametrize(("scaler_class", "make", "wrap", "unscale"), BY_PLACE)
def test_a_closure_by_place_is_refused_as_one_by_name(scaler_class, make, wrap, unscale, device):
    """Its gradients would be checked by nobody, and divided by a scale that they don't carry."""
    optimizer, scaler, calls = filled(4.0, device, make), ready(device, scaler_class), []
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported if GradSc"):
        scaler.step(wrap(optimizer), lambda: calls.append(1))
    assert (values(optimizer), calls) == ([1.0] * 3, [])
    scaler.step(wrap(optimizer))
    assert values(optimizer) != [1.0] * 3


@both_scalers
def test_a_closure_that_a_hook_adds_is_refused(scaler_class, device):
    optimizer, scaler = filled(4.0, device, plain_sgd), ready(device, scaler_class)
    hook = optimizer.register_step_pre_hook(lambda opt, *_: ((opt, lambda: 1.0), {}))
    with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported if GradSc"):
        scaler.step(optimizer)
    hook.remove()
    scaler.step(optimizer)
    assert values(optimizer) == [0.5] * 3


def test_a_closure_by_place_computes_the_gradients_of_torchs_plain_optimizers(device):
    """As under torch's scaler: it unscales before the step."""
    optimizer, scaler = filled(4.0, device, cases.torchs_sgd), ready(device)
    scaler.step(optimizer, lambda: give(optimizer, 2.0))
    assert values(optimizer) == [0.0] * 3


# Which gradients a scaler knows to be unscaled: once, whoever asks, and no others.


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


# Two optimizers, as in libraries that unscale both and update after each step.


@cases.clean_or_overflow
@every_sgd
def test_an_optimizer_that_steps_after_an_update_divides_its_gradients_once(make, value, device):
    """Torch's scaler divides them again, by a scale that may have grown."""
    first, second = filled(8.0, device, make), filled(value, device, make)
    scaler = ready(device, growth_interval=1)
    scaler.unscale_(first)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) has already been called"):
        scaler.unscale_(second)
    scaler.step(second)
    scaler.update()
    is_finite = value < INF
    assert values(first) == [0.0] * 3
    assert values(second) == [0.5 if is_finite else 1.0] * 3
    assert scaler.get_scale() == 4.0 * (4.0 if is_finite else 0.25)
    assert scaler.last_step_skipped(first) is False
    assert scaler.last_step_skipped(second) is not is_finite


@every_sgd
def test_an_update_counts_unscaled_gradients_once_and_the_next_loss_forgets_them(make, device):
    optimizer, scaler = filled(INF, device, make), ready(device)
    scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(AssertionError, match=r"^No inf checks were recorded prior to update"):
        scaler.update()
    assert scaler.get_scale() == 2.0
    scaler.unscale_(optimizer)
    scaler.update()
    optimizer.zero_grad()
    of_loss(optimizer, scaler)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [0.5] * 3


@every_sgd
def test_a_step_after_an_update_is_still_known_after_the_next_loss(make, device):
    optimizer, scaler = filled(4.0, device, make), ready(device)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    scaler.scale(torch.ones((), device=device))
    assert error_of(RuntimeError, scaler.step, optimizer).startswith("step() has already been")
    scaler.update()
    assert scaler.stats(wait=True).updates == 2


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
