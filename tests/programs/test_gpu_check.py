"""The lists of what is checked and measured on a GPU, without one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
SIDE_BY_SIDE = ["bits", "gpu-tests", "memcheck", "racecheck", "synccheck", "initcheck"]
ROWS = {
    "kernels": ["build", "sequences", "fast-path", "bandwidth", *SIDE_BY_SIDE],
    "training": ["build", "training", "peers"],
    "offload": ["build", "equality", "steps", "training"],
    "tests": ["build", "suite"],
}

# A Python that sees a GPU, fails to build, hangs in the hashes, and prints every other command.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  -c*) echo 9.0 ;;
  setup.py*) echo "no compiler"; exit 3 ;;
  *hash_steps.py*) sleep 60 ;;
  *) echo "$PYTHONPATH|$*" ;;
esac
"""


def check(*arguments: str, script: Path = SCRIPT, **environment: str) -> tuple[str, int]:
    """Runs the script; returns what it printed and its exit code."""
    command, env = ["bash", str(script), *arguments], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
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


@pytest.mark.slow
def test_rows_that_fail_or_take_too_long_leave_the_others(tmp_path):
    (tmp_path / "scripts").mkdir()
    copy = Path(shutil.copy(SCRIPT, tmp_path / "scripts"))
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "compute-sanitizer").symlink_to("/bin/false")
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "wheels"}
    printed, code = check("out", script=copy, PYTHON=str(python), SECONDS_IN_ALL="12", **paths)
    assert code == 1
    _, *lines = (tmp_path / "out" / "report.txt").read_text().splitlines()
    results = {line.split()[0]: line.split()[1:3] for line in lines}
    assert results.pop("build") == ["failed", "(3)"]
    assert results.pop("bits") == ["out", "of"]
    assert [results.pop(row) for row in SIDE_BY_SIDE[2:]] == [["failed", "(1)"]] * 4
    assert results.keys() == {"sequences", "fast-path", "bandwidth", "gpu-tests"}
    assert all(result[0] == "passed" for result in results.values())
    assert all(line in printed for line in lines)
    assert f"{tmp_path}:wheels|-m amp_ext.bench" in lines[3]


def test_without_a_gpu_nothing_is_checked(tmp_path):
    printed, code = check(str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert code == 2
    assert "gpu_check.sh: " in printed
    assert not (tmp_path / "out").exists()
