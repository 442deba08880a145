"""A user changes tensors, groups or states between steps: the next step uses what is there."""

from __future__ import annotations

import copy
import gc
import math
import random
import re
import threading
import weakref
from collections.abc import Callable
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.nn import Parameter

import amp_ext

Optimizer = torch.optim.Optimizer
SHAPES = [(6, 6), (3,), (), (2, 3, 4, 5)]


def assert_steps_right(optimizer: Optimizer, found_inf: float = 0.0) -> None:
    """Takes a step, and asserts that it is the one of a new optimizer.

    That one has dense copies of all parameters, gradients and states.
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
    for each in (fresh, optimizer):
        each.found_inf = torch.full((), found_inf, device=params_of(fresh)[0].device)
        each.step()
        del each.found_inf
    cases.assert_same_bits(optimizer, fresh)


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


CHANGES = [
    lambda optimizer, chance: give_grads(optimizer),
    lambda optimizer, chance: optimizer.zero_grad(set_to_none=True),
    lambda optimizer, chance: chance.choice(optimizer.param_groups)["params"].reverse(),
    lambda optimizer, chance: optimizer.param_groups.reverse(),
    lambda optimizer, chance: optimizer.state.clear(),
    change_grads_of_other_layouts,
    change_grads_of_other_dtypes,
    change_other_strides,
    change_data_of_states,
]


@pytest.mark.parametrize("seed", range(8))
@each_class
def test_any_sequence_of_changes_is_seen(name, options, seed: int) -> None:
    chance = random.Random(seed)
    optimizer = trained(name, options, dtype=chance.choice([F32, F16, BF16]))
    optimizer.add_param_group({"params": make_params(F32, shapes=SHAPES)})
    give_grads(optimizer)
    for _ in range(20):
        for change in chance.choices(CHANGES, k=chance.randrange(4)):
            change(optimizer, chance)
        assert_steps_right(optimizer, chance.choice([0.0, 0.0, 0.0, 1.0]))


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    with cases.group_of_one():
        yield init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("shard", [distribute_module, lambda it, mesh: fully_shard(it, mesh=mesh)])
@each_class
def test_states_of_dtensors_that_are_converted_or_replaced_are_stepped(name, options, shard, mesh):
    plain = torch.nn.Linear(4, 3)
    model = shard(copy.deepcopy(plain), mesh)
    optimizers = [ours(name)(one.parameters(), **options) for one in (model, plain)]
    for dtype in (F32, F64, BF16, F16):
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            one.to(dtype)
        for _ in range(2):
            give_grads(list(plain.parameters()))
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                param.grad = distribute_tensor(other.grad, mesh, param.placements)
            for optimizer in optimizers:
                optimizer.step()
                for state in optimizer.state.values():
                    state.update({key: value * 0.5 for key, value in state.items() if "exp" in key})
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(param.full_tensor().detach(), other.detach())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_parameter_of_another_shape_is_refused_with_its_old_states(dtype, device) -> None:
    param = Parameter(torch.ones(4, 6, dtype=dtype, device=device))
    optimizer = ours("AdamW")([param], lr=0.1)
    cases.train([optimizer])
    name = "exp_avg" if dtype == F32 else "master_param"
    for shape in ((6, 4), (24,), (2, 2, 6)):
        param.grad = None
        param.data = param.data.view(shape)
        give_grads(optimizer)
        before = param.detach().clone()
        sizes = rf"of sizes \[{', '.join(map(str, shape))}\], got \[4, 6\]"
        with pytest.raises(RuntimeError, match=rf"{name} of group 0, param 0 must be {sizes}"):
            optimizer.step()
        assert same_bits(param.detach(), before)
    optimizer.state.clear()
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].shape == (2, 2, 6)


MOMENTUM = "momentum_buffer"


@pytest.mark.parametrize(
    ("drop", "loads"),
    [
        (lambda state: state.pop(MOMENTUM), False),
        (lambda state: state.pop(MOMENTUM), True),
        (lambda state: state.update({MOMENTUM: None}), False),
    ],
    ids=["popped", "missing in a file", "None"],
)
def test_the_first_step_without_a_momentum_buffer_is_not_dampened(drop, loads, device) -> None:
    mine = ours("SGD")(make_params(F64, device), momentum=0.9, dampening=0.5, lr=0.1)
    twin = torch.optim.SGD(cases.twins(mine), momentum=0.9, dampening=0.5, lr=0.1)
    for steps in (2, 3, 1):
        cases.train([mine, twin], steps)
        for param, other in zip(params_of(mine), params_of(twin), strict=True):
            torch.testing.assert_close(param, other, rtol=1e-12, atol=1e-12)
        for optimizer in (mine, twin):
            for state in optimizer.state.values():
                drop(state)
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("which", ["param", "grad", "momentum_buffer", "master_param"])
def test_a_tensor_without_its_storage_is_refused(which: str) -> None:
    params = [Parameter(torch.ones(4, dtype=BF16)) for _ in range(2)]
    optimizer = amp_ext.optim.SGD(params, lr=0.1, momentum=0.9)
    cases.train([optimizer])
    tensors = {"param": params[1], "grad": params[1].grad, **optimizer.state[params[1]]}
    first = params[0].detach().clone()
    tensors[which].untyped_storage().resize_(0)
    words = f"{which} of group 0, param 1 must have a storage that holds its elements, sizes .4."
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert torch.equal(params[0], first)


# Memory.


@each_class
def test_what_is_exchanged_or_loaded_over_is_not_stepped_and_freed(name, options, device) -> None:
    optimizer, other = (trained(name, options, device, BF16) for _ in range(2))
    params = optimizer.param_groups[0]["params"]
    old, params[1] = params[1], make_params(BF16, device, [SHAPES[1]])[0]
    give_grads([params[1], old])
    assert_steps_right(optimizer)
    states = [*optimizer.state.pop(old).values()]
    states += [value for state in optimizer.state.values() for value in state.values()]
    kept, alive = [value.clone() for value in states], [weakref.ref(value) for value in states]
    before = cases.bits_of(other)
    optimizer.load_state_dict(other.state_dict())
    give_grads(optimizer)
    assert_steps_right(optimizer)
    assert all(map(same_bits, states, kept))
    cases.assert_same_bits(other, before)
    alive.append(weakref.ref(old))
    states.clear()
    del old
    assert [reference() for reference in alive] == [None] * len(alive)


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


USES = {
    "step": lambda optimizer: optimizer.step(),
    "our-scaler": under_our_scaler,
    "skipped-step": partial(under_our_scaler, bad=True),
    "unscale-step": partial(under_our_scaler, unscale=True),
    "look-without-step": lambda optimizer: optimizer.scan_gradients(),
    "refused-step": refused_step,
}


@pytest.mark.parametrize("use", rows(USES))
@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 1.0, "write_back_grads": True}])
def test_nothing_keeps_gradients_or_a_deleted_optimizer(clipping, use, device) -> None:
    """Freed at once: a cycle would keep gigabytes until Python happens to look for it."""
    optimizer = trained("AdamW", clipping, device, BF16, shapes=[(6, 6), (5,)])
    first, second = params_of(optimizer)
    second.grad = None
    gc.disable()
    try:
        for layout in (misaligned, transposed):
            first.grad = placed(torch.randn(6, 6, device=device).bfloat16(), layout)
            second.grad = torch.ones_like(second)
            alive = [weakref.ref(param.grad) for param in (first, second)]
            use(optimizer)
            optimizer.zero_grad(set_to_none=True)
            assert [reference() for reference in alive] == [None, None]
        alive = [weakref.ref(each) for each in (optimizer, first, second)]
        alive += [weakref.ref(v) for state in optimizer.state.values() for v in state.values()]
        del optimizer, first, second
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


# Threads.


def called_in_another_thread(function: Callable[[], Any]) -> list[BaseException]:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return errors


class CallingEps(Tensor):
    """An option that calls a function when a step reads it."""

    function: Callable[[], Any]

    def __float__(self) -> float:
        self.function()
        return 1e-8


@pytest.mark.parametrize("operation", ["step", "scan_gradients"])
def test_a_second_thread_is_refused_before_it_writes(operation: str) -> None:
    optimizer = trained("AdamW", {})
    twin = copy.deepcopy(optimizer)
    give_grads(optimizer, twin)
    errors: list[BaseException] = []
    call = getattr(optimizer, operation)
    eps = torch.full((), 1e-8).as_subclass(CallingEps)
    eps.function = lambda: errors.extend(called_in_another_thread(call))
    optimizer.param_groups[0]["eps"] = eps
    twin.step()
    optimizer.step()
    optimizer.param_groups[0]["eps"] = 1e-8
    words = rf"^AdamW\.{operation}: another thread is inside a call of this optimizer"
    assert [type(error) for error in errors] == [RuntimeError]
    assert re.match(words, str(errors[0]))
    cases.assert_same_bits(optimizer, twin)
    assert called_in_another_thread(optimizer.step) == []
