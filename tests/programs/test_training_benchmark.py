"""The benchmark that trains two models as a whole, small."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")

import common
import gradient_release
import plot
import training
from training import NARROW, SIDES, TASKS, TINY

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with the files of a tiny run, and what these say."""
    folder, threads = tmp_path_factory.mktemp("training"), torch.get_num_threads()
    assert training.main(["--device=cpu", "--tiny", f"--out={folder}"]) == 0
    torch.set_num_threads(threads)
    return folder, json.loads((folder / "training.json").read_text())


@pytest.mark.slow
def test_every_side_trains_both_models_with_three_seeds(trained):
    folder, result = trained
    assert result["failed"] == result["left_out"] == []
    names = [(run["seed"], run["model"], run["group"], run["side"]) for run in result["runs"]]
    sides = [(side.group, side.name) for side in SIDES]
    assert names == [(seed, name, *side) for seed in range(3) for name in TASKS for side in sides]
    for run in result["runs"]:
        assert len(run["losses"]) == TINY.steps
        assert min(run["rate"], run["step_ms"], run["update_ms"]) > 0
        assert sum(run["losses"][-5:]) < sum(run["losses"][:5])
    assert (folder / "training.md").read_text().count(
        "±"
    ) == 22 + 16  # losses, and what lies between ours and torch's
    plot.draw(result, folder / "again.png")
    assert (folder / "training.png").read_bytes() == (folder / "again.png").read_bytes()


@pytest.mark.slow
def test_sides_of_a_group_see_the_same_and_learn_the_same(trained):
    _, result = trained
    runs = {(run["model"], run["side"], run["group"], run["seed"]): run for run in result["runs"]}
    for (model, side, group, seed), run in runs.items():
        by_torch = "torch, masters by hand" if group == NARROW else "torch"
        torchs = runs[model, by_torch, group, seed]
        assert run["losses"][0] == torchs["losses"][0], (model, side)
        assert run["losses"][-1] == pytest.approx(torchs["losses"][-1], rel=0.05), (model, side)


@pytest.mark.slow
def test_sides_with_states_in_host_memory_learn_with_the_same_bits(trained):
    _, result = trained
    losses = {(run["model"], run["side"], run["seed"]): run["losses"] for run in result["runs"]}
    for model, seed in itertools.product(TASKS, range(3)):
        for plain, offloaded in (
            ("amp_ext, float32 masters", "amp_ext, offloaded"),
            ("amp_ext, 5 bytes", "amp_ext, offloaded, 5 bytes"),
        ):
            assert losses[model, offloaded, seed] == losses[model, plain, seed]


@pytest.mark.slow
def test_bytes_are_those_of_parameters_gradients_masters_and_moments(trained):
    _, result = trained
    sizes = {
        (run["group"], run["side"]): run["bytes_kept"] / run["parameters"]
        for run in result["runs"]
        if run["model"] == "GPT"
    }
    # Parameter, gradient, master with its gradient in torch's loop, two moments.
    expected = [
        16,
        16,
        16,
        16,
        2 + 2 + 4 + 4 + 8,
        2 + 2 + 4 + 8,
        2 + 2 + 2 + 4,
        2 + 2 + 1 + 2,
        2 + 1 + 2,
        2 + 2 + 2 + 4 + 8,  # the host copy of the parameter
        2 + 2 + 1 + 2,
    ]
    for side, size in zip(SIDES, expected, strict=True):
        # Steps, and the exponents of blocks whose moments have 8 bits.
        assert size <= sizes[side.group, side.name] < size + 0.3, side.name


def test_a_run_that_fails_leaves_the_others_and_none_begins_too_late(monkeypatch, tmp_path):
    train, times = training.train, itertools.count(0, 10)

    def failing(name, side, *rest):
        if side.ours:
            raise RuntimeError("out of memory")
        return train(name, side, *rest)

    monkeypatch.setattr(training, "train", failing)
    monkeypatch.setattr(common.time, "monotonic", lambda: next(times))
    stored: list[int] = []
    # The three runs of the first seed begin at 10, 30 and 50 and last for 10.
    result = training.train_all(
        [("GPT", side) for side in SIDES[:3]],
        replace(TINY, steps=2, warm_up=1),
        CPU,
        limit=65,
        store=lambda result: stored.append(len(result["runs"])),
    )
    assert stored == [1, 1, 2]
    assert len(result["left_out"]) == 6
    assert result["failed"][0].endswith("seed 0: RuntimeError: out of memory")
    assert result["failed"][0] in training.markdown(result)
    plot.draw(result, tmp_path / "training.png")


def test_a_pattern_chooses_the_sides(monkeypatch, capsys):
    monkeypatch.setattr(training, "train", lambda name, side, *rest: {}[side.name])
    threads = torch.get_num_threads()
    assert training.main(["--tiny", "--sides=offloaded$"]) == 1
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert printed.count("failed") == printed.count("amp_ext, offloaded, seed") == 6


def test_the_full_gpt_has_124_million_parameters_and_the_resnet_many_small_tensors():
    with torch.device("meta"):
        gpt, resnet = (task.model(training.FULL) for task in TASKS.values())
    assert sum(param.numel() for param in gpt.parameters()) / 1e6 == pytest.approx(124.4, abs=0.1)
    params = list(resnet.parameters())
    assert len(params) == 331
    assert max(param.numel() for param in params) < 40_000


@pytest.mark.slow
def test_hooks_of_released_gradients_are_timed(capsys):
    threads = torch.get_num_threads()
    assert gradient_release.main(["--rounds=3"]) == 0
    torch.set_num_threads(threads)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [[n, s] for n in ("10", "1000") for s in ("no", "yes")]
    for row in rows:
        assert float(row[4]) == pytest.approx(float(row[2]) / float(row[3]), abs=0.02)
