"""Tests of the note on a failed step: each launch and each copy is refused in turn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32, F64, contiguous, placed, strided
from harness.launch_failures import WORDS, RefusesCopy, refusing_launch
from harness.optimizer_cases import few_optimizers, give_grads, make_params, params_of
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

import amp_ext

Optimizer = torch.optim.Optimizer

# Options of a second group, by which it takes another kernel.
OTHER_KERNEL = {"Adam": {"amsgrad": False}, "AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.0}}
SHAPES = [(5, 3), (4097,), ()]
COUNTS = r"(\d+) of (\d+) parameters(?:, and (\d+) more in part)?"
NOTE = rf"^{{}}\.step: the step failed after updating {COUNTS}\. Load a "
SCALERS = {"ours": amp_ext.GradScaler, "torch": torch.amp.GradScaler}
SCALE = 4.0


def make(
    name: str, options: dict[str, Any], *, staged: bool = False, first: bool = False, **more: Any
) -> Optimizer:
    """Returns an optimizer of all dtypes and two kernels, with gradients."""
    torch.manual_seed(0)
    groups = [
        {"params": make_params(F32, shapes=SHAPES) + make_params(F64, shapes=SHAPES)},
        {"params": make_params(BF16, shapes=SHAPES) + make_params(F16, shapes=SHAPES)},
        {"params": make_params(F32, shapes=SHAPES), "lr": 0.1, **OTHER_KERNEL.get(name, {})},
    ]
    if staged:
        for param in (group["params"][0] for group in groups):
            param.data = placed(param.data, strided)
    optimizer = cases.ours(name)(groups, **options, write_back_grads=True, **more)
    optimizer.init_state()
    if not first:
        cases.train([optimizer], 2)
    give_grads_anew(optimizer, staged)
    return optimizer


def give_grads_anew(optimizer: Optimizer, staged: bool = False) -> None:
    torch.manual_seed(1)
    give_grads(optimizer)
    for group in optimizer.param_groups if staged else ():
        param = group["params"][0]
        param.grad = placed(param.grad.t().contiguous().t(), contiguous)


def bits_of(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """Returns copies of every parameter, its states and its gradient."""
    return [
        {**bits, "grad": param.grad.clone()}
        for bits, param in zip(cases.bits_of(optimizer), params_of(optimizer), strict=True)
    ]


def are_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in right)


def stepper(scaler_of: str | None) -> Callable[[Optimizer], Any]:
    """Returns what steps an optimizer, through a scaler or by itself."""
    if scaler_of is None:
        return lambda optimizer: optimizer.step()
    scaler = SCALERS[scaler_of]("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(1))
    return scaler.step


def counts_in(error: BaseException, name: str) -> tuple[int, int, int] | None:
    """Returns of how many parameters how many were stepped, and how many in part, by its note."""
    for note in getattr(error, "__notes__", ()):
        found = re.match(NOTE.format(name), note)
        if found is not None:
            return int(found[2]), int(found[1]), int(found[3] or 0)
    return None


def failed_steps(
    make_one: Callable[[], Optimizer],
    step: Callable[[Optimizer], Any],
    refusing: Callable[[int], AbstractContextManager[Any]],
) -> Iterator[tuple[Optimizer, Any, BaseException]]:
    """Yields an optimizer whose step failed at its first launch or copy, one at its second, ...

    Also what it was before, and the error.
    """
    for number in itertools.count():
        optimizer = make_one()
        before = bits_of(optimizer)
        try:
            with refusing(number):
                step(optimizer)
        except RuntimeError as error:
            found = error
        else:
            return
        assert str(found) == WORDS
        yield optimizer, before, found


WAYS = {
    "first": (True, False, None),
    "clipped-scaler": (False, True, "ours"),
    "clipped": (False, True, None),
    "first-scaler": (True, False, "ours"),
    "scaler-of-torch": (False, False, "torch"),
}
# One optimizer in every way, and the others in two.
LAUNCHES = {
    f"{optimizer.id}-{key}": (*optimizer.values, *way)
    for optimizer in cases.FEW_OPTIMIZERS
    for number, (key, way) in enumerate(WAYS.items())
    if number < 2 or optimizer.values[0] == "Adam"
}


@pytest.mark.parametrize(("name", "options", "first", "clips", "scaler_of"), rows(LAUNCHES))
def test_a_refused_launch_is_told_with_the_number_of_parameters_that_were_stepped(
    name, options, emulated, first, clips, scaler_of
) -> None:
    def make_one() -> Optimizer:
        limit = 1.0 if clips else None
        return make(name, options, staged=True, first=first, max_grad_norm=limit)

    def step(optimizer: Optimizer) -> None:
        stepper(scaler_of)(optimizer)

    whole = make_one()
    step(whole)
    wanted = bits_of(whole)

    seen = set()
    for optimizer, before, error in failed_steps(make_one, step, refusing_launch):
        assert type(error) is torch.AcceleratorError
        old, new = zip(
            *(
                (are_same(now, earlier), are_same(now, later))
                for now, earlier, later in zip(bits_of(optimizer), before, wanted, strict=True)
            ),
            strict=True,
        )
        assert all(left != right for left, right in zip(old, new, strict=True))
        seen.add(sum(new))
        if not any(new):
            note = (
                f"{name}.step: no parameter or state was changed. Free memory if it ran out, then "
                "step again."
            )
            assert getattr(error, "__notes__", [note]) == [note]  # none in the look of a scaler
            step(optimizer)
            assert all(map(are_same, bits_of(optimizer), wanted))
            continue
        assert counts_in(error, name) == (len(new), sum(new), 0)
    assert len(seen) >= 4  # dtypes and kernels


# Copies.


@few_optimizers
def test_a_refused_copy_leaves_each_parameter_whole_or_is_told(name, options, row):
    """Memory with gaps is copied for the kernels, and back."""

    def make_one() -> Optimizer:
        return make(name, options, staged=True)

    wanted_of = make_one()
    wanted_of.step()
    wanted, found = bits_of(wanted_of), set()
    for optimizer, before, error in failed_steps(make_one, stepper(None), RefusesCopy):
        counts = counts_in(error, name)
        kinds = []
        for now, old, new in zip(bits_of(optimizer), before, wanted, strict=True):
            assert all(
                same_bits(now[key], old[key]) or same_bits(now[key], new[key]) for key in now
            )
            kinds.append("old" if are_same(now, old) else "new" if are_same(now, new) else "part")
        found |= {*kinds}
        if counts is None:
            assert {*kinds} == {"old"}
            optimizer.step()
            assert all(map(are_same, bits_of(optimizer), wanted))
        else:
            of, stepped, in_part = counts
            assert (of, stepped) == (len(kinds), kinds.count("new"))
            assert 0 <= in_part - kinds.count("part") <= kinds.count("old")  # all of it is copied
    assert found == {"old", "new", "part"}
