"""Times amp_ext's scaler and optimizers against torch's: ``python -m amp_ext.bench``.

A row of the results is a kind of work, such as a step of AdamW with a scaler, on a list of shapes.
A side is one implementation of that work, for example amp_ext's or torch's fused optimizer. All
sides of a row run in turns, and the fastest run of each counts.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter, ParameterList
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.benchmark import Timer

import amp_ext
from amp_ext.binary import build_info

Step = Callable[[], object]

DECAY = 0.999  # decay of the exponential moving averages of weights
MAX_NORM = 1.0  # far below the gradient norm, so that every side clips
STREAMING_ELEMENTS = {"cpu": 64_000_000, "cuda": 256_000_000}  # float32, many times the caches
ROUNDS = 6  # number of turns of each side
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STATES: dict[str, Any] = {
    "16-bit states": None,  # states in the parameter's dtype, rounded to nearest as in torch
    "bf16 states": torch.bfloat16,  # dithered: rounded up or down in turns
    "8bit-bf16 states": "8bit-bf16",
    "8bit states": "8bit",
}

#: The rows that are timed on all shapes: a work, as :class:`Work` reads it, and the sides beside
#: ours. "fused", "foreach" and "default" are torch's optimizer with that option or without; the
#: last two are slow, so only the first row has them. "by_hand" is a hand-written loop with float32
#: masters and torch's fused optimizer, "in_float32" our step with float32 masters and moments, and
#: "swa_utils" our step with torch's average.
ROWS = {
    "AdamW fp32 + scaler": ["fused", "foreach", "default"],
    "AdamW fp32 + scaler + clip": ["fused"],
    "AdamW fp16 + master + scaler": ["by_hand"],
    "AdamW bf16 + master + scaler + clip": ["by_hand"],
    "SGD fp32 + momentum + scaler": ["fused"],
    "AdamW fp32": ["fused"],
    "AdamW fp32 + average": ["swa_utils"],
}

#: The rows in less memory, which are timed on the first shapes alone, and not with ``--quick``.
LOW_MEMORY = {
    f"AdamW {params} + {states} states": ["in_float32"]
    for states in ("bf16", "8bit-bf16", "8bit")
    for params in ("bf16 + split", "bf16 + split8", "bf16", "fp32")
}
LOW_MEMORY |= {"AdamW bf16 + split": ["in_float32"], "AdamW bf16 + 16-bit states": ["fused"]}


class Work:
    """The work of one step of a scaler and an optimizer, without the backward pass.

    Attributes:
        name: The name in tables, such as "AdamW fp32 + scaler": optimizer, dtype and parts.
        optimizer: "AdamW" or "SGD" (with momentum).
        dtype: The dtype of parameters and gradients.
        parts: What follows in the name: "scaler" if the step runs under a gradient scaler, "clip"
            if gradients are clipped by their norm, "average" for a moving average of the weights.
        masters: The option ``master_weights`` of our optimizers, which is False without "master",
            "split" or "split8" in the name.
        state_dtype: The option ``state_dtype`` of our optimizers, which is float32 without a key of
            ``STATES`` in the name.
    """

    def __init__(self, name: str) -> None:
        plain, *self.parts = name.split(" + ")
        self.name = name
        self.optimizer, dtype = plain.split()
        self.dtype = DTYPES[dtype]
        self.masters = next((p for p in self.parts if "split" in p), "master" in self.parts)
        self.state_dtype = next((STATES[p] for p in self.parts if p in STATES), torch.float32)


class ShapeList(NamedTuple):
    """The shapes of the parameters, with a name for the tables."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    many_small: bool = False  # True if the host's overhead takes most of the time


def uniform(count: int, size: int) -> ShapeList:
    """Returns ``count`` shapes ``[size / 32, 32]``; the row length suits 8-bit states."""
    short = f"{size // 10**6}M" if size >= 10**6 else f"{size // 1000}k" if size >= 1000 else size
    return ShapeList(f"{count:,} × {short}", ((size // 32, 32),) * count, size < 1000)


def choose_rows(device_type: str, quick: bool) -> dict[str, tuple[Work, ShapeList, list[str]]]:
    """Returns the rows for device type "cpu" or "cuda" by name: work, shapes and sides."""
    if device_type == "cpu":
        sizes = [(4, 8_000_000), (300, 100_000), (1_000, 64), (1, 64_000_000), (10_000, 64)]
    else:
        sizes = [(1, 256_000_000), (600, 100_000), (1_000, 64), (4, 64_000_000), (10_000, 64)]
    every = [uniform(*size) for size in sizes[: 3 if quick else 5]]
    return {
        row_name(Work(name), shapes): (Work(name), shapes, ["ours", *sides])
        for shapes in every
        for name, sides in (ROWS if quick or shapes != every[0] else ROWS | LOW_MEMORY).items()
    }


def row_name(work: Work, shapes: ShapeList) -> str:
    """Returns the name that ``--filter`` searches, with "x" for "×", which is hard to type."""
    return f"{work.name}, {shapes.name}".replace("×", "x")


def make_params(work: Work, shapes: ShapeList, device: torch.device) -> list[Parameter]:
    """Makes normally distributed parameters and gradients with standard deviation 0.01."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for size in shapes.sizes:
        values = 0.01 * torch.randn(size, generator=generator, device=device)
        params.append(Parameter(values.to(work.dtype)))
        params[-1].grad = params[-1].detach().clone()
    return params


class Program(NamedTuple):
    """One side's optimizer with its parameters, and a function that takes a training step."""

    params: list[Parameter]
    optimizer: torch.optim.Optimizer
    step: Step
    average: Any = None  # keeps the WeightAverage alive; None without an average


def make_program(side: str, work: Work, params: list[Parameter]) -> Program:
    """Makes the optimizer, scaler and step of ``side``, as the comment on ``ROWS`` says."""
    options: dict[str, Any] = dict(OPTIONS[work.optimizer])
    if side in ("ours", "in_float32", "swa_utils"):
        if side != "in_float32":
            options |= {"master_weights": work.masters, "state_dtype": work.state_dtype}
        if work.dtype != torch.float32 and not work.masters and work.state_dtype == torch.float32:
            options["rounding"] = "nearest"  # torch rounds in this way
        options["max_grad_norm"] = MAX_NORM if "clip" in work.parts else None
        optimizer = getattr(amp_ext.optim, work.optimizer)(params, **options)
        average: Any = None
        if side == "swa_utils":
            model = ParameterList(params)
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
        elif "average" in work.parts:
            average = amp_ext.optim.WeightAverage(optimizer, DECAY)
        return Program(params, optimizer, scaled(work, params, optimizer, True), average)
    in_loop = side == "by_hand"
    stepped = [Parameter(param.detach().float()) for param in params] if in_loop else params
    options |= {} if side == "default" else {"fused" if in_loop else side: True}
    optimizer = getattr(torch.optim, work.optimizer)(stepped, **options)
    step = scaled(work, stepped, optimizer)
    return Program(params, optimizer, by_hand(params, stepped, step) if in_loop else step)


def scaled(work: Work, params: list[Parameter], optimizer: Any, ours: bool = False) -> Step:
    """Returns a step of ``optimizer``, under our gradient scaler or torch's if ``work`` has one.

    The scale stays 1, because the step is repeated with the same gradients and torch's scaler would
    unscale them each time.
    """
    scaler = (amp_ext if ours else torch.amp).GradScaler(
        params[0].device.type, 1.0, growth_interval=2**30, enabled="scaler" in work.parts
    )
    scaler.scale(params[0].new_zeros(()))  # creates the scaler's tensors
    clips = "clip" in work.parts and not ours  # our optimizers clip in step()

    def step() -> None:
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def by_hand(params: list[Parameter], masters: list[Parameter], step_masters: Step) -> Step:
    """Returns a step that copies gradients to masters, steps the masters, and copies them back."""

    @torch.no_grad()
    def step() -> None:
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
        step_masters()
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)

    return step


def describe(device: torch.device) -> list[str]:
    """Describes the hardware, versions, commit of the build, and date in lines of text."""
    found = re.search(r"model name\s*: *(.+)", Path("/proc/cpuinfo").read_text())
    gpu = f"{torch.cuda.get_device_name(device)}; " if device.type == "cuda" else ""
    cpu = f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} threads"
    commit = build_info().get("git") or "unknown"
    return [
        f"{gpu}{cpu}, load average {os.getloadavg()[0]:.1f}",
        f"torch {torch.__version__}, Python {platform.python_version()}, amp_ext "
        f"{amp_ext.__version__} ({amp_ext.ops.cpu_isa()}), commit {commit[:12]}, {date.today()}",
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

    A step reads or writes each operand once, but not a parameter with a float32 master, which is
    only written. A scaler or a norm reads the gradient once more. An average in float32 is read and
    written, and the weight that it averages is read.
    """
    states = [value for state in program.optimizer.state.values() for value in state.values()]
    elements = sum(param.numel() for param in program.params)
    kept = sum(tensor.nbytes for tensor in states if tensor.dim() > 0) / elements
    average = 4 if "average" in work.parts else 0
    passes = 2 + (work.masters is not True) + ("scaler" in work.parts or "clip" in work.parts)
    size = work.dtype.itemsize
    return 2 * size + kept + average, passes * size + 2 * kept + 3 * average


def measure_row(
    work: Work, shapes: ShapeList, programs: dict[str, Program], streaming: tuple[Step, int]
) -> dict[str, Any]:
    """Measures one row; returns its description, the figures of each side, and ratios to ours.

    Args:
        work: The work of a step.
        shapes: The shapes of the parameters.
        programs: The program of each side, keyed by side. "ours" must be one of them.
        streaming: The result of :func:`make_streaming`, timed in turns with the sides. Rows of many
            small tensors measure the host and leave it out.
    """
    steps = {side: program.step for side, program in programs.items()}
    for step in steps.values():
        step()  # creates the optimizer states
    stored, moved = bytes_of(work, programs["ours"])
    steps |= {} if shapes.many_small else {"streaming": streaming[0]}
    least = dict.fromkeys(steps, math.inf)
    for turn in range(ROUNDS):  # alternates the order: clock changes then affect all sides alike
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            least[name] = min(least[name], *run_times(steps[name]))
    # In bytes a nanosecond, which are GB/s.
    speed = 1e-9 * streaming[1] / least.pop("streaming") if "streaming" in least else None
    elements = sum(map(math.prod, shapes.sizes))
    ideal = 1e-9 * moved * elements / speed if speed else None
    return {
        "work": work.name,
        "shapes": shapes.name,
        "many_small": shapes.many_small,
        "tensors": len(shapes.sizes),
        "elements": elements,
        "bytes_per_element": moved,
        "bytes_stored": stored,
        "streaming_gb_per_s": speed,
        "sides": {
            side: {"seconds": taken, "share_of_streaming": ideal and ideal / taken}
            for side, taken in least.items()
        },
        "ratios": {side: least[side] / least["ours"] for side in least if side != "ours"},
    }


def run_times(step: Step, seconds: float = 0.05) -> list[float]:
    """Runs a step repeatedly for ``seconds`` in all; returns the seconds of each run."""
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).times
