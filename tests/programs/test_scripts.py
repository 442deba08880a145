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


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ("running build_ext\n[3/17] c++ -o united.o\n", "compiled 3 of 17"),
        ("Collecting torch==2.13.0\n\n", "Collecting torch==2.13.0"),
        ("x" * 100, "x" * 77 + "..."),
        ("", "started"),
    ],
)
def test_the_last_line_says_how_far_a_command_is(output, wanted):
    assert runpy.run_path(str(SCRIPTS / "progress.py"))["how_far"](output) == wanted


def test_a_command_that_takes_long_is_told_of_until_it_fails(tmp_path, capsys):
    go_on, log = tmp_path / "go-on", tmp_path / "folder" / "slow.log"
    program = (
        "import pathlib, sys, time\nprint('[1/2] one', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nsys.exit('it failed')"
    )
    main = runpy.run_path(str(SCRIPTS / "progress.py"))["main"]

    def how_far(text: str) -> str:
        if text:
            go_on.touch()
        return f"so far: {text}"

    main.__globals__["how_far"] = how_far
    assert main(log, [sys.executable, "-c", program, str(go_on)], interval=0.1) == 1
    out = capsys.readouterr().out
    assert "0:00, so far: " in out
    assert out.endswith("[1/2] one\nit failed\n")


def test_each_part_of_the_stress_passes_when_it_is_small():
    parts = [line.partition(":")[0] for line in lines_of("stress.py", "--small")]
    assert parts == list(runpy.run_path(str(SCRIPTS / "stress.py"))["PARTS"])


def test_the_hashes_of_a_few_rows_are_those_of_the_file():
    (line,) = lines_of("hash_steps.py", "--engines", "plain", "--only", "* fp64 fp32 *")
    assert line == "plain: 5 rows, 0 moved, 0 new, 0 gone"


def test_the_list_of_what_users_can_name_is_right(run_module):
    done = run_module("surface", "--check", "--python", folder=SCRIPTS)
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
