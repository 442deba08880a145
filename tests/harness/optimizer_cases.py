"""The one list of optimizers, and parameters, gradients and comparisons for the tests of all.

A new class needs an entry in ``KINDS`` and its rows in ``OPTIMIZERS``: everything that holds for
all optimizers is tested for it then, beside torch's namesake or, without one, beside its formula.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext import ops
from amp_ext.optim.fused_optimizer import FusedOptimizer
from harness import reference
from harness.edge_shapes import BF16, F16, F32, F64
from harness.list_operations import OPERATIONS as LIST_OPERATIONS
from harness.reference import assert_close, same_bits

Optimizer = torch.optim.Optimizer

_DECAY, _MAX = {"weight_decay": 0.1}, {"maximize": True}
_DECOUPLED = {"decoupled_weight_decay": True}
_MOMENTUM, _DAMPENING = {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}
# Every optimizer with every option, by the names that torch and amp_ext share, first one that has a
# state. The learning rate is large, so that a step shows in 8 bits.
OPTIMIZERS = [
    pytest.param(name, {"lr": 0.05, **options}, id=row_id)
    for row_id, name, options in (
        ("adam", "Adam", {}),
        ("adam-decay", "Adam", _DECAY),
        ("adam-amsgrad", "Adam", {"amsgrad": True, "betas": (0.5, 0.6)}),
        ("adam-maximize", "Adam", _MAX | {"eps": 0.1}),
        ("adam-decoupled", "Adam", _DECAY | _DECOUPLED),
        ("adamw", "AdamW", {"weight_decay": 0.5}),
        ("adamw-amsgrad-max", "AdamW", _MAX | {"amsgrad": True}),
        ("lion", "Lion", {"weight_decay": 0.5}),
        ("lion-cautious", "Lion", {"weight_decay": 0.5, "cautious_weight_decay": True}),
        ("lion-coupled-max", "Lion", _DECAY | _MAX | {"decoupled_weight_decay": False}),
        ("momentum", "SGD", _MOMENTUM),
        ("sgd", "SGD", {}),
        ("sgd-decay-max", "SGD", _DECAY | _MAX),
        ("nesterov", "SGD", _MOMENTUM | {"nesterov": True}),
        ("nesterov-decay", "SGD", _MOMENTUM | _DECAY | {"nesterov": True}),
        ("dampening", "SGD", _DAMPENING),
        ("dampening-decay-max", "SGD", _DAMPENING | _DECAY | _MAX),
    )
]


def optimizers_named(*ids: str) -> list[Any]:
    """Returns the rows of OPTIMIZERS with these names, in this order."""
    by_id = {row.id: row for row in OPTIMIZERS}
    return [by_id[name] for name in ids]


# Every class that the package exports, but for Muon, which takes matrices only: test_muon.py.
CLASSES = [
    name
    for name in amp_ext.optim.__all__
    if name != "Muon"
    and isinstance(getattr(amp_ext.optim, name), type)
    and issubclass(getattr(amp_ext.optim, name), FusedOptimizer)
]


def of_other_classes(
    settings: dict[str, tuple[str, dict[str, Any]]], *without: str
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns settings of the classes that have none here, but for those of these names."""
    known = {*without, *(name for name, *_ in settings.values())}
    return {name.lower(): (name, {}) for name in CLASSES if name not in known}


EACH_CLASS = list({row.values[0]: row for row in reversed(OPTIMIZERS)}.values())[::-1]
NAMES = [row.values[0] for row in EACH_CLASS]
# One of each kind of state.
_OF_FEW = {"Adam": "adam-amsgrad", "SGD": "dampening"}
FEW_OPTIMIZERS = [row for row in OPTIMIZERS if row.id == _OF_FEW.get(row.values[0])]
FEW_OPTIMIZERS += [row for row in EACH_CLASS if row.values[0] not in _OF_FEW]
# torch's classes are a reference of their own for these: defaults, errors, files, switches.
IN_TORCH = [name for name in NAMES if hasattr(torch.optim, name)]

every_optimizer = pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
few_optimizers = pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
each_class = pytest.mark.parametrize(("name", "options"), EACH_CLASS)
each_name = pytest.mark.parametrize("name", NAMES)
each_in_torch = pytest.mark.parametrize("name", IN_TORCH)


def in_torch(rows: list[Any]) -> list[Any]:
    """Returns the rows of classes that torch has too."""
    return [row for row in rows if row.values[0] in IN_TORCH]


every_optimizer_in_torch = pytest.mark.parametrize(("name", "options"), in_torch(OPTIMIZERS))
each_class_in_torch = pytest.mark.parametrize(("name", "options"), in_torch(EACH_CLASS))

HALVES = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
FLOATS = pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)

# As torch computes: states in the parameter's dtype, no masters.
AS_TORCH: dict[str, Any] = {"master_weights": False, "state_dtype": None}

SHAPES = [(16385,), (3, 5), (), (0,), (7,)]

# Shapes and forms of states for tests of where states are kept: each number format, and blocks of
# it that are whole, broken and empty.
FORM_SHAPES = [(130, 32), (127, 33), (5, 7), (), (0, 32), (4096,)]

STORED_FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, {}),
    "fp32-bf16": (F32, {"state_dtype": BF16, "rounding": "dither"}),
    "bf16": (BF16, {}),
    "fp16": (F16, {}),
    "bf16-split-bf16": (BF16, {"master_weights": "split", "state_dtype": BF16}),
    "fp16-split": (F16, {"master_weights": "split"}),
    "bf16-split8-8bit": (BF16, {"master_weights": "split8", "state_dtype": "8bit"}),
    "bf16-alone-narrow": (BF16, {"master_weights": False, "state_dtype": None}),
    "fp32-8bit-bf16": (F32, {"state_dtype": "8bit-bf16"}),
}

COPIES = pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda value: pickle.loads(pickle.dumps(value)), id="pickle"),
        pytest.param(lambda value: through_a_file(value, weights_only=False), id="file"),
    ],
)


# The classes: ours, torch's, and the formula.


@functools.cache
def operation_of(name: str) -> str:
    """Returns the operation over lists that a class of ours stands on."""
    return getattr(ops, ours(name)._hyperparameters_class).operation


def counts_steps(name: str, options: dict[str, Any]) -> bool:
    """Returns whether the states of a class have a counter with the options of a row."""
    return LIST_OPERATIONS[operation_of(name)].keeps_steps(options)


@functools.cache
def formula_of(name: str) -> Callable[..., dict[str, Tensor]]:
    """Returns one step of a class in float64, with the defaults of ours.

    It takes the parameter, the gradient, the state and the options of the group, which may hold
    more than it needs, and returns the new values by name; and in ``doubt`` where rounding decides
    the sign by which an element moves, if it does.
    """
    settings = LIST_OPERATIONS[operation_of(name)]
    known = inspect.signature(getattr(reference, operation_of(name).strip("_"))).parameters
    defaults = ours(name)([Parameter(torch.zeros(1))]).defaults

    def formula(
        param: Tensor, grad: Tensor, state: dict[str, Tensor], **group: Any
    ) -> dict[str, Tensor]:
        options = numbers_of({**defaults, **group})
        lists = settings.buffers({name: value for name, value in options.items() if value})
        old = {name: state.get(name[:-1], torch.zeros_like(param)) for name in lists}
        old["steps"] = state.get("step", torch.tensor(1.0 if state else 0.0))
        numbers = {name: value for name, value in options.items() if name in known}
        new = settings.formula(param, grad, old, **numbers)
        return {name[:-1]: tensor for name, tensor in new.items()}

    return formula


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a group with each of ``betas`` apart and ``lr`` as a number."""
    betas = {f"beta{i}": float(beta) for i, beta in enumerate(group.get("betas", ()), 1)}
    return {**group, **betas, "lr": float(group["lr"])}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the tests of all optimizers need to know of a class.

    Attributes:
        decay: Its decay rates, other than the defaults.
        in_16_bits: Options with which torch's class is right for fp16 and bf16 on the CPU. Its
            loop of Adam divides 0 by 0, since eps is 0 in fp16; its fused SGD skips most elements.
        reads: Other classes whose checkpoints have all that it needs.
    """

    decay: dict[str, Any]
    in_16_bits: dict[str, Any] = dataclasses.field(default_factory=dict)
    reads: tuple[str, ...] = ()


_BETAS = {"betas": (0.1, 0.2)}
KINDS = {
    "Adam": Kind(_BETAS, {"fused": True}, reads=("AdamW",)),
    "AdamW": Kind(_BETAS, {"fused": True}, reads=("Adam",)),
    "Lion": Kind(_BETAS),
    "SGD": Kind({"momentum": 0.5}, {"foreach": False}),
}


class ByFormula(Optimizer):
    """Steps in float64 and rounds what it keeps to the parameter's dtype, with any switches."""

    formula: ClassVar[Callable[..., dict[str, Tensor]]]

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.doubts: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                new = self.formula(param, param.grad, self.state[param], **group)
                param.copy_(new.pop("param"))
                if "doubt" in new:
                    doubt = new.pop("doubt")
                    self.doubts[param] = doubt | self.doubts.get(param, torch.zeros_like(doubt))
                for name, value in new.items():
                    self.state[param][name] = value.to(F32 if name == "step" else param.dtype)
        return loss


def ours(name: str) -> type[Optimizer]:
    return getattr(amp_ext.optim, name)


def theirs(name: str) -> type[Optimizer]:
    """Returns torch's class of this name, or the formula where torch has none."""
    if hasattr(torch.optim, name):
        return getattr(torch.optim, name)
    return type(name, (ByFormula,), {"formula": staticmethod(formula_of(name))})


def taken(name: str, switches: dict[str, Any]) -> dict[str, Any]:
    """Returns those of torch's switches that torch's class has."""
    has = theirs(name)(make_params(F32)).defaults
    return {switch: value for switch, value in switches.items() if switch in has}


# Parameters, gradients, training.


def make_params(dtype: torch.dtype, device="cpu", shapes=SHAPES) -> list[Parameter]:
    return [Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def params_of(side: Optimizer | list[Parameter]) -> list[Parameter]:
    """Returns the parameters of an optimizer; a list of them stands for itself."""
    if isinstance(side, list):
        return side
    return [param for group in side.param_groups for param in group["params"]]


def grads_of(side: Optimizer | list[Parameter]) -> list[Tensor]:
    return [param.grad for param in params_of(side) if param.grad is not None]


def twins(side: Optimizer | list[Parameter], dtype: torch.dtype | None = None) -> list[Parameter]:
    """Returns parameters with the same values that share nothing."""
    return [
        Parameter(param.detach().to(param.dtype if dtype is None else dtype, copy=True))
        for param in params_of(side)
    ]


def pair(
    name: str, options: dict[str, Any], dtype=F32, device="cpu", shapes=SHAPES, **of_the_first: Any
) -> tuple[Optimizer, Optimizer]:
    """Returns two optimizers of ours for equal parameters, the first with more options."""
    first = ours(name)(make_params(dtype, device, shapes), **options, **of_the_first)
    return first, ours(name)(twins(first), **options)


def beside_torch(
    name: str, options: dict[str, Any], dtype=F32, device="cpu", shapes=SHAPES
) -> tuple[Optimizer, Optimizer]:
    """Returns an optimizer of ours that keeps states as torch does, and torch's loop beside it."""
    mine = ours(name)(make_params(dtype, device, shapes), **options, **AS_TORCH)
    return mine, theirs(name)(twins(mine), foreach=False, **options)


def give_grads(*sides: Optimizer | list[Parameter]) -> None:
    """Gives the parameters of all sides the same new gradients, each a copy of its own."""
    for params in zip(*map(params_of, sides), strict=True):
        grad = torch.randn_like(params[0])
        for param in params:
            param.grad = grad.to(param.dtype, copy=True)


def take_step(optimizer: Any, scaler: Any) -> None:
    """Takes a step, by a scaler and with its update if there is one."""
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def train(optimizers: list[Optimizer], steps: int = 1) -> None:
    """Steps the optimizers side by side, each time with the same new gradients."""
    for _ in range(steps):
        give_grads(*optimizers)
        for optimizer in optimizers:
            optimizer.step()


def trained(optimizer: Optimizer, steps: int = 3) -> Optimizer:
    train([optimizer], steps)
    return optimizer


@contextlib.contextmanager
def swapping(on: bool) -> Iterator[None]:
    """Lets modules swap their parameters when they are converted, as those of DTensors are."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# Comparisons.


def bits_of(side: Optimizer | list[Any]) -> list[dict[str, Tensor]]:
    """Returns copies of every parameter and its states."""
    states = {} if isinstance(side, list) else side.state
    return [
        {
            name: tensor.detach().clone()
            for name, tensor in {"param": param, **states.get(param, {})}.items()
            if isinstance(tensor, Tensor)  # a file of others may have more
        }
        for param in params_of(side)
    ]


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Asserts that two sides agree in every bit: optimizers, parameters, results of bits_of."""
    sides = [
        side if isinstance(side, list) and side and isinstance(side[0], dict) else bits_of(side)
        for side in (actual, expected)
    ]
    for index, (left, right) in enumerate(zip(*sides, strict=True)):
        assert left.keys() == right.keys(), f"param {index}"
        for name in right:
            assert same_bits(left[name], right[name]), f"{name} of param {index}"


def assert_all_close(actual: Any, expected: Any, steps: int) -> None:
    """Compares all parameters, and the states that the expected side has, to their rounding.

    Elements that the formula doubts are left out.
    """
    sides = [bits_of(side) for side in (actual, expected)]
    doubts = [getattr(expected, "doubts", {}).get(param) for param in params_of(expected)]
    for index, (left, right, doubt) in enumerate(zip(*sides, doubts, strict=True)):
        for name, tensor in right.items():
            if doubt is not None and name != "step":
                tensor = torch.where(doubt, left[name].to(tensor), tensor)
            assert_close(left[name], tensor, steps=steps, what=f"{name} of param {index}")


# Files.


def saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def through_a_file(content: Any, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(saved(content)), weights_only=weights_only)


def loading(target: Any, file: dict[str, Any]) -> Any:
    """Returns an optimizer or schedule after it has loaded a state dict."""
    target.load_state_dict(file)
    return target


GONE = object()


def spoiled(file: dict[str, Any], path: list[Any], new: Any) -> Any:
    """Returns a copy of a file in which what lies at the end of a path of keys is new, or gone.

    What is new may be a function of what is there.
    """
    file = copy.deepcopy(file)
    if not path:
        return new(file)
    *keys, last = path
    holder = functools.reduce(operator.getitem, keys, file)
    if new is GONE:
        del holder[last]
    else:
        holder[last] = new(holder[last]) if callable(new) else new
    return file


def assert_refused(optimizer: Optimizer, file: dict[str, Any], error: Any, words: str) -> None:
    """Asserts that the file is refused with these words and that nothing was loaded of it."""
    before, groups = bits_of(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(file)
    assert_same_bits(optimizer, before)
    assert optimizer.state_dict()["param_groups"] == groups


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Makes a process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
