"""The emulator of CUDA reports what is wrong in a kernel, and nothing in one that is right."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_emulator import build

TESTS = Path(__file__).resolve().parent
SEEDS = [None, *range(4)]
OLD_DRIVER = 12000  # takes 4096 bytes of arguments


class Fault(NamedTuple):
    """A broken kernel, what it is compiled with, and what its report must say."""

    source: str
    sanitizers: str
    report: str


FAULTS = [
    Fault("past_tensor", "address", r"heap-buffer-overflow[^#]*WRITE of size 4[^#]*#0 .*fill<false>"
          r".*past_tensor\.cu:7"),
    Fault("past_shared", "address", r"WRITE of size 4[^#]*#0 .*shift<false>.*past_shared\.cu:12"),
    Fault("past_shared", "undefined", r"past_shared\.cu:12.*index 64 out of bounds for type"),
    Fault("misaligned_load", "undefined", "misaligned address .* requires 16 byte alignment"),
    Fault("missing_barrier", "thread", r"data race(.|\n)*shift<false>.*missing_barrier\.cu:15"),
    Fault("missing_warp_barrier", "thread", r"data race(.|\n)*missing_warp_barrier\.cu:14"),
    Fault("divergent_barrier", "", r"meet<false>: thread 0 of block 0 waits at __syncthreads \(.*"
          r"divergent_barrier\.cu:7, .*\) for thread 16, which has exited"),
    Fault("two_barriers", "", r"thread 0 of block 0 waits at __syncthreads \(.*two_barriers\.cu:7, "
          r".* for thread 16, which waits at __syncthreads \(.*two_barriers\.cu:9"),
    Fault("early_exit", "", r"any_negative<false>: thread 0 .* waits at __syncthreads_or .* for "
          r"thread 50, which has exited"),
    Fault("absent_lane", "", r"thread 0 .* waits at __shfl_down_sync .*absent_lane\.cu:10.* for "
          r"thread 16, which has exited"),
    Fault("lane_outside_mask", "", "thread 16 .* reads from a lane outside its mask at __shfl"),
    Fault("uninitialised_shared", "", "wrong result at 0: -?nan"),
    Fault("lost_tail", "", "wrong result at 100"),
    Fault("wrong_tensor", "", "wrong result at 1"),
    Fault("large_arguments", "", "the launch fails with error 1"),
]  # fmt: skip
ROWS = [pytest.param(f, id="-".join(filter(None, (f.source, f.sanitizers)))) for f in FAULTS]

# The others, which are found by their order or not at all.
PLAIN = ["missing_barrier", "missing_warp_barrier"]


@pytest.fixture(scope="session")
def programs() -> dict[tuple[str, str], Path]:
    """The programs by source and sanitizers, all compiled at once."""
    names = [(f"broken/{fault.source}", fault.sanitizers) for fault in FAULTS]
    names += [(f"broken/{source}", "") for source in PLAIN]
    names += [("functions", sanitizer) for sanitizer in ("undefined", "thread")]
    paths = build.build_programs([([build.EMULATOR / f"{name}.cu"], s) for name, s in names])
    return {(path.name, s): path for path, (_, s) in zip(paths, names, strict=True)}


@functools.cache
def without_random_addresses() -> list[str]:
    """The command that keeps a program's memory where older sanitizers expect it, if it works."""
    command = ["setarch", "-R"]
    works = shutil.which("setarch") and subprocess.run([*command, "true"], capture_output=True)
    return command if works and works.returncode == 0 else []


def run(program: Path, *arguments: str, seed: int | None = None) -> tuple[int, str]:
    """Returns the exit status of a program and what it reports."""
    environment = os.environ | {
        "CUDA_EMULATOR_DRIVER_VERSION": str(OLD_DRIVER),
        "TSAN_OPTIONS": "atexit_sleep_ms=0",
    }
    environment.pop("LD_PRELOAD", None)
    environment.pop("CUDA_EMULATOR_SEED", None)
    if seed is not None:
        environment["CUDA_EMULATOR_SEED"] = str(seed)
    done = subprocess.run(
        [*without_random_addresses(), program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("fault", ROWS)
def test_a_broken_kernel_is_reported(fault, programs):
    status, report = run(programs[fault.source, fault.sanitizers])
    assert status != 0
    assert re.search(fault.report, report), report


@pytest.mark.parametrize("seed", SEEDS, ids=str)
@pytest.mark.parametrize("fault", ROWS)
def test_the_repaired_kernel_is_not(fault, seed, programs):
    program = programs[fault.source, fault.sanitizers]
    assert run(program, "repaired", seed=seed) == (0, "")


@pytest.mark.parametrize("source", PLAIN)
def test_a_missing_barrier_shows_in_a_random_order(source, programs):
    program = programs[source, ""]
    assert run(program) == (0, ""), "in order nothing is wrong: this test would prove nothing"
    statuses = [run(program, seed=seed)[0] for seed in range(8)]
    assert any(statuses), statuses
    assert [run(program, seed=seed)[0] for seed in range(8)] == statuses, "a seed is one order"


@pytest.mark.parametrize("seed", SEEDS, ids=str)
@pytest.mark.parametrize("sanitizer", ["undefined", "thread"])
def test_shuffles_votes_atomics_and_conversions_do_what_cuda_says(sanitizer, seed, programs):
    assert run(programs["functions", sanitizer], seed=seed) == (0, "")


def test_the_kernels_are_right_in_random_order_and_with_small_arguments():
    environment = os.environ | {
        "CUDA_EMULATOR_SEED": "1",
        "CUDA_EMULATOR_DRIVER_VERSION": str(OLD_DRIVER),
    }
    files = [TESTS / f"test_{name}.py" for name in ("adam", "sgd", "check_finite")]
    chosen = "emulated and (fp32 and (three_thousand or one_step) or one_bad_tensor)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", chosen, *files],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b\d\d+ passed", done.stdout), done.stdout
