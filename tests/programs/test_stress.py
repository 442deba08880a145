"""The program that takes steps of unusual size and number, made small, and what it notices."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "stress.py"
STRESS = runpy.run_path(str(SCRIPT))
pytestmark = pytest.mark.slow


def test_each_part_passes_when_it_is_small():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--small"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    parts = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert parts == list(STRESS["PARTS"])
