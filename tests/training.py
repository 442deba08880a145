"""Parameters, gradients and optimizers for the tests of the optimizer classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import same_bits
from torch import Tensor
from torch.nn import Parameter

import amp_ext

# Every optimizer with every option, by the names that torch and amp_ext share. The learning rate
# is large, so that a step shows in 8 bits.
OPTIMIZERS = [
    pytest.param("Adam", {"lr": 0.05}, id="adam"),
    pytest.param("Adam", {"lr": 0.05, "weight_decay": 0.1}, id="adam-decay"),
    pytest.param("Adam", {"lr": 0.05, "amsgrad": True, "betas": (0.5, 0.6)}, id="adam-amsgrad"),
    pytest.param("Adam", {"lr": 0.05, "maximize": True, "eps": 0.1}, id="adam-maximize"),
    pytest.param(
        "Adam",
        {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True},
        id="adam-decoupled",
    ),
    pytest.param("AdamW", {"lr": 0.05, "weight_decay": 0.5}, id="adamw"),
    pytest.param("AdamW", {"lr": 0.05, "amsgrad": True, "maximize": True}, id="adamw-amsgrad-max"),
    pytest.param("SGD", {"lr": 0.05}, id="sgd"),
    pytest.param("SGD", {"lr": 0.05, "weight_decay": 0.1, "maximize": True}, id="sgd-decay-max"),
    pytest.param("SGD", {"lr": 0.05, "momentum": 0.9}, id="momentum"),
    pytest.param("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}, id="nesterov"),
    pytest.param(
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        id="nesterov-decay",
    ),
    pytest.param("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}, id="dampening"),
    pytest.param(
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
        id="dampening-decay-max",
    ),
]
# One of each kind of state.
FEW_OPTIMIZERS = [row for row in OPTIMIZERS if row.id in {"adam-amsgrad", "adamw", "dampening"}]
EACH_CLASS = [row for row in OPTIMIZERS if row.id in {"adam", "adamw", "momentum"}]

# As torch computes: states in the parameter's dtype, no masters.
AS_TORCH: dict[str, Any] = {"master_weights": False, "state_dtype": None}

SHAPES = [(16385,), (3, 5), (), (0,), (7,)]


def ours(name: str) -> type[torch.optim.Optimizer]:
    return getattr(amp_ext.optim, name)


def theirs(name: str) -> type[torch.optim.Optimizer]:
    return getattr(torch.optim, name)


def in_16_bits(name: str) -> dict[str, bool]:
    """Returns the switches with which torch's class is right for fp16 and bf16 on the CPU.

    Its loop of Adam divides 0 by 0, since eps is 0 in fp16; its fused SGD skips most elements.
    """
    return {"foreach": False} if name == "SGD" else {"fused": True}


def make_params(dtype: torch.dtype, device="cpu", shapes=SHAPES) -> list[Parameter]:
    return [Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def twins(params: list[Parameter], dtype: torch.dtype | None = None) -> list[Parameter]:
    """Returns parameters with the same values that share nothing."""
    return [
        Parameter(param.detach().to(param.dtype if dtype is None else dtype, copy=True))
        for param in params
    ]


def give_grads(*sides: list[Parameter]) -> None:
    """Gives the parameters of all sides the same new gradients, each a copy of its own."""
    for params in zip(*sides, strict=True):
        grad = torch.randn_like(params[0])
        for param in params:
            param.grad = grad.to(param.dtype, copy=True)


def train(optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    """Steps the optimizers side by side, each time with the same new gradients."""
    for _ in range(steps):
        give_grads(*(params_of(optimizer) for optimizer in optimizers))
        for optimizer in optimizers:
            optimizer.step()


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def bits_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Returns copies of every parameter and its states."""
    return [
        {
            name: tensor.detach().clone()
            for name, tensor in {"param": param, **optimizer.state.get(param, {})}.items()
        }
        for param in params_of(optimizer)
    ]


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Asserts that two optimizers, or two results of ``bits_of``, agree in every bit."""
    sides = [side if isinstance(side, list) else bits_of(side) for side in (actual, expected)]
    for index, (left, right) in enumerate(zip(*sides, strict=True)):
        assert left.keys() == right.keys(), f"param {index}"
        for name in right:
            assert same_bits(left[name], right[name]), f"{name} of param {index}"
