"""Training that goes on in another process has the bits of one that was never interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.awkward import BF16, F16, F32
from harness.optimizer_cases import OPTIMIZERS, in_another_process, ours, through_a_file
from harness.reference import same_bits
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_flatten_with_path

import amp_ext

DTYPES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (F32, {}),
    "bfloat16-masters": (BF16, {"max_grad_norm": 1.0}),
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
BY_ID = {row.id: row.values for row in OPTIMIZERS}
# Every optimizer in every dtype, and every dtype under every scaler.
CASES = [
    (optimizer, dtype, list(SCALERS)[(number + place) % len(SCALERS)])
    for number, optimizer in enumerate(BY_ID)
    for place, dtype in enumerate(DTYPES)
]

SAVED_AFTER, STEPS = 3, 9
# So that growth and hysteresis have been counted halfway when they are saved.
OVERFLOWS = (1, 3, 5)


class Run:
    """A model, an optimizer, a scaler and a schedule, in training."""

    def __init__(self, row: str, dtype: str, scaler: str) -> None:
        name, options = BY_ID[row]
        self.dtype, precision = DTYPES[dtype]
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(self.dtype)
        optimizer = ours(name)(model.parameters(), **(options | {"lr": 0.01}), **precision)
        self.parts: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scaler": amp_ext.GradScaler(
                "cpu", init_scale=1024.0, growth_interval=2, **SCALERS[scaler]
            ),
            "schedule": StepLR(optimizer, 2, 0.7),
        }

    def train(self, first: int, last: int) -> None:
        model, optimizer, scaler, schedule = self.parts.values()
        for step in range(first, last):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 6).to(self.dtype)).float().square().mean()
            if step in OVERFLOWS:
                loss = loss * torch.inf
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint[name])


def resume(checkpoints: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs in the other process: goes on from every checkpoint to the end."""
    results = []
    for case, checkpoint in zip(CASES, checkpoints, strict=True):
        run = Run(*case)
        run.load_state_dict(checkpoint)
        run.train(SAVED_AFTER, STEPS)
        results.append(run.state_dict())
    return results


def assert_same(actual: Any, expected: Any, where: str) -> None:
    """Asserts that two state dicts agree in every key, number and bit."""
    (leaves, keys), (wanted, wanted_keys) = map(tree_flatten_with_path, (actual, expected))
    assert keys == wanted_keys, where
    for (path, leaf), (_, value) in zip(leaves, wanted, strict=True):
        is_same = same_bits(leaf, value) if isinstance(value, Tensor) else leaf == value
        assert is_same, f"{where}: {path}"


def test_another_process_goes_on_with_the_same_bits():
    checkpoints, ends = [], []
    for case in CASES:
        run = Run(*case)
        run.train(0, SAVED_AFTER)
        checkpoints.append(through_a_file(run.state_dict()))
        assert checkpoints[-1]["scaler"]["_growth_tracker"] == (case[2] != "static")
        assert checkpoints[-1]["scaler"].get("_hysteresis_tracker", 2) == 2
        run.train(SAVED_AFTER, STEPS)
        ends.append(run.state_dict())
    resumed = in_another_process(resume, checkpoints)
    for case, actual, expected in zip(CASES, resumed, ends, strict=True):
        assert_same(actual, expected, " ".join(case))


@pytest.mark.parametrize("left_out", ["model", "optimizer", "scaler", "schedule"])
def test_every_part_of_a_checkpoint_is_needed(left_out):
    saved, partly = (Run("adam-amsgrad", "float16-masters", "hysteresis") for _ in range(2))
    saved.train(0, SAVED_AFTER)
    checkpoint = saved.state_dict() | {left_out: partly.state_dict()[left_out]}
    partly.load_state_dict(checkpoint)
    for run in (saved, partly):
        run.train(SAVED_AFTER, STEPS)
    with pytest.raises(AssertionError):
        assert_same(partly.state_dict(), saved.state_dict(), left_out)
