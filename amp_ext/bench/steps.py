"""The rows of the benchmark: the work of a step, its parameters, and its implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_ext

Step = Callable[[], object]

DECAY = 0.999  # decay of the exponential moving averages of weights
MAX_NORM = 1.0  # far below the gradient norm, so that every side clips
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STATES: dict[str, Any] = {
    "32-bit states": torch.float32,
    "16-bit states": None,  # states in the parameter's dtype, rounded to nearest as in torch
    "bf16 states": torch.bfloat16,  # dithered: rounded up or down in turns
    "8bit-bf16 states": "8bit-bf16",
    "8bit states": "8bit",
}

#: The rows: whether a work is timed on all shapes or on the first alone, its name for
#: :func:`parse_work`, and the sides beside ours. "fused", "foreach" and "default" are torch's
#: optimizer with that option or without; the last two are slow, so only the first row has them.
#: "by hand" is a hand-written loop with float32 masters and torch's fused optimizer, "in float32"
#: our step with float32 masters and moments, and "swa_utils" our step with torch's average.
ROWS = [
    ("all", "AdamW fp32 + scaler", ["fused", "foreach", "default"]),
    ("all", "AdamW fp32 + scaler + clip", ["fused"]),
    ("all", "AdamW fp16 + master + scaler", ["by_hand"]),
    ("all", "AdamW bf16 + master + scaler + clip", ["by_hand"]),
    ("all", "SGD fp32 + momentum + scaler", ["fused"]),
    ("all", "AdamW fp32", ["fused"]),
    ("all", "AdamW fp32 + average", ["swa_utils"]),
    ("first", "AdamW bf16 + split", ["in_float32"]),
    *(
        ("first", f"AdamW {params} + {states} states", ["in_float32"])
        for states in ("bf16", "8bit-bf16", "8bit")
        for params in ("bf16 + split", "bf16 + split8", "bf16", "fp32")
    ),
    ("first", "AdamW bf16 + 16-bit states", ["fused"]),
]


@dataclass(frozen=True)
class Work:
    """The work of one step of a scaler and an optimizer, without the backward pass.

    Attributes:
        name: The name in tables, such as "AdamW fp32 + scaler".
        optimizer: "AdamW" or "SGD" (with momentum).
        dtype: The dtype of parameters and gradients.
        parts: What follows in the name: "scaler" if the step runs under a gradient scaler, "clip"
            if gradients are clipped by their norm, "average" for a moving average of the weights.
        masters: The option ``master_weights`` of our optimizers.
        state_dtype: The option ``state_dtype`` of our optimizers.
    """

    name: str
    optimizer: str
    dtype: torch.dtype
    parts: tuple[str, ...]
    masters: Any
    state_dtype: Any


def parse_work(name: str) -> Work:
    """Returns the work that a name says: optimizer and dtype, and parts after " + ".

    Without "master", "split" or "split8" there are no masters, and without a key of ``STATES``
    the states are in float32.
    """
    plain, *parts = name.split(" + ")
    optimizer, dtype = plain.split()
    masters = next((part for part in parts if part.startswith("split")), "master" in parts)
    state_dtype = next((STATES[part] for part in parts if part in STATES), torch.float32)
    return Work(name, optimizer, DTYPES[dtype], tuple(parts), masters, state_dtype)


@dataclass(frozen=True)
class ShapeList:
    """The shapes of the parameters, with a name for the tables."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    many_small: bool = False  # True if the host's overhead takes most of the time

    @property
    def elements(self) -> int:
        """The total number of elements."""
        return sum(map(math.prod, self.sizes))


def uniform(count: int, size: int) -> ShapeList:
    """Returns ``count`` shapes ``[size / 32, 32]``; the row length suits 8-bit states."""
    short = f"{size // 10**6}M" if size >= 10**6 else f"{size // 1000}k" if size >= 1000 else size
    return ShapeList(f"{count:,} × {short}", ((size // 32, 32),) * count, size < 1000)


def choose_rows(device_type: str, quick: bool) -> list[tuple[Work, ShapeList, list[str]]]:
    """Returns the rows for device type "cpu" or "cuda": work, shapes and sides, ours first."""
    if device_type == "cpu":
        sizes = [(4, 8_000_000), (300, 100_000), (1_000, 64), (1, 64_000_000), (10_000, 64)]
    else:
        sizes = [(1, 256_000_000), (600, 100_000), (1_000, 64), (4, 64_000_000), (10_000, 64)]
    every = [uniform(*size) for size in sizes[: 3 if quick else 5]]
    shapes = {"all": every, "first": [] if quick else every[:1]}
    return [
        (parse_work(name), each, ["ours", *sides])
        for lists in shapes
        for each in shapes[lists]
        for of_lists, name, sides in ROWS
        if of_lists == lists
    ]


def row_name(work: Work, shapes: ShapeList) -> str:
    """Returns the name that ``--filter`` searches, with "x" for "×", which is hard to type."""
    return f"{work.name}, {shapes.name}".replace("×", "x")


def make_params(
    work: Work, shapes: ShapeList, device: torch.device, spread: float = 1e-2
) -> list[Parameter]:
    """Makes normally distributed parameters and gradients with standard deviation ``spread``."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for size in shapes.sizes:
        values = spread * torch.randn(size, generator=generator, device=device)
        params.append(Parameter(values.to(work.dtype)))
        params[-1].grad = params[-1].detach().clone()
    return params


@dataclass(frozen=True)
class Program:
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
        step, average = scaled(work, params, optimizer, amp_ext.GradScaler), None
        if side == "swa_utils":
            step = averaged(params, step)
        elif "average" in work.parts:
            average = amp_ext.optim.WeightAverage(optimizer, DECAY)
        return Program(params, optimizer, step, average)
    stepped = params
    if side == "by_hand":
        stepped = [Parameter(param.detach().float()) for param in params]
    options |= {} if side == "default" else {"fused" if side == "by_hand" else side: True}
    optimizer = getattr(torch.optim, work.optimizer)(stepped, **options)
    step = scaled(work, stepped, optimizer)
    return Program(params, optimizer, by_hand(params, stepped, step) if side == "by_hand" else step)


def scaled(work: Work, params: list[Parameter], optimizer: Any, scaler_class: Any = None) -> Step:
    """Returns a step of ``optimizer``, under a gradient scaler if ``work`` has one.

    The scale stays 1, because the step is repeated with the same gradients and torch's scaler would
    unscale them each time.
    """
    scaler = (scaler_class or torch.amp.GradScaler)(
        params[0].device.type, 1.0, growth_interval=2**30, enabled="scaler" in work.parts
    )
    scaler.scale(params[0].new_zeros(()))  # creates the scaler's tensors
    clips = "clip" in work.parts and scaler_class is None  # our optimizers clip in step()

    def step() -> None:
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def averaged(params: list[Parameter], step_params: Step) -> Step:
    """Returns the step followed by torch's exponential moving average of the weights."""
    model = torch.nn.Module()
    model.params = torch.nn.ParameterList(params)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def step() -> None:
        step_params()
        average.update_parameters(model)

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
