"""Float32 masters of 16-bit parameters: what they keep, and what happens when weights change."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32
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

from amp_ext import ops


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


# The operation.


@pytest.mark.parametrize("masters", [[F32], [F32, F16]], ids=["too-few", "master-dtype"])
def test_the_operation_names_bad_input(masters):
    masters = [torch.zeros(5).to(dtype) for dtype in masters]
    with pytest.raises(RuntimeError, match=r"^refresh_masters_: (master_params|params)"):
        ops.refresh_masters_([torch.ones(5).to(F16)] * 2, masters)
    assert all(torch.count_nonzero(master) == 0 for master in masters)


# Masters that are written or replaced by hand, and what else changes before the step.


def fill_masters(optimizer: cases.Optimizer) -> None:
    for master in optimizer.master_params(params_of(optimizer)[:1]):
        master.fill_(3.0)


def replace_masters(optimizer: cases.Optimizer) -> None:
    state = optimizer.state[params_of(optimizer)[0]]
    state["master_param"] = torch.full_like(state["master_param"], 3.0)


def stepped_once(dtype: torch.dtype, device: torch.device) -> tuple[Parameter, cases.Optimizer]:
    values = torch.ones(1, 2, 2, 2, dtype=dtype, device=device)
    param = Parameter(values.contiguous(memory_format=torch.channels_last))
    optimizer = ours("SGD")([param], lr=0.5, momentum=0.5)
    step_by_zeros(optimizer)
    assert optimizer.state[param]["master_param"].stride() == param.stride()
    return param, optimizer


def step_by_zeros(optimizer: cases.Optimizer) -> None:
    for param in params_of(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()


@pytest.mark.parametrize("write", [fill_masters, replace_masters])
@HALVES
def test_steps_go_on_from_a_master_that_is_written_but_not_from_another_one(dtype, write, device):
    """Another tensor counts where it rounds to the parameter, as one from a file."""
    param, optimizer = stepped_once(dtype, device)
    for _ in range(2):
        write(optimizer)
        step_by_zeros(optimizer)
        wanted = 3.0 if write is fill_masters else 1.0
        assert torch.equal(param.detach(), torch.full_like(param, wanted))
        assert torch.equal(optimizer.state[param]["master_param"], param.detach().float())


@pytest.mark.parametrize("write", [fill_masters, replace_masters])
@pytest.mark.parametrize("changes", ["numbers", "memory", "strides"])
def test_a_parameter_that_is_written_too_goes_before_its_master(changes, write, device):
    param = Parameter(torch.arange(6.0, dtype=BF16, device=device).view(2, 3))
    optimizer = ours("SGD")([param], lr=0.5)
    step_by_zeros(optimizer)
    write(optimizer)
    if changes == "numbers":
        param.detach().mul_(2.0)
    elif changes == "memory":
        param.data = param.detach() * 2.0
    else:
        param.data = param.detach().t().contiguous().t()
    wanted = param.detach().clone()
    step_by_zeros(optimizer)
    assert torch.equal(param.detach(), wanted)


@pytest.mark.parametrize("write", [fill_masters, replace_masters])
def test_masters_of_a_file_or_a_copy_do_not_move_their_parameters(write, device):
    param, optimizer = stepped_once(F16, device)
    write(optimizer)
    copied = copy.deepcopy(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    for one in (copied, optimizer):
        step_by_zeros(one)
        (param,) = params_of(one)
        assert torch.equal(param.detach(), torch.ones_like(param))


# Split masters.


@HALVES
def test_every_number_that_is_written_is_followed(device, dtype):
    """Whatever is below it, unless that is half a unit in the last place."""
    values = torch.arange(2**16).to(torch.int16).view(dtype)
    values = values[values.isfinite()].to(device)
    for start in (1.2, -0.7, 1.0 + 2**-12, 3e-5):
        param = Parameter(torch.full(values.shape, start, dtype=dtype, device=device))
        optimizer = ours("SGD")([param], lr=0.0, master_weights="split")
        optimizer.init_state()
        key = next(key for key in optimizer.state[param] if key.startswith("master_low"))
        unit = 2.0**-7 if dtype == BF16 else 2.0**-10
        fractions = torch.linspace(-0.499, 0.499, len(values), device=device)
        near = param.detach().float() * (1 + unit * 0.65 * fractions)
        optimizer.state[param][key].copy_(ops.split_fp32(param.detach(), near, 16))
        with torch.no_grad():
            param.copy_(values)
        step_by_zeros(optimizer)
        assert torch.equal(param, values)


def test_split_masters_are_copies_and_need_no_refresh(device):
    optimizer = trained(ours("AdamW")(make_params(BF16, device, [(37,)]), master_weights="split"))
    before = snapshot(params_of(optimizer))
    optimizer.master_params()[0].zero_()
    optimizer.refresh_masters()
    assert all(map(same_bits, params_of(optimizer), before))
    assert optimizer.master_params()[0].any()
