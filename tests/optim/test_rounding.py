"""How optimizers round what they store in 16 bits: dithered, or to nearest as torch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32
from harness.number_codes import counter_of
from harness.optimizer_cases import (
    assert_same_bits,
    give_grads,
    make_params,
    ours,
    params_of,
    train,
)
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

from amp_ext import ops

SHAPES = [(16385,), (3, 5), ()]
# Of each class, with first moments that are dithered, and all others.
SLOW = {"Adam": {"betas": (0.99, 0.999)}, "Lion": {}, "SGD": {"momentum": 0.99, "nesterov": True}}
SETTINGS = [*cases.OPTIMIZERS, *rows({f"{name}-slow": (name, own) for name, own in SLOW.items()})]
each_setting = pytest.mark.parametrize(("name", "options"), SETTINGS)
# What is stored in 16 bits, and whether rounding=None dithers it.
NARROW: dict[str, tuple[dict[str, Any], bool]] = {
    "states": ({"state_dtype": BF16}, True),
    "parameters": ({"master_weights": False}, True),
    "both": ({"master_weights": False, "state_dtype": BF16}, True),
    "as-torch": ({"master_weights": False, "state_dtype": None}, False),
    "states-as-torch": ({"state_dtype": None}, False),
    "nothing": ({}, False),
}
narrow = pytest.mark.parametrize(("stored", "dithers"), rows(NARROW))
of_16_bits = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)


class Lists:
    """Steps parameters by the operation over lists that an optimizer should take.

    Args:
        optimizer: Just made; the lists start from copies of what it has.
        dither: Of the operation.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dither: bool) -> None:
        optimizer = copy.deepcopy(optimizer)
        optimizer.init_state()
        (self.group,) = optimizer.param_groups
        self.params = self.group["params"]
        states = [optimizer.state[param] for param in self.params]
        steps = [state.get("step", torch.zeros(())) for state in states]
        self.lists: dict[str, Any] = {"steps": steps}
        for name in optimizer.state_spec_of(self.group).names:
            self.lists[f"{name}s"] = [state[name] for state in states]
        if "master_param" in states[0]:
            self.lists["master_params"] = [state["master_param"] for state in states]
        own = optimizer.description
        self.operation = getattr(ops, own.operation)
        self.options = {name: self.group[name] for name in own.fields if name in self.group}
        if "betas" in self.group:
            betas = enumerate(self.group["betas"], 1)
            self.options |= {f"beta{number}": beta for number, beta in betas}
        self.options |= {"lr": self.group["lr"], "dither": dither}

    def step(self, grads: list[Tensor]) -> None:
        params = [param.detach() for param in self.params]
        self.operation(params, grads, **self.lists, **self.options)

    def assert_same(self, optimizer: torch.optim.Optimizer) -> None:
        for index, param in enumerate(params_of(optimizer)):
            assert same_bits(param, self.params[index])
            for name, value in optimizer.state[param].items():
                assert same_bits(value, self.lists[f"{name}s"][index]), name


@pytest.mark.parametrize("rounding", [None, "dither", "nearest"])
@of_16_bits
@narrow
@each_setting
def test_steps_are_those_of_the_list_operation(name, options, stored, dithers, dtype, rounding):
    optimizer = ours(name)(
        make_params(dtype, shapes=SHAPES), **options, **stored, rounding=rounding
    )
    by_list = Lists(optimizer, rounding == "dither" or (rounding is None and dithers))
    for _ in range(3):
        give_grads(optimizer)
        by_list.step([param.grad.clone() for param in params_of(optimizer)])
        optimizer.step()
    by_list.assert_same(optimizer)


# Groups, counters and checkpoints.


@pytest.mark.parametrize(("name", "first"), [("Lion", 0.0), ("SGD", 1.0)])
def test_a_file_without_counters_starts_them(name, first):
    """As torch's SGD, and ours where nothing was dithered."""
    options = {"momentum": 0.99} if name == "SGD" else {}
    before = ours(name)(make_params(F32), **options)
    train([before], 2)
    assert all("step" not in state for state in before.state.values())
    after = ours(name)(cases.twins(before), **options, state_dtype=BF16)
    after.load_state_dict(before.state_dict())
    train([after], 1)
    assert {state["step"].item() for state in after.state.values()} == {first + 1}


# What dithers, in the order of what a step reads.
DITHERED = {
    "parameters": ("SGD", BF16, {"master_weights": False}),
    "split8": ("SGD", F16, {"master_weights": "split8"}),
    "states": ("AdamW", F32, {"state_dtype": BF16}),
    "8bit": ("AdamW", BF16, {"state_dtype": "8bit"}),
    "8bit-momentum": ("SGD", F32, {"state_dtype": "8bit", "momentum": 0.99}),
}


def count_from(optimizer: torch.optim.Optimizer, steps: int) -> None:
    optimizer.init_state()
    for state in optimizer.state.values():
        state["step"].copy_(counter_of(steps))


@pytest.mark.parametrize(("name", "dtype", "options"), rows(DITHERED))
def test_counters_and_resumed_runs_go_on_behind_2_24_steps(name, dtype, options, device):
    straight, resumed = cases.pair(name, {"lr": 0.05, **options}, dtype, device, [(64, 64), (7,)])
    count_from(straight, 2**24 - 2)
    count_from(resumed, 2**24 - 2)
    for step in range(6):
        train([straight, resumed], 1)
        file = cases.through_a_file(resumed.state_dict())
        resumed = cases.loading(ours(name)(cases.twins(resumed), lr=1.0, **options), file)
        counters = {state["step"].item() for state in straight.state.values()}
        assert counters == {counter_of(2**24 - 1 + step).item()}
        assert_same_bits(resumed, straight)
