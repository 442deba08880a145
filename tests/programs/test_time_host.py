"""The program that times the host beside a commit: its table, of the present package twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import amp_ext

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "time_host.py"
ROWS = ["SGD, 2 tensors, our scaler", "SGD, 2 tensors, our scaler, cold"]
ROWS += ["kernel: SGD momentum fp32", "kernel: unscale_ torch.bfloat16"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Path(amp_ext.__file__).parent.parent != ROOT, reason="the checkout is not built"
    ),
]


def test_a_row_has_the_times_of_both_packages_and_how_far_each_is_from_itself():
    command = [sys.executable, SCRIPT, "--quick", "--rows", "|".join(ROWS), "--installed", ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [line[0] for line in lines] == ROWS
    for _, *texts in lines:
        before, after, ratio, itself = (float(text.split()[0]) for text in texts)
        assert ratio == pytest.approx(after / before, rel=0.1)  # of figures that were rounded
        assert itself >= 1
