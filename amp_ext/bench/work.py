"""Lists the rows of the benchmark: the work of a step, its parameters, and its implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
STATES = {
    torch.float32: "32-bit states",
    None: "16-bit states",  # states in the parameter's dtype, rounded to nearest as in torch
    torch.bfloat16: "bf16 states",  # dithered: rounded up or down in turns
    "8bit-bf16": "8bit-bf16 states",
    "8bit": "8bit states",
}

#: Maps the sides (the implementations that are compared) to their names in tables. "by_hand" is a
#: hand-written loop with float32 masters and torch's fused optimizer, "in_float32" is our step with
#: float32 masters and moments, and "swa_utils" is our step with torch's average of weights.
SIDES = {
    "ours": "amp_ext",
    "fused": "torch fused",
    "foreach": "torch foreach",
    "default": "torch default",
    "by_hand": "by hand",
    "in_float32": "in float32",
    "swa_utils": "torch swa_utils",
}


@dataclass(frozen=True)
class Work:
    """The work of one step of a scaler and an optimizer, without the backward pass.

    Attributes:
        optimizer: "AdamW" or "SGD" (with momentum).
        dtype: The dtype of parameters and gradients.
        scaler: Whether the step runs under a gradient scaler.
        clip: Whether the gradients are clipped by their norm.
        masters: The option ``master_weights`` of our optimizers.
        state_dtype: The option ``state_dtype`` of our optimizers.
        average: Whether the step updates an exponential moving average of the weights.
    """

    optimizer: str
    dtype: torch.dtype
    scaler: bool = False
    clip: bool = False
    masters: Any = True
    state_dtype: Any = torch.float32
    average: bool = False

    @property
    def has_masters(self) -> bool:
        """Whether each parameter has a float32 master."""
        return self.masters is True and self.dtype != torch.float32

    @property
    def name(self) -> str:
        """The name of the work in tables, such as "AdamW fp32 + scaler"."""
        parts = {
            "momentum": self.optimizer == "SGD",
            "master": self.has_masters,
            str(self.masters): isinstance(self.masters, str),
            "scaler": self.scaler,
            "clip": self.clip,
            "average": self.average,
            STATES[self.state_dtype]: self.state_dtype != torch.float32 or not self.masters,
        }
        plain = f"{self.optimizer} {DTYPES[self.dtype]}"
        return " + ".join([plain, *(part for part, there in parts.items() if there)])

    def sides(self) -> list[str]:
        """Returns the sides that do this work, ours first."""
        if self.average:
            return ["ours", "swa_utils"]
        if self.state_dtype not in (torch.float32, None) or isinstance(self.masters, str):
            return ["ours", "in_float32"]  # torch has no such low-memory states
        if self.has_masters:
            return ["ours", "by_hand"]
        # Without an option, torch runs "foreach" on a GPU and the loop "default" on a CPU. Both are
        # slow, so only the first row has them.
        return ["ours", "fused", *(["foreach", "default"] if self == ROWS[0][1] else [])]


_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_NARROW = (torch.bfloat16, "8bit-bf16", "8bit")  # state dtypes that take less memory than float32

#: The kinds of work. "all" is timed on every list of shapes, "three" on three of them, and "one",
#: which stores masters or states in less memory, on the first.
ROWS = (
    ("all", Work("AdamW", _FP32, scaler=True)),
    ("all", Work("AdamW", _FP32, scaler=True, clip=True)),
    ("all", Work("AdamW", _FP16, scaler=True)),
    ("all", Work("AdamW", _BF16, scaler=True, clip=True)),
    ("all", Work("SGD", _FP32, scaler=True)),
    ("all", Work("AdamW", _FP32)),
    ("three", Work("AdamW", _FP32, average=True)),
    ("one", Work("AdamW", _BF16, masters="split")),
    *(
        ("one", Work("AdamW", _BF16, masters=masters, state_dtype=state_dtype))
        for state_dtype in _NARROW
        for masters in ("split", "split8", False)
    ),
    *(("one", Work("AdamW", _FP32, state_dtype=state_dtype)) for state_dtype in _NARROW),
    ("one", Work("AdamW", _BF16, masters=False, state_dtype=None)),  # rounds as torch does
)


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


def choose_rows(device_type: str, quick: bool) -> list[tuple[Work, ShapeList]]:
    """Returns the rows for device type "cpu" or "cuda": pairs of work and shapes."""
    if device_type == "cpu":
        large = [uniform(4, 8_000_000), uniform(300, 100_000), uniform(1, 64_000_000)]
    else:
        large = [uniform(1, 256_000_000), uniform(600, 100_000), uniform(4, 64_000_000)]
    three = [*large[:2], uniform(1_000, 64)]
    every = three if quick else [*large, uniform(1_000, 64), uniform(10_000, 64)]
    rows = [(work, shapes) for shapes in every for lists, work in ROWS if lists == "all"]
    rows += [(work, shapes) for shapes in three for lists, work in ROWS if lists == "three"]
    return rows + [(work, large[0]) for lists, work in ROWS if lists == "one" and not quick]


def row_name(work: Work, shapes: ShapeList) -> str:
    """Returns the name that ``--filter`` searches, with "x" for "×", which is hard to type."""
    return f"{work.name}, {shapes.name}".replace("×", "x")
