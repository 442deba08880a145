"""Times several implementations of the same work in turns, and takes the fastest run of each.

A row of the results is a kind of work, such as a step of AdamW with a scaler, on a list of shapes.
A side is one implementation of that work, for example amp_ext's or torch's fused optimizer.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

import amp_ext
from amp_ext import ops
from amp_ext.bench.steps import Program, ShapeList, Step, Work
from amp_ext.binary import build_folder

STREAMING_ELEMENTS = {"cpu": 64_000_000, "cuda": 256_000_000}  # float32, many times the caches
ROUNDS = 6  # number of turns of each side


def describe(device: torch.device) -> list[str]:
    """Describes the hardware, versions, commit of the build, and date in lines of text."""
    found = re.search(r"model name\s*: *(.+)", Path("/proc/cpuinfo").read_text())
    gpu = f"{torch.cuda.get_device_name(device)}; " if device.type == "cuda" else ""
    cpu = f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} threads"
    info = build_folder() / "_build_info.json"
    commit = (json.loads(info.read_text())["git"] if info.exists() else None) or "unknown"
    return [
        f"{gpu}{cpu}, load average {os.getloadavg()[0]:.1f}",
        f"torch {torch.__version__}, Python {platform.python_version()}, amp_ext "
        f"{amp_ext.__version__} ({ops.cpu_isa()}), commit {commit[:12]}, {datetime.date.today()}",
    ]


def make_streaming(device: torch.device) -> tuple[Step, int]:
    """Returns an operation that measures the memory bandwidth, and the bytes that it moves."""
    tensor = torch.ones(STREAMING_ELEMENTS[device.type], device=device)
    if device.type == "cpu":
        return lambda: tensor.mul_(1.0000001), 2 * tensor.nbytes
    target = torch.empty_like(tensor)
    return lambda: target.copy_(tensor), 2 * tensor.nbytes


def bytes_of(work: Work, program: Program) -> tuple[float, float]:
    """Returns the bytes per element that our side stores, and the bytes that its step moves.

    A step reads or writes each operand once. A scaler or a norm reads the gradient once more.
    """
    states = [value for state in program.optimizer.state.values() for value in state.values()]
    elements = sum(param.numel() for param in program.params)
    kept = sum(tensor.nbytes for tensor in states if tensor.dim() > 0) / elements
    size = work.dtype.itemsize
    reads = 0 if work.masters is True else size  # with a float32 master, the parameter is not read
    scan = size if "scaler" in work.parts or "clip" in work.parts else 0
    # The float32 average is read and written, and the weight that it averages is read.
    average = 4 if "average" in work.parts else 0
    moved = size + reads + size + 2 * kept + scan + 3 * average
    return 2 * size + kept + average, moved


def measure_row(
    work: Work,
    shapes: ShapeList,
    programs: Mapping[str, Program],
    streaming: tuple[Step, int],
    run: Callable[[Step], list[float]],
) -> dict[str, Any]:
    """Measures one row; returns its description, the figures of each side, and ratios to ours.

    Args:
        work: The work of a step.
        shapes: The shapes of the parameters.
        programs: The program of each side, keyed by side. "ours" must be one of them.
        streaming: The result of :func:`make_streaming`, timed in turns with the sides. Rows of many
            small tensors measure the host and leave it out.
        run: A function that runs a step several times and returns the seconds of each run, such as
            :func:`run_times`.
    """
    steps = {side: program.step for side, program in programs.items()}
    for step in steps.values():
        step()  # creates the optimizer states
    stored, moved = bytes_of(work, programs["ours"])
    steps |= {} if shapes.many_small else {"streaming": streaming[0]}
    least = dict.fromkeys(steps, math.inf)
    for turn in range(ROUNDS):  # alternates the order: clock changes then affect all sides alike
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            least[name] = min(least[name], *run(steps[name]))
    stream = least.pop("streaming", None)
    speed = None if stream is None else 1e-9 * streaming[1] / stream
    figures = {}
    for side, seconds in least.items():
        per_element = 1e9 * seconds / shapes.elements
        share = moved / per_element / speed if speed else None
        figures[side] = {
            "seconds": seconds,
            "ns_per_element": per_element,
            "share_of_streaming": share,
        }
    return {
        "work": work.name,
        "shapes": shapes.name,
        "many_small": shapes.many_small,
        "tensors": len(shapes.sizes),
        "elements": shapes.elements,
        "bytes_per_element": moved,
        "bytes_stored": stored,
        "streaming_gb_per_s": speed,
        "sides": figures,
        "ratios": {side: least[side] / least["ours"] for side in least if side != "ours"},
    }


def run_times(step: Step, seconds: float) -> list[float]:
    """Runs a step repeatedly for ``seconds`` in all; returns the seconds of each run."""
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).times
