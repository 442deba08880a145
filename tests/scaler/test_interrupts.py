"""Ctrl-C at each line of a step, of ``unscale_`` and of ``update``: nothing is done twice."""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from awkward import BF16, INF
from interrupts import IS_COMPLETE, SECONDS, interrupted_at_each_line
from rows import rows
from scaler_cases import TorchScaler, filled, grads_of, ready, through_a_file
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext import ops

REFUSALS = (
    "step() has already been called since the last update().",
    "unscale_() has already been called on this optimizer since the last update().",
    "unscale_() is being called after step().",
    "No inf checks were recorded prior to update.",
    "gradients must be new, got those that were unscaled in part",
    "the last update() must have ended, got one that was interrupted: call update() again",
)


def refusal_of(call: Callable[[], None]) -> str | None:
    """Returns the words in which a call refuses, None if it doesn't; lets other errors through."""
    try:
        call()
    except (RuntimeError, AssertionError) as error:
        if any(words in str(error) for words in REFUSALS):
            return str(error)
        raise
    return None


class Parts(NamedTuple):
    """What a training is made of.

    Attributes:
        make: Makes the optimizer.
        scaler_class: Ours or torch's.
        unscales: Whether ``unscale_`` comes before each step.
        done: The number of iterations before that which is interrupted.
    """

    make: Callable[[Any], Any]
    scaler_class: Any
    unscales: bool
    done: int


class Loop:
    """A training whose scale doubles at each update, and halves after an overflow."""

    def __init__(self, parts: Parts) -> None:
        self.params = [Parameter(torch.ones(5, 3)), Parameter(torch.ones(7, dtype=BF16))]
        self.optimizer = parts.make(self.params)
        self.scaler = parts.scaler_class("cpu", init_scale=4.0, growth_interval=1)
        self.scaler.scale(torch.ones(()))
        self.unscales = parts.unscales
        for number in range(parts.done):
            self.iterate(1.0 + number)

    def give(self, number: float) -> None:
        """Makes the gradients of an iteration, scaled; those of number inf overflow."""
        self.optimizer.zero_grad()
        for param in self.params:
            grad = number * torch.arange(1.0, param.numel() + 1).reshape(param.shape) / 64
            param.grad = (grad * self.scaler.get_scale()).to(param.dtype)

    def look_and_step(self) -> None:
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)

    def iterate(self, number: float) -> None:
        self.give(number)
        self.look_and_step()
        self.scaler.update()

    def end_iteration(self) -> None:
        """Drops an iteration that can't be finished, as the errors say."""
        self.optimizer.zero_grad()
        refusal_of(self.scaler.update)

    def values(self) -> str:
        """Returns parameters and what is in their states beside zeros and copies of them."""

        def is_news(param: Tensor, value: Any) -> bool:
            return isinstance(value, Tensor) and not (
                not value.any()
                or (value.shape == param.shape and torch.equal(value, param.to(value.dtype)))
            )

        states = [
            {name: value.tolist() for name, value in state.items() if is_news(param, value)}
            for param in self.params
            for state in [self.optimizer.state.get(param, {})]
        ]
        return repr(([param.tolist() for param in self.params], states))

    def assert_free(self, line: str) -> None:
        """Checks that nobody holds the optimizer or its parameters."""
        self.optimizer.zero_grad()
        self.optimizer.step()
        assert "_thread_in_plan" not in vars(self.optimizer), line
        for param in self.params:
            torch.utils.swap_tensors(param, Parameter(param.detach().clone()))


@functools.cache
def values_after(parts: Parts, *numbers: float) -> str:
    loop = Loop(parts)
    for number in numbers:
        loop.iterate(number)
    return loop.values()


def update(loop: Loop) -> None:
    loop.scaler.update()


def step_alone(loop: Loop) -> None:
    loop.scaler.step(loop.optimizer)


def interrupted(
    parts: Parts, number: float, call: Callable[[Loop], None]
) -> Iterator[tuple[Loop, str, bool]]:
    """Yields a loop for each line at which a call was interrupted, and whether it has stepped."""

    def make() -> Loop:
        loop = Loop(parts)
        loop.give(number)
        if call is update:
            loop.look_and_step()
        return loop

    before, after = values_after(parts), values_after(parts, number)
    for loop, line in interrupted_at_each_line(make, call):
        values = loop.values()
        assert values in (before, after), line
        yield loop, line, values != before


OURS = {
    "AdamW": functools.partial(amp_ext.optim.AdamW, lr=0.5, max_grad_norm=1.0),
    "SGD": functools.partial(amp_ext.optim.SGD, lr=0.5, momentum=0.5),
}
MAKES = {
    **OURS,
    "torchs-SGD": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5),
    "torchs-fused-Adam": functools.partial(torch.optim.Adam, lr=0.5, fused=True),
}
NEXT = 3.0
FEW = {
    "step-AdamW-scaled-later-clean",
    "step-AdamW-unscaled-later-clean",
    "step-SGD-scaled-first-overflow",
    "step-SGD-unscaled-first-clean",
    "step-torchs-SGD-scaled-later-clean",
    "step-torchs-fused-Adam-scaled-later-clean",
    "step-torchs-fused-Adam-unscaled-later-clean",
    "update-AdamW-scaled-later-clean",
    "update-SGD-unscaled-later-overflow",
}
ROWS = {
    f"{name}-{of}-{('scaled', 'unscaled')[unscales]}-{('first', 'later')[done]}-{kind}": (
        Parts(make, amp_ext.GradScaler, unscales, done),
        number,
        call,
    )
    for name, call in {"step": Loop.look_and_step, "update": update}.items()
    for of, make in MAKES.items()
    for unscales in (False, True)
    for done in (0, 1)
    for kind, number in {"clean": 2.0, "overflow": INF}.items()
}
sweep = pytest.mark.parametrize(
    ("parts", "number", "call"),
    rows({name: row for name, row in ROWS.items() if name in FEW or IS_COMPLETE}),
)


def scales_after(parts: Parts, number: float) -> tuple[float, float]:
    """Returns the scale before the update of an iteration, and after it."""
    before = 4.0 * 2.0**parts.done
    return before, before * (2.0 if number < INF else 0.5)


@sweep
@pytest.mark.parametrize("again", ["all", "last"])
def test_what_is_done_again_after_an_interrupt_is_done_once_or_refused(parts, number, call, again):
    if again == "last" and not (parts.unscales and call is Loop.look_and_step):
        return  # is all
    before, after = scales_after(parts, number)
    went_on = 0
    for loop, line, has_stepped in interrupted(parts, number, call):
        refusal = refusal_of(functools.partial(step_alone if again == "last" else call, loop))
        if refusal is not None:
            loop.end_iteration()
            assert loop.scaler.get_scale() in (before, after), line
        elif loop.scaler.get_scale() == before:
            loop.scaler.update()
        if refusal is None:
            went_on += 1
            has_stepped = number < INF
            assert loop.scaler.get_scale() == after, line
        numbers = (number,) if has_stepped else ()
        assert loop.values() == values_after(parts, *numbers), f"{line}: {refusal}"
        loop.iterate(NEXT)
        assert loop.values() == values_after(parts, *numbers, NEXT), f"{line}: {refusal}"
        loop.assert_free(line)
    assert went_on > 0


def dropped_and_gone_on(loop: Loop, line: str, parts: Parts, stepped: tuple[float, ...]) -> bool:
    """Takes the next iteration in the place of one that was interrupted.

    Returns:
        Whether it was not refused at first.
    """
    refusal = refusal_of(functools.partial(loop.iterate, NEXT))
    if refusal is not None:
        loop.end_iteration()
        loop.iterate(NEXT)
    assert loop.values() == values_after(parts, *stepped, NEXT), f"{line}: {refusal}"
    return refusal is None


@sweep
def test_an_iteration_that_is_dropped_after_an_interrupt_does_no_harm(parts, number, call):
    allowed = [2.0 * scale for scale in scales_after(parts, number)]
    went_on = 0
    for loop, line, has_stepped in interrupted(parts, number, call):
        went_on += dropped_and_gone_on(loop, line, parts, (number,) if has_stepped else ())
        assert loop.scaler.get_scale() in allowed, line
        loop.assert_free(line)
    assert went_on > 0


@pytest.mark.filterwarnings("ignore:.* of a step that was interrupted are dropped")
@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_an_iteration_that_is_dropped_under_torchs_scaler_does_no_harm(make, unscales):
    parts = Parts(make, TorchScaler, unscales, 1)
    went_on = 0
    for loop, line, has_stepped in interrupted(parts, 2.0, Loop.look_and_step):
        went_on += dropped_and_gone_on(loop, line, parts, (2.0,) if has_stepped else ())
        loop.assert_free(line)
    assert went_on > 0


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_an_optimizer_that_was_interrupted_without_a_scaler_has_stepped_whole_or_not(make):
    def make_loop() -> Loop:
        loop = Loop(Parts(make, amp_ext.GradScaler, False, 1))
        loop.give(2.0)
        return loop

    stepped = make_loop()
    allowed = [stepped.values()]
    stepped.optimizer.step()
    allowed.append(stepped.values())
    found = set()
    for loop, line in interrupted_at_each_line(make_loop, lambda loop: loop.optimizer.step()):
        found.add(loop.values())
        assert found <= set(allowed), line
        loop.optimizer.zero_grad()
        loop.optimizer.step()  # frees what a line of its end has left
        loop.assert_free(line)
    assert len(found) == 2


# Gradients that an interrupted call has unscaled are known by a mark, and by no reference.


def unscaled_and_interrupted(make: Any, where: str) -> tuple[amp_ext.GradScaler, Any]:
    """Returns a scaler and an optimizer that was interrupted in ``unscale_`` or in its step."""
    scaler, optimizer = ready(), filled(4.0, make=make)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    if where == "step":
        scaler.unscale_(optimizer)
        handle = optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
        handle.remove()
        return scaler, optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.LossScale, "look", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.unscale_(optimizer)
    return scaler, optimizer


interrupted_in = pytest.mark.parametrize("where", ["unscale_", "step"])
each_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@interrupted_in
@each_make
def test_gradients_of_an_interrupted_call_may_be_swapped(make, where):
    scaler, optimizer = unscaled_and_interrupted(make, where)
    (param,) = optimizer.param_groups[0]["params"]
    grad, param.grad, other = param.grad, None, torch.full((3,), 4.0)
    torch.utils.swap_tensors(grad, other)
    param.grad = grad
    if where == "unscale_":
        scaler.unscale_(optimizer)  # what is there now has not been unscaled
        assert param.grad.tolist() == [1.0] * 3
    else:
        scaler.step(optimizer)
        assert param.tolist() == stepped_once(make)


def stepped_once(make: Any) -> list[float]:
    scaler, optimizer = ready(), filled(4.0, make=make)
    scaler.step(optimizer)
    return optimizer.param_groups[0]["params"][0].tolist()


@interrupted_in
def test_gradients_of_an_interrupted_call_may_be_saved(where):
    _, optimizer = unscaled_and_interrupted(OURS["SGD"], where)
    (grad,) = grads_of(optimizer)
    assert torch.equal(through_a_file(grad, weights_only=True), grad)


def test_converted_gradients_are_known_as_those_that_were_unscaled():
    scaler, optimizer = unscaled_and_interrupted(OURS["SGD"], "step")
    (param,) = optimizer.param_groups[0]["params"]
    param.data, param.grad.data = param.data.double(), param.grad.data.double()  # model.double()
    scaler.step(optimizer)
    assert param.tolist() == [0.5] * 3


@each_make
def test_a_second_unscale_that_is_refused_changes_nothing_after_an_interrupted_step(make):
    scaler, optimizer = unscaled_and_interrupted(make, "step")
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == stepped_once(make)


@interrupted_in
def test_new_gradients_after_an_interrupted_call_are_unscaled(where):
    scaler, optimizer = unscaled_and_interrupted(OURS["SGD"], where)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.full((3,), 8.0)
    scaler.step(optimizer)
    assert param.tolist() == [0.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_signals_at_any_time_leave_what_some_whole_iterations_leave(unscales):
    """Seconds can be chosen: AMP_EXT_INTERRUPT_SECONDS=60."""
    parts = Parts(OURS["AdamW"], amp_ext.GradScaler, unscales, 0)
    loop, spared, chance = Loop(parts), Loop(parts), random.Random(0)
    for each in (loop, spared):
        each.scaler.set_growth_interval(10**9)
    is_armed, interrupts = False, 0

    def interrupt(*_: Any) -> None:
        if is_armed:
            raise KeyboardInterrupt

    handler_before = signal.signal(signal.SIGALRM, interrupt)
    try:
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end:
            loop.give(NEXT)
            before = loop.values()
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-3))
            try:
                is_armed, is_to_step = True, True
                loop.look_and_step()
                is_to_step = False
                loop.scaler.update()
                is_armed = False
            except KeyboardInterrupt:
                is_armed = False
                interrupts += 1
                has_stepped = loop.values() != before
                if is_to_step and refusal_of(loop.look_and_step) is None:
                    has_stepped = True
                loop.end_iteration()
            else:
                has_stepped = True
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if has_stepped:
                spared.iterate(NEXT)
            assert loop.values() == spared.values()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler_before)
    assert interrupts > 0
