"""The example that fits a photograph: its checkpoints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
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
    whole = run(tmp_path / "whole", "--steps=12")
    part = run(tmp_path / "part", "--steps=5", "--checkpoint", file)
    rest = run(tmp_path / "rest", "--steps=12", "--resume", file, "--checkpoint", file)
    assert [each.returncode for each in (whole, part, rest)] == [0, 0, 0], rest.stderr
    assert figures(tmp_path / "rest") == figures(tmp_path / "whole")
    assert figures(tmp_path / "part")["losses"] == figures(tmp_path / "whole")["losses"][:5]

    for options, words in {
        ("--steps=5",): "--steps must be at least 12, got 5",
        ("--steps=15", "--width=8"): "--resume: the run must be that of",
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
