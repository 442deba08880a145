"""Ctrl-C at each line of a step, of ``unscale_`` and of ``update``: nothing is done twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from harness.edge_shapes import BF16, INF
from harness.interrupts import IS_COMPLETE, interrupted_at_each_line
from torch import Tensor
from torch.nn import Parameter

import amp_ext

REFUSALS = (
    "step() has already been called since the last update().",
    "unscale_() has already been called on this optimizer since the last update().",
    "unscale_() is being called after step().",
    "No inf checks were recorded prior to update.",
    "an earlier unscale_() or step() of this optimizer was interrupted",
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
        unscales: Whether ``unscale_`` comes before each step.
        done: The number of iterations before that which is interrupted.
    """

    make: Callable[[Any], Any]
    unscales: bool
    done: int


class Loop:
    """A training whose scale doubles at each update, and halves after an overflow."""

    def __init__(self, parts: Parts) -> None:
        self.params = [Parameter(torch.ones(5, 3)), Parameter(torch.ones(7, dtype=BF16))]
        self.optimizer = parts.make(self.params)
        self.scaler = amp_ext.GradScaler("cpu", init_scale=4.0, growth_interval=1)
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

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update()

    def step_alone(self) -> None:
        self.optimizer.step()

    def calls(self) -> list[Callable[[], None]]:
        return [*([self.unscale] if self.unscales else []), self.step, self.update]

    def iterate(self, number: float) -> None:
        self.give(number)
        for call in self.calls():
            call()

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
        for param in self.params:
            torch.utils.swap_tensors(param, Parameter(param.detach().clone()))


@functools.cache
def values_after(parts: Parts, *numbers: float) -> str:
    loop = Loop(parts)
    for number in numbers:
        loop.iterate(number)
    return loop.values()


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
EACH = [
    pytest.param(
        Parts(make, unscales, done),
        number,
        name,
        id=f"{name}-{of}-{('scaled', 'unscaled')[unscales]}-{('first', 'later')[done]}-{kind}",
    )
    for name in ("unscale", "step", "update")
    for of, make in MAKES.items()
    for unscales in (False, True)
    for done in (0, 1)
    for kind, number in {"clean": 2.0, "overflow": INF}.items()
    if unscales or name != "unscale"
]


@pytest.mark.parametrize("then", ["again", "dropped"])
@pytest.mark.parametrize(("parts", "number", "name"), EACH if IS_COMPLETE else EACH[4::7])
def test_a_call_that_is_interrupted_has_happened_or_not_or_is_spent(parts, number, name, then):
    def make() -> Loop:
        loop = Loop(parts)
        loop.give(number)
        for call in loop.calls():
            if call.__name__ == name:
                break
            call()
        return loop

    before, after = values_after(parts), values_after(parts, number)
    scale = 4.0 * 2.0**parts.done
    next_scale = scale * (2.0 if number < INF else 0.5)
    went_on = 0
    for loop, line in interrupted_at_each_line(make, lambda loop: getattr(loop, name)()):
        assert loop.values() in (before, after), line
        assert loop.scaler.get_scale() in (scale, next_scale), line
        names = [call.__name__ for call in loop.calls()]
        rest = loop.calls()[names.index(name) :]
        refusals = [refusal_of(call) for call in rest] if then == "again" else ["dropped"]
        if refusals[0] is None:
            went_on += 1
            assert refusals == [None] * len(rest), line
            assert (loop.values(), loop.scaler.get_scale()) == (after, next_scale), line
        # As the errors say.
        has_stepped = loop.values() != before
        loop.give(NEXT)
        refusal_of(loop.update)
        loop.iterate(NEXT)
        numbers = (number, NEXT) if has_stepped else (NEXT,)
        assert loop.values() == values_after(parts, *numbers), f"{line}: {refusals}"
        loop.assert_free(line)
    assert went_on > 0 or then == "dropped"


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_an_optimizer_that_was_interrupted_without_a_scaler_has_stepped_whole_or_not(make):
    def make_loop() -> Loop:
        loop = Loop(Parts(make, False, 1))
        loop.give(2.0)
        return loop

    stepped = make_loop()
    allowed = [stepped.values()]
    stepped.step_alone()
    allowed.append(stepped.values())
    found = set()
    for loop, line in interrupted_at_each_line(make_loop, Loop.step_alone):
        found.add(loop.values())
        assert found <= set(allowed), line
        loop.optimizer.zero_grad()
        loop.optimizer.step()  # frees what a line of its end has left
        loop.assert_free(line)
    assert len(found) == 2
