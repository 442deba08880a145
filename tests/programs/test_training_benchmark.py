"""The benchmark that trains two models as a whole, small."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")

import common
import plot
import training
from harness.edge_shapes import threads
from training import NARROW, SIDES, TASKS, TINY

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with the files of a tiny run, and what these say."""
    folder = tmp_path_factory.mktemp("training")
    with threads(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "SEEDS", 2)
        assert training.main(["--device=cpu", "--tiny", f"--out={folder}"]) == 0
    return folder, json.loads((folder / "training.json").read_text())


@pytest.mark.slow
def test_every_side_trains_both_models_and_learns_as_torchs(trained):
    folder, result = trained
    assert result["failed"] == result["left_out"] == []
    runs = {(r["model"], r["group"], r["side"], r["seed"]): r for r in result["runs"]}
    sides = [(side.group, side.name) for side in SIDES]
    assert runs.keys() == {
        (name, *side, seed) for name in TASKS for side in sides for seed in range(2)
    }
    for (model, group, side, seed), run in runs.items():
        losses, name = run["losses"], side.replace("offloaded", "float32 masters", 1)
        assert len(losses) == TINY.steps
        assert sum(losses[-5:]) < sum(losses[:5])
        torchs = runs[model, group, "torch, masters by hand" if group == NARROW else "torch", seed]
        assert losses[0] == torchs["losses"][0], (model, side)
        assert losses[-1] == pytest.approx(torchs["losses"][-1], rel=0.05), (model, side)
        if "offloaded" in side:  # the same bits
            name = "amp_ext, 5 bytes" if "5 bytes" in side else name
            assert losses == runs[model, group, name, seed]["losses"]
    plot.draw(result, folder / "again.png")
    assert (folder / "training.png").read_bytes() == (folder / "again.png").read_bytes()


@pytest.mark.slow
def test_bytes_are_those_of_parameters_gradients_masters_and_moments(trained):
    _, result = trained
    sizes = {
        (run["group"], run["side"]): run["bytes_kept"] / run["parameters"]
        for run in result["runs"]
        if run["model"] == "GPT"
    }
    # Parameter, gradient, master with its gradient in torch's loop, two moments; in the last two
    # rows the host copy of the parameter.
    expected = [16, 16, 16, 16, 20, 16, 10, 7, 5, 18, 7]
    for side, size in zip(SIDES, expected, strict=True):
        # Steps, and the exponents of blocks whose moments have 8 bits.
        assert size <= sizes[side.group, side.name] < size + 0.3, side.name


def test_a_run_that_fails_leaves_the_others_and_none_begins_too_late(monkeypatch, tmp_path):
    train, times, stored = training.train, itertools.count(0, 10), []
    written = tmp_path / "training.json"

    def failing(name, side, *rest):
        stored.append(len(json.loads(written.read_text())["runs"]) if written.exists() else 0)
        if side.ours:
            raise RuntimeError("out of memory")
        return train(name, side, *rest)

    monkeypatch.setattr(training, "train", failing)
    monkeypatch.setattr(training, "SIDES", SIDES[:3])
    monkeypatch.setattr(training, "TASKS", {"GPT": TASKS["GPT"]})
    monkeypatch.setattr(training, "TINY", replace(TINY, steps=2, warm_up=1))
    monkeypatch.setattr(common.time, "monotonic", lambda: next(times))
    # The three runs of the first seed begin at 10, 30 and 50 and last for 10.
    with threads(1):
        assert training.main(["--tiny", "--seconds=65", f"--out={tmp_path}"]) == 1
    result = json.loads(written.read_text())
    assert [*stored, len(result["runs"])] == [0, 1, 1, 2]
    assert len(result["left_out"]) == 6
    assert result["failed"][0].endswith("seed 0: RuntimeError: out of memory")
    assert result["failed"][0] in (tmp_path / "training.md").read_text()


def test_the_full_gpt_has_124_million_parameters_and_the_resnet_many_small_tensors():
    with torch.device("meta"):
        gpt, resnet = (task.model(training.FULL) for task in TASKS.values())
    assert sum(param.numel() for param in gpt.parameters()) / 1e6 == pytest.approx(124.4, abs=0.1)
    params = list(resnet.parameters())
    assert len(params) == 331
    assert max(param.numel() for param in params) < 40_000
