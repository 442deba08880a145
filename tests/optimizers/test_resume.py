"""Training that goes on in another process has the bits of one that was never interrupted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from optimizer_cases import in_another_process, ours
from reference import same_bits
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import amp_ext

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"weight_decay": 0.1}),
    "adamw": ("AdamW", {"max_grad_norm": 1.0}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "sgd": ("SGD", {"weight_decay": 0.1}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "dampening": ("SGD", {"momentum": 0.9, "dampening": 0.5}),
}
DTYPES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (F32, {}),
    "bfloat16-masters": (BF16, {}),
    "float16-masters": (F16, {}),
    "float16-plain": (F16, {"master_weights": False}),
    "bfloat16-states": (BF16, {"state_dtype": None}),
    "float16-states": (F16, {"state_dtype": None}),
}
# The scale grows and is backed off while these few steps run.
SCALERS: dict[str, dict[str, Any]] = {
    "default": {},
    "hysteresis": {"hysteresis": 3},
    "limits": {"min_scale": 512.0, "max_scale": 2048.0},
    "static": {"dynamic": False},
}
CASES = list(itertools.product(OPTIMIZERS, DTYPES, SCALERS))

SAVED_AFTER, STEPS = 3, 9
# So that growth and hysteresis have been counted halfway when they are saved.
OVERFLOWS = (1, 3, 5)


class Run:
    """A model, an optimizer, a scaler and a schedule, in training."""

    def __init__(self, optimizer: str, dtype: str, scaler: str) -> None:
        name, options = OPTIMIZERS[optimizer]
        self.dtype, precision = DTYPES[dtype]
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(self.dtype)
        self.optimizer = ours(name)(self.model.parameters(), lr=0.01, **options, **precision)
        self.scaler = amp_ext.GradScaler(
            "cpu", init_scale=1024.0, growth_interval=2, **SCALERS[scaler]
        )
        self.schedule = StepLR(self.optimizer, 2, 0.7)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            loss = self.model(torch.randn(4, 6).to(self.dtype)).float().square().mean()
            if step in OVERFLOWS:
                loss = loss * torch.inf
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "schedule": self.schedule,
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(checkpoint[name])


def resume(checkpoints: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Runs in the other process: goes on from every checkpoint to the end."""
    results = {}
    for case, checkpoint in checkpoints.items():
        run = Run(*case.split(" "))
        run.load_state_dict(checkpoint)
        run.train(SAVED_AFTER, STEPS)
        results[case] = run.state_dict()
    return results


@pytest.fixture(scope="module")
def resumed() -> dict[str, dict[str, Any]]:
    """The end of every case whose second half ran in another process."""
    checkpoints = {}
    for case in CASES:
        run = Run(*case)
        run.train(0, SAVED_AFTER)
        checkpoints[" ".join(case)] = run.state_dict()
    return in_another_process(resume, checkpoints)


def assert_same(actual: Any, expected: Any, where: str) -> None:
    """Asserts that two state dicts agree in every key, number and bit."""
    if isinstance(expected, Tensor):
        assert same_bits(actual, expected), where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}/{index}")
    else:
        assert actual == expected, where


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_another_process_goes_on_with_the_same_bits(resumed, optimizer, dtype, scaler):
    straight = Run(optimizer, dtype, scaler)
    straight.train(0, STEPS)
    case = " ".join((optimizer, dtype, scaler))
    assert_same(resumed[case], straight.state_dict(), case)


@pytest.mark.parametrize("left_out", ["model", "optimizer", "scaler", "schedule"])
def test_every_part_of_a_checkpoint_is_needed(left_out):
    saved = Run("amsgrad", "float16-masters", "hysteresis")
    saved.train(0, SAVED_AFTER)
    checkpoint = saved.state_dict()
    saved.train(SAVED_AFTER, STEPS)
    partly = Run("amsgrad", "float16-masters", "hysteresis")
    checkpoint[left_out] = partly.state_dict()[left_out]
    partly.load_state_dict(checkpoint)
    partly.train(SAVED_AFTER, STEPS)
    with pytest.raises(AssertionError):
        assert_same(partly.state_dict(), saved.state_dict(), left_out)


def test_scalers_are_saved_on_their_way():
    run = Run("adamw", "float16-masters", "hysteresis")
    run.train(0, SAVED_AFTER)
    saved = run.scaler.state_dict()
    assert (saved["_growth_tracker"], saved["_hysteresis_tracker"]) == (1, 2)
    scales = set()
    for step in range(SAVED_AFTER, STEPS):
        run.train(step, step + 1)
        scales.add(run.scaler.get_scale())
    assert scales == {512.0, 1024.0}
