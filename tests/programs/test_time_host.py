"""The program that times the host beside a commit: its table, of the present package twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import amp_ext

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "time_host.py"
ROWS = "SGD, 2 tensors, our scaler"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Path(amp_ext.__file__).parent.parent != ROOT, reason="the checkout is not built"
    ),
]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--quick", "--rows", ROWS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_row_has_the_times_of_both_packages_and_how_far_each_is_from_itself(tmp_path):
    done = run("--installed", ROOT, "--output", tmp_path / "times.json")
    assert done.returncode == 0, done.stderr
    times = json.loads((tmp_path / "times.json").read_text())
    assert list(times) == ["SGD, 2 tensors, our scaler", "SGD, 2 tensors, our scaler, cold"]
    for row, found in times.items():
        assert f" {row} " in done.stdout
        assert found["ratio"] == pytest.approx(found["after"] / found["before"])
        assert found["itself"] >= 1
