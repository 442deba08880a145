"""Tests of the operations inside torch.compile, and of steps around compiled code."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from harness.list_operations import BUFFERS, OPERATIONS, SQUARES
from harness.reference import same_bits
from torch import Tensor

import amp_ext
from amp_ext import compiled_ops, ops

FP16 = torch.float16


def tensors(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3, 5), (), (17,)]
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def number(value: float, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def counters(device: str = "cpu") -> list[Tensor]:
    return [number(2.0, device=device) for _ in range(3)]


def adam_arguments(device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    masters = [p.float() for p in tensors(0, dtype, device)] if dtype == FP16 else []
    squares = [t.square() for t in tensors(3, device=device)]
    return (
        *(tensors(0, dtype, device), tensors(1, dtype, device), tensors(2, device=device)),
        *(squares, counters(device), True, [s + 1 for s in squares], True, masters, bool(masters)),
        *(0.1, None, 0.9, 0.99, 1e-8, 0.01, False, True),
        *(number(2.0, device=device), number(0.0, device=device), 0.5, 1.0, None),
        *(number(0.0, device=device), False, False, 0.0),
    )


def sgd_arguments(device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    masters = [p.float() for p in tensors(0, dtype, device)] if dtype == FP16 else []
    return (
        *(tensors(0, dtype, device), tensors(1, dtype, device), tensors(2, device=device), True),
        *(counters(device), True, masters, bool(masters), 0.0, number(0.1, device=device)),
        *(0.9, 0.1, 0.01, False, False, False, None, None, None, None, None, None, True, False),
    )


ARGUMENTS: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "check_finite": lambda device: (
        tensors(0, device=device),
        *(number(0.0, device=device), number(2.0, device=device)),
        *(number(0.0, torch.float64, device), number(9, torch.int64, device)),
    ),
    "count_nonfinite": lambda device: (tensors(0, device=device),),
    "clip_grads": lambda device: (tensors(0, device=device), number(4.0, device=device), 1.0),
    "unscale": lambda device: (
        tensors(0, device=device),
        *(number(0.5, device=device), number(0.0, device=device)),
        number(9, torch.int64, device),
    ),
    "update_scale": lambda device: (
        *(number(8.0, device=device), number(0, torch.int32, device)),
        *([number(1.0, device=device)], 2.0, 0.5, 2000, 0.0, 1e9, 2),
        *(number(1, torch.int32, device), True),
    ),
    "adam": lambda device: adam_arguments(device, torch.float32),
    "adam-fp16": lambda device: adam_arguments(device, FP16),
    "sgd": lambda device: sgd_arguments(device, torch.float32),
    "sgd-fp16": lambda device: sgd_arguments(device, FP16),
    "average_weights": lambda device: (
        *(tensors(0, device=device), tensors(1, device=device)),
        *(torch.tensor([2, 1], device=device), [], False, number(1.0, device=device)),
        *(None, 0.9, 1, False),
    ),
    "refresh_masters": lambda device: (tensors(0, FP16, device), tensors(1, device=device)),
}


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_an_operator_declares_is_what_it_does(name: str) -> None:
    operator = getattr(compiled_ops, name.partition("-")[0])
    torch.library.opcheck(operator, ARGUMENTS[name]("cpu"))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_compiled_and_plain_calls_give_the_same_bits(name: str, device) -> None:
    operator = getattr(torch.ops.amp_ext, name.partition("-")[0])
    plain, compiled = ARGUMENTS[name](device), ARGUMENTS[name](device)
    result = operator(*plain)
    torch._dynamo.reset()
    in_graph = torch.compile(lambda *values: operator(*values), backend="aot_eager", fullgraph=True)
    compiled_result = in_graph(*compiled)
    got, wanted = tensors_in([compiled, compiled_result]), tensors_in([plain, result])
    assert len(got) == len(wanted) > 0
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


def call_of_step(operation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a right call of the step of an optimizer: its positional lists, and what it needs."""
    lists, needed = [], {}
    numbers = OPERATIONS[operation].hyperparameters
    for index, (name, each) in enumerate(
        inspect.signature(getattr(ops, operation)).parameters.items()
    ):
        if each.kind is not each.KEYWORD_ONLY:
            of_squares = [t.square() for t in tensors(index)] if name in SQUARES else tensors(index)
            lists.append(counters() if name == "steps" else of_squares)
        elif each.default is each.empty:
            needed[name] = numbers[name]
    return tuple(lists), needed


def absent_lists(operation: str) -> list[str]:
    """Returns the names of the lists that its right call does without."""
    parameters = inspect.signature(getattr(ops, operation)).parameters.values()
    return [
        each.name
        for each in parameters
        if each.kind is each.KEYWORD_ONLY
        and each.annotation == "Sequence[Tensor] | None"
        and each.name != "exponents"
    ]


# A right call of each operation: all that has no default.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "check_finite_": ((tensors(0), number(0.0)), {}),
    "count_nonfinite": ((tensors(0),), {}),
    "clip_grads_": ((tensors(0), number(4.0)), {"max_norm": 1.0}),
    "unscale_": ((tensors(0), number(0.5), number(0.0)), {}),
    "update_scale_": (
        (number(8.0), number(0, torch.int32), [number(0.0)]),
        {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1},
    ),
    **{operation: call_of_step(operation) for operation in BUFFERS},
    "refresh_masters_": ((tensors(0, FP16), tensors(1)), {}),
    "average_weights_": ((tensors(0), tensors(1), torch.zeros(2, dtype=torch.int64)), {}),
}


def wrong_calls() -> Iterator[Any]:
    """Yields operation, positional arguments, the others, exception and a part of its text."""
    for name, (args, options) in CALLS.items():
        parameters = inspect.signature(getattr(ops, name)).parameters.values()
        first = next(iter(parameters)).name
        least = sum(p.default is p.empty and p.kind is not p.KEYWORD_ONLY for p in parameters)
        takes = f"takes {f'from {least} to ' * (least < len(args))}{len(args)} positional argument"
        for kind, *call, text in (
            ("misspelled", args, {"colour": 1}, r"got an unexpected keyword argument 'colour'"),
            ("doubled", args, {first: args[0]}, f"got multiple values for argument '{first}'"),
            ("surplus", (*args, 1), {}, takes),
            ("missing", args[: least - 1], {}, "missing 1 required positional argument"),
        ):
            call[1] = {**options, **call[1]}
            yield pytest.param(name, *call, TypeError, f"{name}() {text}", id=f"{name}-{kind}")
        if options:
            text = f"{name}() missing {len(options)} required keyword-only argument"
            yield pytest.param(name, args, {}, TypeError, text, id=f"{name}-without-options")
    wanted = "must have 3 tensors, one for each of params, got 0"
    for name in BUFFERS:
        for argument in absent_lists(name):
            args, options = CALLS[name]
            options = {**options, argument: []}
            if argument == "momentum_buffers":
                options["momentum"] = 0.9
            text = f"{name}: {argument} {wanted}"
            yield pytest.param(name, args, options, RuntimeError, text, id=f"{name}-no-{argument}")
    args, options = CALLS["sgd_"]
    text = "sgd_: momentum_buffers must be given if and only if momentum is not 0, got momentum 0.0"
    options = {**options, "momentum_buffers": []}
    yield pytest.param("sgd_", args, options, RuntimeError, text, id="sgd_-buffers-of-no-momentum")


def run_both(name: str, args: Any, options: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yields a call, and the same one as a compiled function."""
    call = partial(getattr(ops, name), *copy.deepcopy(args), **copy.deepcopy(options))
    yield call
    torch._dynamo.reset()
    yield torch.compile(lambda: call(), backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(("name", "args", "options", "kind", "text"), list(wrong_calls()))
def test_a_wrong_call_is_refused_in_the_same_words_when_compiled(name, args, options, kind, text):
    eager, compiled = run_both(name, args, options)
    with pytest.raises(kind, match=re.escape(text)) as told:
        eager()
    assert type(told.value) is kind
    with pytest.raises(RuntimeError) as of_compiled:  # dynamo's own, which quotes a TypeError
        compiled()
    assert type(of_compiled.value) is kind or f"{kind.__name__}(" in str(of_compiled.value)
    assert str(told.value) in str(of_compiled.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            pytest.param(name, {each: [] for each in absent_lists(name)}, id=name.strip("_"))
            for name in BUFFERS
            if name != "sgd_"
        ),
        pytest.param("sgd_", {}, id="sgd"),
        pytest.param("sgd_", {"momentum": 0.9, "momentum_buffers": []}, id="momentum"),
    ],
)
def test_no_parameters_at_all_are_stepped_with_lists_as_empty(name, options):
    args, needed = CALLS[name]
    for call in run_both(name, [[] for _ in args], {**needed, **options}):
        assert call() is None


def all_operations(grads: list[Tensor], params: list[Tensor], state: dict[str, Any]) -> Tensor:
    """A step of a loop of one's own, with all operations, and its number of bad elements."""
    found_inf, total, exp_avgs = state["found_inf"], state["sum"], state["exp_avgs"]
    ops.check_finite_(grads, found_inf, sum_of_squares=total)
    bad = ops.count_nonfinite(grads)
    options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
    options |= {"lr": state["lr"], "found_inf": found_inf, "sum_of_squares": total}
    ops.adam_(params, grads, exp_avgs, state["exp_avg_sqs"], state["steps"], **options)
    ops.unscale_(grads, state["inv_scale"], found_inf)
    ops.clip_grads_(grads, state["norm"], max_norm=0.5)
    ops.sgd_(params, grads, momentum_buffers=exp_avgs, lr=0.1, momentum=0.9)
    factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}
    ops.update_scale_(state["scale"], state["growth_tracker"], [found_inf], **factors)
    return bad


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float-lr", "tensor-lr"])
def test_a_loop_of_ones_own_compiles_without_a_graph_break(lr) -> None:
    def make() -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        state: dict[str, Any] = {
            "found_inf": number(0.0),
            "sum": number(0.0, torch.float64),
            "exp_avgs": tensors(2),
            "exp_avg_sqs": [t.square() for t in tensors(3)],
            "steps": counters(),
            "lr": copy.deepcopy(lr),
            "inv_scale": number(0.5),
            "norm": number(3.0),
            "scale": number(8.0),
            "growth_tracker": number(0, torch.int32),
        }
        return tensors(1), tensors(0), state

    plain, compiled = make(), make()
    wanted = all_operations(*plain)
    torch._dynamo.reset()
    got = torch.compile(all_operations, backend="aot_eager", fullgraph=True)(*compiled)
    assert torch.equal(got, wanted)
    left, right = (tensors_in([*lists, *state.values()]) for *lists, state in (compiled, plain))
    assert all(same_bits(one, other) for one, other in zip(left, right, strict=True))


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
@pytest.mark.parametrize(
    "make_optimizer",
    [partial(amp_ext.optim.AdamW, max_grad_norm=1.0), partial(amp_ext.optim.SGD, momentum=0.9)],
    ids=["adamw", "momentum"],
)
def test_training_around_compiled_code_is_training(compiled: str, make_optimizer) -> None:
    for a, b in zip(trained(compiled, make_optimizer), trained("", make_optimizer), strict=True):
        torch.testing.assert_close(a, b)
