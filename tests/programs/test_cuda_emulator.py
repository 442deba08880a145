"""The emulator of CUDA reports what is wrong in a kernel, and nothing in one that is right."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_emulator import build
from harness import HANGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(build.why_no_emulator()), reason=str(build.why_no_emulator())),
]

SEEDS = (None, 0, 1, 2)


BROKEN = build.EMULATOR / "broken.cu"
# Where the report must say that a fault lies, by the comment that ends the line.
AT = {
    line.rpartition("// ")[2]: rf"broken\.cu:{number}\b"
    for number, line in enumerate(BROKEN.read_text().splitlines(), 1)
}


# A broken kernel, what it is compiled with, and what its report must say.
FAULTS = [
    ("past_shared", "address", rf"WRITE of size 4[^#]*#0 .*past_shared<false>"
          rf".*{AT['past_shared']}"),
    ("past_shared", "undefined", rf"{AT['past_shared']}.*index 64 out of bounds for type"),
    ("misaligned_load", "undefined", "misaligned address .* requires 16 byte alignment"),
    ("missing_barrier", "thread", r"data race(.|\n)*missing_barrier<false>"
          rf".*{AT['missing_barrier']}"),
    ("missing_warp_barrier", "thread", rf"data race(.|\n)*{AT['missing_warp_barrier']}"),
    ("divergent_barrier", "", r"cuda_emulator: thread 0 of block 0 waits at __syncthreads "
          rf"\(.*{AT['divergent_barrier']}, in \w+<false>\) for thread 16, which has exited"),
    ("two_barriers", "", rf"thread 0 of block 0 waits at __syncthreads \(.*"
          rf"{AT['two_barriers']}, .* for thread 16, which waits at __syncthreads \(.*"
          rf"{AT['the other barrier']}"),
    ("absent_lane", "", rf"thread 0 .* waits at __shfl_down_sync .*{AT['absent_lane']}.* for "
          r"thread 16, which has exited"),
    ("lane_outside_mask", "", "thread 16 .* reads from a lane outside its mask at __shfl"),
    ("uninitialised_shared", "", "wrong result at 0: -?nan"),
    ("large_arguments", "", "the launch fails with error 1"),
]  # fmt: skip
IDS = ["-".join(filter(None, names)) for *names, _ in FAULTS]


@pytest.fixture(scope="session")
def programs() -> dict[str, Path]:
    """The program by its sanitizers, all compiled at once."""
    sanitizers = ("", "address", "undefined", "thread")
    paths = build.build_programs([([BROKEN], each) for each in sanitizers])
    return dict(zip(sanitizers, paths, strict=True))


@functools.cache
def without_random_addresses() -> list[str]:
    """The command that keeps a program's memory where older sanitizers expect it, if it works."""
    command = ["setarch", "-R"]
    works = shutil.which("setarch") and subprocess.run([*command, "true"], capture_output=True)
    return command if works and works.returncode == 0 else []


def run(program: Path, *arguments: str, seed: int | None = None) -> tuple[int, str]:
    """Returns the exit status of a program and what it reports."""
    left_out = ("LD_PRELOAD", "CUDA_EMULATOR_SEED")
    environment = {name: text for name, text in os.environ.items() if name not in left_out}
    environment["TSAN_OPTIONS"] = "atexit_sleep_ms=0"
    if seed is not None:
        environment["CUDA_EMULATOR_SEED"] = str(seed)
    done = subprocess.run(
        [*without_random_addresses(), program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(("kernel", "sanitizers", "wanted"), FAULTS, ids=IDS)
def test_a_broken_kernel_is_reported_and_the_repaired_one_is_not(
    kernel, sanitizers, wanted, programs
):
    program = programs[sanitizers]
    status, report = run(program, kernel)
    assert status != 0
    assert re.search(wanted, report), report
    assert {run(program, kernel, "repaired", seed=seed) for seed in SEEDS} == {(0, "")}


@pytest.mark.parametrize("kernel", ["missing_barrier", "missing_warp_barrier"])
def test_without_sanitizers_a_missing_barrier_shows_in_a_random_order(kernel, programs):
    program = programs[""]
    assert run(program, kernel) == (0, ""), "in order nothing is wrong: this test proves nothing"
    statuses = [run(program, kernel, seed=seed)[0] for seed in range(8)]
    assert any(statuses), statuses
    assert [run(program, kernel, seed=seed)[0] for seed in range(8)] == statuses, "a seed, an order"
