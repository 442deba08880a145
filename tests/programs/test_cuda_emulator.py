"""The emulator of CUDA reports what is wrong in a kernel, and nothing in one that is right."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cuda_emulator import build
from reference import same_bits
from torch.nn import Parameter

import amp_ext
from amp_ext import ops

pytestmark = pytest.mark.slow

SEEDS = (None, 0, 1, 2)
OLD_DRIVER = "12000"  # takes 4096 bytes of arguments


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
IDS = ["-".join(filter(None, fault[:2])) for fault in FAULTS]

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
    left_out = ("LD_PRELOAD", "CUDA_EMULATOR_SEED")
    environment = {name: text for name, text in os.environ.items() if name not in left_out}
    environment |= {"CUDA_EMULATOR_DRIVER_VERSION": OLD_DRIVER, "TSAN_OPTIONS": "atexit_sleep_ms=0"}
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


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_a_broken_kernel_is_reported_and_the_repaired_one_is_not(fault, programs):
    program = programs[fault.source, fault.sanitizers]
    status, report = run(program)
    assert status != 0
    assert re.search(fault.report, report), report
    assert {run(program, "repaired", seed=seed) for seed in SEEDS} == {(0, "")}


@pytest.mark.parametrize("source", PLAIN)
def test_a_missing_barrier_shows_in_a_random_order(source, programs):
    program = programs[source, ""]
    assert run(program) == (0, ""), "in order nothing is wrong: this test would prove nothing"
    statuses = [run(program, seed=seed)[0] for seed in range(8)]
    assert any(statuses), statuses
    assert [run(program, seed=seed)[0] for seed in range(8)] == statuses, "a seed is one order"


@pytest.mark.parametrize("sanitizer", ["undefined", "thread"])
def test_shuffles_votes_atomics_and_conversions_do_what_cuda_says(sanitizer, programs):
    assert {run(programs["functions", sanitizer], seed=seed) for seed in SEEDS} == {(0, "")}


def trained_on_both_engines() -> list[list[torch.Tensor]]:
    """Returns what the CPU engine and the emulated kernels make of more than a launch holds."""
    from conftest import emulated_cuda

    trained = []
    for engine in (contextlib.nullcontext, emulated_cuda):
        torch.manual_seed(0)
        params = [Parameter(torch.randn(size)) for size in [9001, *([0, 1, 7, 300] * 250)]]
        found_inf = torch.zeros(())
        with engine():
            for optimizer in (amp_ext.optim.Adam(params), amp_ext.optim.SGD(params, momentum=0.9)):
                for _ in range(2):
                    for param in params:
                        param.grad = torch.randn_like(param)
                    optimizer.step()
            grads = [param.grad for param in params]
            grads[-1][299] = float("inf")
            ops.check_finite_(grads, found_inf)
        trained.append([found_inf, *(param.detach() for param in params)])
    return trained


def test_the_kernels_are_right_in_random_order_and_with_small_arguments(under_isa, monkeypatch):
    monkeypatch.setenv("CUDA_EMULATOR_SEED", "1")
    monkeypatch.setenv("CUDA_EMULATOR_DRIVER_VERSION", OLD_DRIVER)
    _, (expected, actual) = under_isa(trained_on_both_engines, None)
    assert expected[0] == 1.0
    assert all(map(same_bits, actual, expected))
