"""Tests of tensors that are swapped, converted, cloned, shared or freed between steps."""

from __future__ import annotations

import copy
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32, F64
from harness.optimizer_cases import each_class, give_grads, make_params, params_of
from harness.reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.nn import Parameter

import amp_ext


def optimizer_of(name: str, options: dict[str, Any], dtype: torch.dtype = F32, **more: Any) -> Any:
    """Returns an optimizer that has taken a step, with new gradients."""
    optimizer = cases.ours(name)(make_params(dtype), **options, **more)
    cases.train([optimizer])
    give_grads(optimizer)
    return optimizer


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shard", [distribute_module, lambda it, mesh: fully_shard(it, mesh=mesh)])
@each_class
def test_states_of_dtensors_that_are_converted_or_replaced_are_stepped(
    name, options, shard, mesh
) -> None:
    plain = torch.nn.Linear(4, 3)
    model = shard(copy.deepcopy(plain), mesh)
    optimizers = [cases.ours(name)(one.parameters(), **options) for one in (model, plain)]
    for dtype in (F32, F64, BF16, F16):
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            one.to(dtype)
        for _ in range(2):
            give_grads(list(plain.parameters()))
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert param.dtype == dtype
                param.grad = distribute_tensor(other.grad, mesh, param.placements)
            for optimizer in optimizers:
                optimizer.step()
                for state in optimizer.state.values():
                    state.update({key: value * 0.5 for key, value in state.items() if "exp" in key})
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(param.full_tensor().detach(), other.detach())


# States that are replaced by hand.


def replace_states(optimizer: Any, name: str | None = None) -> None:
    """Puts copies in the place of all states, or of those of a name."""
    for state in optimizer.state.values():
        for key in [name] if name else list(state):
            state[key] = state[key].clone()


@each_class
def test_a_state_that_is_replaced_is_freed(name, options, device) -> None:
    optimizer = cases.ours(name)(make_params(BF16, device), **options)
    cases.train([optimizer])
    replaced = [value for state in optimizer.state.values() for value in state.values()]
    alive = [weakref.ref(value) for value in replaced]
    replace_states(optimizer)
    replaced.clear()
    assert [reference() for reference in alive] == [None] * len(alive)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_parameter_of_another_shape_is_refused_with_its_old_states(dtype, device) -> None:
    param = Parameter(torch.ones(4, 6, dtype=dtype, device=device))
    optimizer = cases.ours("AdamW")([param], lr=0.1)
    for shape in ((4, 6), (6, 4), (24,), (2, 2, 6)):
        param.grad = None
        param.data = param.data.view(shape)
        give_grads(optimizer)
        before = param.detach().clone()
        if shape == (4, 6):
            optimizer.step()
            continue
        name = "exp_avg" if dtype == F32 else "master_param"
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
    mine = cases.ours("SGD")(make_params(F64, device), momentum=0.9, dampening=0.5, lr=0.1)
    twin = torch.optim.SGD(cases.twins(mine), momentum=0.9, dampening=0.5, lr=0.1)
    for steps in (2, 3, 1):
        for _ in range(steps):
            give_grads(mine, twin)
            mine.step()
            twin.step()
        for param, other in zip(params_of(mine), params_of(twin), strict=True):
            torch.testing.assert_close(param, other, rtol=1e-12, atol=1e-12)
        for optimizer in (mine, twin):
            for state in optimizer.state.values():
                drop(state)
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())


def test_the_first_step_with_momentum_is_not_dampened_whatever_has_been_counted() -> None:
    param = Parameter(torch.zeros(3))
    optimizer = cases.ours("SGD")([param], lr=1.0, dampening=0.5, state_dtype=BF16)
    for momentum, wanted in ((0.0, -1.0), (0.0, -2.0), (0.5, -3.0), (0.5, -4.0), (0.5, -5.0)):
        optimizer.param_groups[0]["momentum"] = momentum
        param.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(param.detach(), torch.full((3,), wanted))


@pytest.mark.parametrize("scaled", [False, True], ids=["step", "scaler"])
@pytest.mark.parametrize("which", ["param", "grad", "momentum_buffer", "master_param"])
def test_a_tensor_without_its_storage_is_refused(which: str, scaled: bool) -> None:
    params = [Parameter(torch.ones(4, dtype=BF16)) for _ in range(2)]
    optimizer = amp_ext.optim.SGD(params, lr=0.1, momentum=0.9)
    cases.train([optimizer])
    param = params[1]
    tensors = {"param": param, "grad": param.grad, **optimizer.state[param]}
    first = params[0].detach().clone()
    tensors[which].untyped_storage().resize_(0)
    scaler = amp_ext.GradScaler("cpu", enabled=scaled)
    scaler.scale(torch.ones(1))
    words = f"{which} of group 0, param 1 must have a storage that holds its elements, sizes .4."
    with pytest.raises(RuntimeError, match=words):
        scaler.step(optimizer)
    assert torch.equal(params[0], first)


def test_operations_refuse_a_gradient_without_its_storage() -> None:
    grad = torch.ones(4)
    grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"grads\[0\] must have a storage that holds"):
        amp_ext.ops.unscale_([grad], torch.ones(()), torch.zeros(()))


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


class CallingEps(torch.Tensor):
    """An option that calls a function when a step reads it."""

    function: Callable[[], Any]

    def __float__(self) -> float:
        self.function()
        return 1e-8


def calling(function: Callable[[], Any]) -> CallingEps:
    eps = torch.full((), 1e-8).as_subclass(CallingEps)
    eps.function = function
    return eps


@pytest.mark.parametrize("operation", ["step", "scan_gradients"])
def test_a_second_thread_is_refused_before_it_writes(operation: str) -> None:
    optimizer = optimizer_of("AdamW", {})
    twin = copy.deepcopy(optimizer)
    give_grads(optimizer, twin)
    errors: list[BaseException] = []
    arguments = () if operation == "step" else (torch.zeros(()),)
    call = getattr(optimizer, operation)
    eps = calling(lambda: errors.extend(called_in_another_thread(lambda: call(*arguments))))
    optimizer.param_groups[0]["eps"] = eps
    twin.step()
    optimizer.step()
    optimizer.param_groups[0]["eps"] = 1e-8
    words = rf"^AdamW\.{operation}: another thread is inside a call of this optimizer"
    assert [type(error) for error in errors] == [RuntimeError]
    assert re.match(words, str(errors[0]))
    cases.assert_same_bits(optimizer, twin)
    assert called_in_another_thread(optimizer.step) == []
