"""The benchmark of steps with states in host memory, small and without a GPU."""

from __future__ import annotations

import sys
import types

import offload
import pytest
import torch
from harness.edge_shapes import threads

SMALL = ["--tensors=2", "--elements=4096", "--rounds=2"]
SHAPES = [4096, 2048]
CPU = torch.device("cpu")


@pytest.fixture
def deepspeed(monkeypatch):
    """Replaces DeepSpeed's optimizer by torch's."""
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.adam"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["deepspeed.ops.adam"].DeepSpeedCPUAdam = torch.optim.AdamW


def run(capsys, *arguments):
    """Runs the program; returns the exit code, and the printed lines."""
    with threads(1):
        code = offload.main([*SMALL, *arguments])
    return code, capsys.readouterr().out.splitlines()


def test_each_form_and_each_package_has_a_row(capsys, deepspeed, monkeypatch):
    monkeypatch.setitem(offload.TIME_LIMITS, "cpu", 100)
    code, lines = run(capsys, "--check")
    assert code == 0
    for name, rows in {"fp32  ": 1, "16-bit + ": 3, "amp_ext, ": 2, "DeepSpeed, ": 2}.items():
        found = [line for line in lines if line.startswith(name) and line[-1].isdigit()]
        assert len(found) == rows, name


def test_a_package_that_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    _, lines = run(capsys)
    assert sum(line.startswith("not measured: ModuleNotFoundError") for line in lines) == 1
    assert not any(line.startswith("DeepSpeed") for line in lines)


def test_a_limit_that_is_exceeded_fails_only_if_it_is_checked(capsys, monkeypatch):
    monkeypatch.setitem(offload.TIME_LIMITS, "cpu", 0.0)
    code, lines = run(capsys)
    assert code == 0
    assert sum(" is above 0.0" in line for line in lines) == len(offload.FORMS)
    assert run(capsys, "--check")[0] == 1


def test_all_sides_take_the_same_steps(deepspeed):
    start = offload.make_params(SHAPES, torch.bfloat16, CPU)
    sides = [make() for make in offload.makers_of(SHAPES, 1, CPU)]
    for side in sides:
        for _ in range(20):
            side.step()
        for param, ours, before in zip(side.params, sides[0].params, start, strict=True):
            assert (param != before).float().mean() > 0.5
            # Moments in bfloat16 change the last bit of some parameters.
            most = 0.2 if "bf16 states" in side.name else 0.01
            assert (param != ours).float().mean() < most, side.name
    sizes = [side.host() / sum(SHAPES) for side in sides]
    assert sizes == [4 + 8 + 2 + 4, 2 + 4 + 2 + 4, 4 + 4 + 8 + 2, 4 + 4 + 8]  # with all buffers
