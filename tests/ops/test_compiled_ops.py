"""Tests of the operations inside torch.compile, and of steps around compiled code."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness.edge_shapes import F16, F32, F64
from harness.engine_results import CLIPPED
from harness.list_operations import (
    BUFFERS,
    FEW_STEPS,
    IN_FLOAT,
    OPERATIONS,
    STEP,
    WITH_MASTERS,
    build,
    on_device,
    run,
)
from harness.reference import same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import amp_ext
from amp_ext import compiled_ops, ops

SHAPES = [(3, 5), (), (17,)]


def tensors(dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def number(value: float, dtype: torch.dtype = F32) -> Tensor:
    return torch.full((), value, dtype=dtype)


def call_of_step(operation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a right call of the step of an optimizer: its positional lists, and what it needs."""
    lists = build(operation, {}, SHAPES, IN_FLOAT, "cpu")
    numbers = OPERATIONS[operation].hyperparameters
    parameters = inspect.signature(getattr(ops, operation)).parameters.values()
    args = tuple(lists[each.name] for each in parameters if each.kind is not each.KEYWORD_ONLY)
    needs = {each.name for each in parameters if each.default is each.empty}
    return args, {name: numbers[name] for name in numbers if name in needs}


# A right call of each operation: all that has no default.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "check_finite_": ((tensors(), number(0.0)), {}),
    "count_nonfinite": ((tensors(),), {}),
    "clip_grads_": ((tensors(), number(4.0)), {"max_norm": 1.0}),
    "unscale_": ((tensors(), number(0.5), number(0.0)), {}),
    "update_scale_": (
        (number(8.0), number(0, torch.int32), [number(0.0)]),
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1},
    ),
    **{operation: call_of_step(operation) for operation in BUFFERS},
    "refresh_masters_": ((tensors(F16), tensors()), {}),
    "average_params_": ((tensors(), tensors(), number(0.5, F64), number(2.0, F64)), {}),
}
# What else they may be given.
OPTIONS: dict[str, dict[str, Any]] = {
    "check_finite_": {
        "grad_scale": number(2.0),
        "sum_of_squares": number(0.0, F64),
        "first_nonfinite": number(9, torch.int64),
    },
    "unscale_": {"first_nonfinite": number(9, torch.int64)},
    "update_scale_": {"hysteresis": 2, "hysteresis_tracker": number(1, torch.int32)},
}


class Recorder(TorchDispatchMode):
    """Remembers the operator of ours that is called, and with what."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func.namespace == "amp_ext":
            self.called = func, copy.deepcopy(args)
        return func(*args, **(kwargs or {}))


def assert_declares_what_it_does(call: Callable[[], Any]) -> None:
    torch._dynamo.reset()  # is imported, and knows the right `is_compiling`
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        call()
    operator, args = recorder.called
    torch.library.opcheck(getattr(compiled_ops, operator._opname), args)


def test_there_is_no_operator_of_another_name():
    with pytest.raises(AttributeError, match="no attribute 'adam_'"):
        _ = compiled_ops.adam_


@pytest.mark.parametrize("name", [name for name in CALLS if name not in BUFFERS])
def test_what_an_operator_declares_is_what_it_does(name: str) -> None:
    args, options = copy.deepcopy(CALLS[name])
    options |= OPTIONS.get(name, {})
    assert_declares_what_it_does(lambda: getattr(ops, name)(*args, **options))


@pytest.mark.parametrize("dtypes", [IN_FLOAT, WITH_MASTERS], ids=["fp32", "bf16-master"])
@pytest.mark.parametrize(STEP, FEW_STEPS)
def test_what_the_operator_of_a_step_declares_is_what_it_does(operation, options, dtypes) -> None:
    lists = build(operation, options, SHAPES, dtypes, "cpu")
    given = {"found_inf": 0.0, "lr": number(0.1), **CLIPPED}
    given |= on_device(given, "cpu")
    assert_declares_what_it_does(lambda: run(operation, lists, **options, **given))


@pytest.mark.parametrize("name", CALLS)
def test_compiled_and_plain_calls_give_the_same_bits(name: str, device) -> None:
    operation = getattr(ops, name)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args, **options: operation(*args, **options), backend="aot_eager", fullgraph=True
    )
    found = []
    for call in (operation, compiled):
        args, options = tree_map(
            lambda each: each.to(device, copy=True) if isinstance(each, Tensor) else each,
            CALLS[name],
        )
        if name in BUFFERS:
            options["lr"] = number(0.1).to(device)  # which may be a tensor, too
        result = call(*args, **options)
        found.append([t for t in tree_leaves([args, options, result]) if isinstance(t, Tensor)])
    assert len(found[0]) > 0
    assert all(map(same_bits, *found))


def trained(compiled: str, make_optimizer: Any) -> list[Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    scaler = amp_ext.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    batches = torch.randn(6, 5, 4)
    batches[2] *= float("inf")
    forward = torch.compile(model, backend="aot_eager") if compiled == "model" else model
    if compiled == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(forward(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    run = torch.compile(step, backend="aot_eager") if compiled == "step" else step
    for batch in batches:
        run(batch)
    assert scaler.stats(wait=True).skips == 1
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("compiled", ["model", "step", "optimizer"])
def test_training_around_compiled_code_is_training(compiled: str, recwarn) -> None:
    make = partial(amp_ext.optim.AdamW, max_grad_norm=1.0)
    for a, b in zip(trained(compiled, make), trained("", make), strict=True):
        torch.testing.assert_close(a, b)
    warnings = [str(each.message) for each in recwarn]
    assert not [text for text in warnings if "amp_ext" in text or "grad_scaler" in text]
