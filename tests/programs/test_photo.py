"""The example that fits a photograph: its checkpoints, and what it becomes in less memory."""

from __future__ import annotations

import functools
import json
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("PIL")
PHOTO = Path(__file__).resolve().parent.parent.parent / "examples" / "photo.py"
pytestmark = pytest.mark.slow


@pytest.fixture
def run(run_module) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the example on a small picture, its files in a folder."""
    small = ["--device=cpu", "--size=16", "--width=16"]
    return lambda folder, *options: run_module(
        "photo", *small, "--out", str(folder), *map(str, options), folder=PHOTO.parent
    )


def figures(folder: Path) -> dict[str, Any]:
    (seed,) = json.loads((folder / "photo.json").read_text())["runs"]["fp16 amp_ext"]
    return {name: value for name, value in seed.items() if name != "seconds"}


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(run, tmp_path):
    file = tmp_path / "run.pt"
    whole = run(tmp_path / "whole", "--steps=25")
    part = run(tmp_path / "part", "--steps=9", "--checkpoint", file)
    rest = run(tmp_path / "rest", "--steps=25", "--resume", file, "--checkpoint", file)
    assert [each.returncode for each in (whole, part, rest)] == [0, 0, 0], rest.stderr
    assert figures(tmp_path / "rest") == figures(tmp_path / "whole")
    assert figures(tmp_path / "part")["losses"] == figures(tmp_path / "whole")["losses"][:9]

    for options, words in {
        ("--steps=9",): "--steps must be at least 25, got 9",
        ("--steps=30", "--width=8"): "--resume: the run must be that of",
        ("--seeds=2",): "--checkpoint and --resume take one seed, got --seeds 2",
    }.items():
        refused = run(tmp_path, "--resume", file, *options)
        assert refused.returncode == 2
        assert words in refused.stderr


def test_a_file_that_is_no_checkpoint_is_refused(run, tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    missing = tmp_path / "missing.pt"
    for file, words in {
        tmp_path / "text.pt": "must be a file that --checkpoint wrote",
        missing: "must be a file that --checkpoint wrote: [Errno 2] No such file",
    }.items():
        refused = run(tmp_path, "--resume", file)
        assert refused.returncode == 2
        assert words in refused.stderr


@functools.cache
def low_memory() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PHOTO.parent)
        return runpy.run_path(str(PHOTO.parent / "low_memory.py"))


@functools.cache
def psnrs(name: str) -> list[float]:
    """Of the photograph with three seeds, in dB."""
    example = low_memory()
    (configuration,) = [each for each in example["CONFIGURATIONS"] if each.name == name]
    settings = example["PHOTO"]
    picture = example["photo"].load_photo(None, settings.size)
    return [example["train_photo"](configuration, picture, settings, seed) for seed in range(3)]


@pytest.mark.parametrize("name", ["bf16 + split, bf16 states", "bf16 + split, 8bit-bf16 states"])
def test_a_photograph_in_less_memory_is_as_good_as_with_float32_masters_and_states(name):
    base = psnrs("bf16 + masters, fp32 states")
    assert abs(mean(psnrs(name)) - mean(base)) <= 0.3
