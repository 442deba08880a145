"""Steps that fail: each allocation, launch and copy is refused in turn, or the whole step is."""

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
from harness.launch_failures import WORDS, refusing_launch
from harness.optimizer_cases import few_optimizers, give_grads, make_params, params_of
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext

Optimizer = torch.optim.Optimizer

# Options of a second group, by which it takes another kernel.
OTHER_KERNEL = {"Adam": {"amsgrad": False}, "AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.0}}
SHAPES = [(5, 3), (4097,), ()]
COUNTS = r"(\d+) of (\d+) parameters(?:, and (\d+) more in part)?"
SCALERS = {"ours": amp_ext.GradScaler, "torch": torch.amp.GradScaler}
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"


class Refuses(TorchDispatchMode):
    """Fails one operation of torch, of those that copy or of those that return new memory."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__()
        self.left, self.words = number, words

    def is_counted(self, func: Any) -> bool:
        if self.words == WORDS:
            return func is torch.ops.aten.copy_.default
        returns = [result.alias_info for result in func._schema.returns]
        return bool(returns) and not func._schema.is_mutable and returns[0] is None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if self.is_counted(func):
            self.left -= 1
            if self.left == -1:
                raise RuntimeError(self.words)
        return func(*args, **(kwargs or {}))


def make(name: str, options: dict[str, Any], *, first: bool = False, **more: Any) -> Optimizer:
    """Returns an optimizer of all dtypes and two kernels, with gradients.

    The first parameter of each group has gaps, and its gradient another layout: both are copied.
    """
    torch.manual_seed(0)
    groups = [
        {"params": make_params(F32, shapes=SHAPES) + make_params(F64, shapes=SHAPES)},
        {"params": make_params(BF16, shapes=SHAPES) + make_params(F16, shapes=SHAPES)},
        {"params": make_params(F32, shapes=SHAPES), "lr": 0.1, **OTHER_KERNEL.get(name, {})},
    ]
    for group in groups:
        group["params"][0].data = placed(group["params"][0].data, strided)
    optimizer = cases.ours(name)(groups, **options, write_back_grads=True, **more)
    optimizer.init_state()
    cases.train([optimizer], 0 if first else 2)
    torch.manual_seed(1)
    give_grads(optimizer)
    for group in optimizer.param_groups:
        param = group["params"][0]
        param.grad = placed(param.grad.t().contiguous().t(), contiguous)
    return optimizer


def bits_of(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """Returns copies of every parameter, its states and its gradient."""
    return [
        {**bits, "grad": param.grad.clone()}
        for bits, param in zip(cases.bits_of(optimizer), params_of(optimizer), strict=True)
    ]


def are_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in right)


def step_by(scaler_of: str | None) -> Callable[[Optimizer], Any]:
    """Returns what steps an optimizer, through a scaler or by itself."""
    if scaler_of is None:
        return lambda optimizer: optimizer.step()
    scaler = SCALERS[scaler_of]("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    return scaler.step


def counts_in(error: BaseException, name: str) -> tuple[int, int, int] | None:
    """Returns of how many parameters how many were stepped, and how many in part, by its note."""
    for note in getattr(error, "__notes__", ()):
        found = re.match(rf"^{name}\.step: the step failed after updating {COUNTS}\. Load a ", note)
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
        yield optimizer, before, found


def convert(optimizer: Optimizer) -> Optimizer:
    """Another dtype for one parameter, whose state must follow, and masters are stale."""
    param = params_of(optimizer)[6]
    param.grad = None
    param.data = param.data.double()
    give_grads([param])
    with torch.no_grad():
        for each in params_of(optimizer):
            each.mul_(0.5)
    return optimizer


@pytest.mark.parametrize("scaled", [False, True], ids=["first", "later-with-a-scaler"])
@few_optimizers
def test_a_step_that_gets_no_memory_leaves_everything_as_it_was(name, options, scaled) -> None:
    def make_one() -> Optimizer:
        return convert(make(name, options, first=not scaled, max_grad_norm=1.0))

    wanted, notes, count = make_one(), 0, 0
    step_by("ours" if scaled else None)(wanted)
    failed = failed_steps(
        make_one,
        lambda optimizer: step_by("ours" if scaled else None)(optimizer),
        lambda number: Refuses(number, NO_MEMORY),
    )
    for optimizer, before, error in failed:
        count += 1
        assert str(error) == NO_MEMORY
        notes += any("no parameter or state was" in n for n in getattr(error, "__notes__", ()))
        # States that were made or converted already, all of them, are worth the same; the master
        # of a parameter of 64 bits is gone then.
        for old, new in zip(before, bits_of(optimizer), strict=True):
            assert old.keys() - new.keys() <= {"master_param"}
            for key in old.keys() & new.keys():
                assert same_bits(new[key].to(old[key].dtype), old[key])
        step_by("ours" if scaled else None)(optimizer)
        cases.assert_same_bits(optimizer, wanted)
    assert count > 2
    assert notes or not hasattr(RuntimeError, "add_note")


# One optimizer in every way, and the others in the first.
WAYS = {"scaler": (True, "ours"), "clipped": (True, None), "scaler-of-torch": (False, "torch")}
LAUNCHES = {
    f"{optimizer.id}-{key}": (*optimizer.values, *way)
    for optimizer in cases.FEW_OPTIMIZERS
    for key, way in WAYS.items()
    if key == "scaler" or optimizer.values[0] == "Adam"
}


@pytest.mark.parametrize(("name", "options", "clips", "scaler_of"), rows(LAUNCHES))
def test_a_refused_launch_is_told_with_the_number_of_parameters_that_were_stepped(
    name, options, emulated, clips, scaler_of
) -> None:
    def make_one() -> Optimizer:
        return make(name, options, max_grad_norm=1.0 if clips else None)

    def step(optimizer: Optimizer) -> None:
        step_by(scaler_of)(optimizer)

    whole = make_one()
    step(whole)
    wanted, seen = bits_of(whole), set()
    for optimizer, before, error in failed_steps(make_one, step, refusing_launch):
        assert type(error) is torch.AcceleratorError
        assert str(error) == WORDS
        states = list(zip(bits_of(optimizer), before, wanted, strict=True))
        stepped = [are_same(now, new) for now, _, new in states]
        assert [are_same(now, old) for now, old, _ in states] == [not new for new in stepped]
        seen.add(sum(stepped))
        if any(stepped):
            assert counts_in(error, name) == (len(stepped), sum(stepped), 0)
            continue
        note = (
            f"{name}.step: no parameter or state was changed. Free memory if it ran out, then "
            "step again."
        )
        assert getattr(error, "__notes__", [note]) == [note]  # none in the look of a scaler
        step(optimizer)
        assert all(map(are_same, bits_of(optimizer), wanted))
    assert len(seen) >= 4  # dtypes and kernels


@few_optimizers
def test_a_refused_copy_leaves_each_parameter_whole_or_is_told(name, options, row):
    """Memory with gaps is copied for the kernels, and back."""
    wanted_of = make(name, options)
    wanted_of.step()
    wanted, found = bits_of(wanted_of), set()
    for optimizer, before, error in failed_steps(
        lambda: make(name, options), step_by(None), lambda number: Refuses(number, WORDS)
    ):
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


SWITCHED = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"state_dtype": "8bit"},
    "Lion": {"master_weights": "split"},
}


@pytest.mark.parametrize("words", ["still carries the loss scale, because", "sparse"])
@cases.each_name
def test_a_step_that_is_refused_leaves_states_as_they_were(name, words):
    """Also where it would have made what options ask for that were switched on since."""
    optimizer = cases.trained(cases.ours(name)(make_params(BF16), lr=0.5, rounding="dither"))
    if words == "sparse":
        params_of(optimizer)[-1].grad = params_of(optimizer)[-1].grad.to_sparse()
    else:
        step_by("ours")(optimizer)
    optimizer.param_groups[0].update(SWITCHED.get(name, SWITCHED["AdamW"]))
    before = {param: dict(state) for param, state in optimizer.state.items()}
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert optimizer.state == before
