"""The lists of what is checked and measured on a GPU, without one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
SIDE_BY_SIDE = ["bits", "gpu-tests", "memcheck", "racecheck", "synccheck", "initcheck"]
ROWS = {
    "kernels": ["build", "sequences", "fast-path", "bandwidth", *SIDE_BY_SIDE],
    "training": ["build", "training", "peers"],
    "offload": ["build", "equality", "steps", "training"],
    "muon": ["build", "float32", "bfloat16", "muon-bits", "muon-memcheck"],
    "tests": ["build", "suite"],
}


def check(*arguments: str) -> tuple[str, int]:
    """Runs the script; returns what it printed and its exit code."""
    done = subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr, done.returncode


@pytest.mark.parametrize("name", ROWS)
def test_no_list_takes_more_than_nine_minutes_and_no_program_more_than_its_row(name):
    printed, code = check("--list", name, "--dry-run")
    assert code == 0
    limits = {row: int(s) for row, s in re.findall(r"^(\S+), at most (\d+) s:$", printed, re.M)}
    assert list(limits) == ROWS[name]
    longest = max((limits.pop(row) for row in SIDE_BY_SIDE if row in limits), default=0)
    assert printed.endswith(f"\n{sum(limits.values()) + longest} s at most\n")
    assert sum(limits.values()) + longest <= 540
    for limit, seconds in re.findall(r"at most (\d+) s:\n.* --seconds (\d+)", printed):
        assert int(seconds) < int(limit)
    for file in re.findall(r"\b(?:tests|scripts|benchmarks)/[\w/]+\.py", printed):
        assert (SCRIPT.parents[1] / file).exists(), file


def test_a_list_that_is_unknown_is_refused():
    printed, code = check("--list", "all")
    assert code == 2
    assert printed.startswith("usage: ")
