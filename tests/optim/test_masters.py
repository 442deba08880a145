"""Float32 masters of 16-bit parameters: what they keep, and what happens when weights change."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, channels_last, placed
from harness.optimizer_cases import (
    HALVES,
    make_params,
    ours,
    params_of,
    train,
    trained,
)
from harness.reference import refreshed_master, same_bits, snapshot
from torch import Tensor
from torch.nn import Parameter


def still_step(optimizer: cases.Optimizer) -> None:
    """Takes a step that moves nothing: with a learning rate of 0."""
    (group,) = optimizer.param_groups
    lr, group["lr"] = group["lr"], 0.0
    train([optimizer])
    group["lr"] = lr


def masters_of(optimizer: cases.Optimizer) -> list[Tensor]:
    return snapshot([optimizer.state[param]["master_param"] for param in params_of(optimizer)])


def assert_refreshed(
    optimizer: cases.Optimizer, before: list[Tensor], changed: list[Tensor]
) -> None:
    """Asserts that the masters hold what parameters were changed to, and no parameter moved."""
    masters = masters_of(optimizer)
    assert all(map(same_bits, params_of(optimizer), changed))
    assert all(map(same_bits, masters, map(refreshed_master, before, changed)))


# Ways to change weights under their masters.


@torch.no_grad()
def clamp(params: list[Parameter]) -> None:
    for param in params:
        param.clamp_(-0.3, 0.3)


@torch.no_grad()
def add_in_place(params: list[Parameter]) -> None:
    for param in params:
        param += 0.125


def write_through_data(params: list[Parameter]) -> None:
    """Writes what torch does not count."""
    for param in params:
        param.data.mul_(0.5)


@pytest.mark.parametrize("change", [clamp, add_in_place, write_through_data])
@pytest.mark.parametrize(("name", "options"), cases.optimizers_named("adamw", "dampening"))
@HALVES
def test_changed_weights_reach_the_master_at_the_next_step(device, dtype, name, options, change):
    """After a write that torch does not count, when ``refresh_masters`` is called, and at once.

    An overflow between does not let it be forgotten.
    """
    optimizer = trained(ours(name)(make_params(dtype, device), **options))
    before = masters_of(optimizer)
    change(params_of(optimizer))
    changed = snapshot(params_of(optimizer))
    assert not same_bits(changed[0], before[0].to(dtype))
    if change is clamp:  # elements that did not change keep their extra bits
        kept = changed[0] == before[0].to(dtype)
        assert kept.any()
        assert (before[0] != changed[0].float())[kept].any()
    if change is write_through_data:
        optimizer.refresh_masters()
        assert_refreshed(optimizer, before, changed)
    if change is add_in_place:
        optimizer.found_inf = torch.ones((), device=device)
        train([optimizer], 2)
        assert all(map(same_bits, params_of(optimizer), changed))
        del optimizer.found_inf
    still_step(optimizer)
    assert_refreshed(optimizer, before, changed)


# Masters that are written or replaced by hand, and what else changes before the step.


def fill_masters(optimizer: cases.Optimizer) -> None:
    for master in optimizer.master_params(params_of(optimizer)[:1]):
        master.fill_(3.0)


def replace_masters(optimizer: cases.Optimizer) -> None:
    state = optimizer.state[params_of(optimizer)[0]]
    state["master_param"] = torch.full_like(state["master_param"], 3.0)


def write_as_of_a_loop(optimizer: cases.Optimizer) -> None:
    """Writes the parameter, too."""
    param = params_of(optimizer)[0]
    param.detach().mul_(2.0)


def give_other_memory(optimizer: cases.Optimizer) -> None:
    param = params_of(optimizer)[0]
    param.data = param.detach() * 2.0


def give_other_strides(optimizer: cases.Optimizer) -> None:
    param = params_of(optimizer)[0]
    param.data = param.detach().transpose(2, 3)


def reload(optimizer: cases.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


THEN = [write_as_of_a_loop, give_other_memory, give_other_strides, reload, copy.deepcopy, None]


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("write", [fill_masters, replace_masters])
@HALVES
def test_a_step_goes_on_from_a_master_that_is_written_and_from_no_other(dtype, write, then, device):
    """Another tensor, and one whose parameter is written, count where they round to it."""
    values = torch.arange(8.0, device=device).to(dtype).view(1, 2, 2, 2)
    optimizer = ours("SGD")([Parameter(placed(values, channels_last))], lr=0.5)
    step_by_zeros(optimizer)
    for _ in range(2):
        write(optimizer)
        optimizer = (then and then(optimizer)) or optimizer
        (param,) = params_of(optimizer)
        wanted = param.detach().clone()
        if write is fill_masters and then is None:
            wanted.fill_(3.0)
        step_by_zeros(optimizer)
        assert torch.equal(param.detach(), wanted)
        assert torch.equal(optimizer.state[param]["master_param"], wanted.float())


def step_by_zeros(optimizer: cases.Optimizer) -> None:
    for param in params_of(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()


# Split masters.


def test_split_masters_are_copies_and_need_no_refresh(device):
    optimizer = trained(ours("AdamW")(make_params(BF16, device, [(37,)]), master_weights="split"))
    before = snapshot(params_of(optimizer))
    optimizer.master_params()[0].zero_()
    optimizer.refresh_masters()
    assert all(map(same_bits, params_of(optimizer), before))
    assert optimizer.master_params()[0].any()
