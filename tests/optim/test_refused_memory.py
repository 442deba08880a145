"""Tests of steps for which memory is refused: each allocation in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F32, contiguous, placed, strided
from harness.optimizer_cases import FEW_OPTIMIZERS
from harness.reference import same_bits
from harness.rows import rows
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext

WORDS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"


class RefusesMemory(TorchDispatchMode):
    """Fails the operation of torch, of those that return new memory, with a number from 0."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number = number
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        schema = func._schema
        returns = [result.alias_info for result in schema.returns]
        if returns and not schema.is_mutable and returns[0] is None:
            if self.count == self.number:
                raise RuntimeError(WORDS)
            self.count += 1
        return func(*args, **(kwargs or {}))


def converted(optimizer: Any) -> None:
    """Another dtype for one parameter: its state must follow."""
    param = cases.params_of(optimizer)[0]
    param.grad = None
    param.data = param.data.double()
    cases.give_grads([param])


def staged(optimizer: Any) -> None:
    """Parameters with gaps and gradients of another layout and dtype."""
    for param in cases.params_of(optimizer):
        if param.dim() == 2:
            param.data = placed(param.data, strided)
            param.grad = placed(param.grad.t().contiguous().t(), contiguous)


def changed(optimizer: Any) -> None:
    """Masters are stale, and two kernels step."""
    optimizer.add_param_group({"params": cases.make_params(F32)})
    cases.give_grads(optimizer)
    with torch.no_grad():
        for param in cases.params_of(optimizer):
            param.mul_(0.5)


CHANGES = [converted, staged, changed]


def make(name: str, options: dict[str, Any], change: Any, first: bool) -> Any:
    torch.manual_seed(0)
    optimizer = cases.ours(name)(cases.make_params(BF16), **options, max_grad_norm=1.0)
    if not first:
        cases.train([optimizer])
    cases.give_grads(optimizer)
    change(optimizer)
    return optimizer


# One optimizer after every change, and the others after one.
ROWS = {
    f"{optimizer.id}-{change.__name__}-{key}": (*optimizer.values, change, *way)
    for optimizer in FEW_OPTIMIZERS
    for change in CHANGES
    for key, way in {"first": (True, False), "later-with-a-scaler": (False, True)}.items()
    if change is staged or optimizer.values[0] == "Adam"
}


@pytest.mark.parametrize(("name", "options", "change", "first", "scaled"), rows(ROWS))
def test_a_step_that_gets_no_memory_leaves_everything_as_it_was(
    name, options, change, first, scaled
) -> None:
    def step(optimizer: Any) -> None:
        scaler = amp_ext.GradScaler("cpu", init_scale=2.0, enabled=scaled)
        scaler.scale(torch.ones(1))
        with refuses:
            scaler.step(optimizer)

    wanted = make(name, options, change, first)
    refuses = RefusesMemory(None)
    step(wanted)
    allocations, notes = refuses.count, 0
    assert allocations > 2
    for number in range(allocations):
        optimizer = make(name, options, change, first)
        before = cases.bits_of(optimizer)
        refuses = RefusesMemory(number)
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            step(optimizer)
        notes += any(
            "no parameter or state was changed" in note
            for note in getattr(caught.value, "__notes__", ())
        )
        # States that were made or converted already, all of them, are worth the same; the master
        # of a parameter of 64 bits is gone then.
        for old, new in zip(before, cases.bits_of(optimizer), strict=True):
            assert old.keys() - new.keys() <= {"master_param"}
            for key in old.keys() & new.keys():
                assert same_bits(new[key].to(old[key].dtype), old[key])
        refuses = RefusesMemory(None)
        step(optimizer)
        cases.assert_same_bits(optimizer, wanted)
    assert notes or not hasattr(RuntimeError, "add_note")
