"""Programs of scripts/ that others rely on, run small."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from harness import HANGS

import amp_ext

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
ROWS = ["SGD, 2 tensors, our scaler"]
ROWS += ["kernel: SGD momentum fp32 x 2048", "kernel: unscale_ torch.bfloat16 x 2048"]
pytestmark = pytest.mark.slow


def lines_of(script: str, *arguments: object) -> list[str]:
    """Returns what a script prints."""
    command = [sys.executable, SCRIPTS / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_part_of_the_stress_passes_when_it_is_small():
    parts = [line.partition(":")[0] for line in lines_of("stress.py", "--small")]
    assert parts == list(runpy.run_path(str(SCRIPTS / "stress.py"))["PARTS"])


def test_the_hashes_of_a_few_rows_are_those_of_the_file():
    (line,) = lines_of("hash_steps.py", "--engines", "plain", "--only", "* fp64 fp32 *")
    assert line == "plain: 6 rows, 0 moved, 0 new, 0 gone"


def test_the_list_of_what_users_can_name_is_right(run_module):
    done = run_module("surface", "--check", folder=SCRIPTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(Path(amp_ext.__file__).parent.parent != ROOT, reason="the checkout isn't built")
def test_a_timed_row_has_the_times_of_both_packages_and_how_far_each_is_from_itself():
    options = ("--quick", "--elements", "2048", "--installed", ROOT)
    printed = lines_of("time_host.py", "--rows", "|".join(ROWS), *options)
    lines = [line.strip("| ").split(" | ") for line in printed[2:]]
    assert [line[0] for line in lines] == ROWS
    for _, *texts in lines:
        before, after, ratio, itself = (float(text.split()[0]) for text in texts)
        assert ratio == pytest.approx(after / before, rel=0.1)  # of figures that were rounded
        assert itself >= 1
