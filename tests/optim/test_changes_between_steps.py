"""Tests of changes between steps: each counts, and nothing old is kept."""

from __future__ import annotations

import gc
import math
import random
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import (
    BF16,
    F16,
    F32,
    F64,
    channels_last,
    misaligned,
    placed,
    strided,
    transposed,
)
from harness.optimizer_cases import each_class, give_grads, make_params, ours, params_of
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

import amp_ext

Optimizer = torch.optim.Optimizer
SHAPES = [(6, 6), (3,), (), (2, 3, 4, 5)]


def stepped_anew(optimizer: Optimizer, found_inf: float = 0.0) -> list[dict[str, Tensor]]:
    """Returns what the next step must lead to: that of a new optimizer which remembers nothing.

    It has dense copies of all parameters, gradients and states.
    """
    groups = []
    for group in optimizer.param_groups:
        params = cases.twins(group["params"])
        for param, original in zip(params, group["params"], strict=True):
            param.grad_dtype = None
            if original.grad is not None:
                param.grad = original.grad.detach().clone(memory_format=torch.contiguous_format)
        groups.append(group | {"params": params})
    fresh = type(optimizer)(groups)
    for twin, original in zip(params_of(fresh), params_of(optimizer), strict=True):
        if original in optimizer.state:
            fresh.state[twin] = {
                name: value.clone(memory_format=torch.contiguous_format)
                for name, value in optimizer.state[original].items()
            }
    fresh.found_inf = torch.full((), found_inf, device=params_of(fresh)[0].device)
    fresh.step()
    return cases.bits_of(fresh)


def assert_steps_right(optimizer: Optimizer, found_inf: float = 0.0) -> None:
    """Takes a step and asserts that it is the one of an optimizer that remembers nothing."""
    expected = stepped_anew(optimizer, found_inf)
    if found_inf:
        optimizer.found_inf = torch.full((), found_inf)
    optimizer.step()
    vars(optimizer).pop("found_inf", None)
    cases.assert_same_bits(optimizer, expected)


def trained(name: str, options: dict[str, Any], device="cpu", dtype=F32, shapes=SHAPES) -> Any:
    """Returns an optimizer that has taken steps, with new gradients."""
    optimizer = ours(name)(make_params(dtype, device, shapes), **options)
    cases.train([optimizer], 2)
    give_grads(optimizer)
    return optimizer


# Any sequence of changes. Each takes the optimizer and a source of chance. The state machine draws
# parameters that are replaced or written, gradients and states in place, groups, options and files.


def change_grads_of_other_layouts(optimizer, chance):
    for param in params_of(optimizer):
        param.grad = grad = torch.randn_like(param)
        if param.dim() >= 2:
            others = [placed(grad, layout) for layout in (transposed, strided, misaligned)]
            others += [grad[:1].expand_as(grad), grad.transpose(0, 1).contiguous().transpose(0, 1)]
            param.grad = chance.choice(others)


def change_grads_of_other_dtypes(optimizer, chance):
    for param in params_of(optimizer):
        param.grad_dtype = None
        param.grad = torch.randn_like(param).to(chance.choice([F32, F16, BF16, F64]))


def change_other_strides(optimizer, chance):
    for param in params_of(optimizer):
        if param.dim() == 2:
            param.data = param.data.t()  # the same memory
        elif param.dim() == 4:
            param.data = placed(param.data, chance.choice([channels_last, strided, transposed]))


def change_data_of_states(optimizer, chance):
    for state in optimizer.state.values():
        for name in state.keys() - {"step"}:
            state[name].data = state[name].data * (1 if name == "master_param" else 0.25)


CHANGES = {
    "new_grads": lambda optimizer, chance: give_grads(optimizer),
    "all_grads_gone": lambda optimizer, chance: optimizer.zero_grad(set_to_none=True),
    "parameters_turned_round": lambda optimizer, chance: chance.choice(optimizer.param_groups)[
        "params"
    ].reverse(),
    "groups_turned_round": lambda optimizer, chance: optimizer.param_groups.reverse(),
    "state_cleared": lambda optimizer, chance: optimizer.state.clear(),
    **{name: value for name, value in globals().items() if name.startswith("change_")},
}


@pytest.mark.parametrize("seed", range(8))
@each_class
def test_any_sequence_of_changes_is_seen(name, options, seed: int) -> None:
    chance = random.Random(seed)
    optimizer = trained(name, options, dtype=chance.choice([F32, F16, BF16]))
    optimizer.add_param_group({"params": make_params(F32, shapes=SHAPES)})
    give_grads(optimizer)
    for _ in range(20):
        for change in chance.choices(list(CHANGES.values()), k=chance.randrange(4)):
            change(optimizer, chance)
        assert_steps_right(optimizer, chance.choice([0.0, 0.0, 0.0, 1.0]))


# Some of them in words, and on every device.


@each_class
def test_what_is_exchanged_or_loaded_over_is_not_stepped_and_freed(name, options, device) -> None:
    optimizer, other = (trained(name, options, device, BF16) for _ in range(2))
    params = optimizer.param_groups[0]["params"]
    old, params[1] = params[1], make_params(BF16, device, [SHAPES[1]])[0]
    give_grads([params[1], old])
    assert_steps_right(optimizer)
    assert params[1] in optimizer.state
    states = [*optimizer.state.pop(old).values()]
    file = other.state_dict()
    states += [value for state in optimizer.state.values() for value in state.values()]
    kept, alive = [value.clone() for value in states], [weakref.ref(value) for value in states]
    before = cases.bits_of(other)
    optimizer.load_state_dict(file)
    give_grads(optimizer)
    assert_steps_right(optimizer)
    assert all(map(same_bits, states, kept))
    cases.assert_same_bits(other, before)
    alive.append(weakref.ref(old))
    states.clear()
    del old
    assert [reference() for reference in alive] == [None] * len(alive)


# Memory.


def under_our_scaler(optimizer: Optimizer, *, bad: bool = False, unscale: bool = False) -> None:
    device = params_of(optimizer)[0].device
    scaler = amp_ext.GradScaler(device.type, 4.0)
    scaler.scale(torch.ones((), device=device))
    if bad:
        params_of(optimizer)[0].grad.fill_(math.inf)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def refused_step(optimizer: Optimizer) -> None:
    param = params_of(optimizer)[1]
    param.grad = param.grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def scan_without_step(optimizer: Optimizer) -> None:
    optimizer.scan_gradients(torch.zeros((), device=params_of(optimizer)[0].device))


each_use = pytest.mark.parametrize(
    "use",
    rows(
        {
            "step": lambda optimizer: optimizer.step(),
            "our-scaler": under_our_scaler,
            "skipped-step": partial(under_our_scaler, bad=True),
            "unscale-step": partial(under_our_scaler, unscale=True),
            "look-without-step": scan_without_step,
            "refused-step": refused_step,
        }
    ),
)


@each_use
@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 1.0, "write_back_grads": True}])
def test_the_memory_of_gradients_is_not_kept(clipping, use, device) -> None:
    optimizer = trained("AdamW", clipping, device, shapes=[(6, 6), (5,)])
    first, second = params_of(optimizer)
    second.grad = None
    for layout in (misaligned, transposed):
        first.grad = placed(torch.randn(6, 6, device=device), layout)
        second.grad = torch.randn(5, device=device)
        alive = [weakref.ref(param.grad) for param in (first, second)]
        use(optimizer)
        optimizer.zero_grad(set_to_none=True)
        assert [reference() for reference in alive] == [None, None]


@each_use
@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 1.0}])
def test_a_deleted_optimizer_frees_parameters_and_states(clipping, use, device) -> None:
    """At once: a cycle would keep gigabytes until Python happens to look for it."""
    for name in ("AdamW", "SGD"):
        optimizer = trained(name, clipping, device, BF16)
        use(optimizer)
        alive = [weakref.ref(optimizer)]
        alive += [weakref.ref(param) for param in params_of(optimizer)]
        alive += [weakref.ref(v) for state in optimizer.state.values() for v in state.values()]
        gc.disable()
        try:
            del optimizer
            assert [reference() for reference in alive] == [None] * len(alive)
        finally:
            gc.enable()
