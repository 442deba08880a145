"""What is timed: the work of a step, its floor in bytes, who does it, and the ratios to reach."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from amp_ext.bench.shapes import LARGE, ShapeList
from amp_ext.memory import MASTER_BYTES

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

#: Everyone who does the work, and what the tables call them. By hand is a loop around float32
#: masters that torch's fused optimizer steps; the buffered one keeps its gradients' memory. The one
#: in float32 is ours again, with masters and moments in float32. The rest are peers (``peers.py``),
#: which take part with ``--peers`` only.
SIDES = {
    "ours": "amp_ext",
    "fused": "torch fused",
    "foreach": "torch foreach",
    "default": "torch default",
    "by_hand": "by hand",
    "by_hand_buffered": "buffered",
    "in_float32": "in float32",
    "deepspeed": "DeepSpeed",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "optimi": "optimi",
    "bitsandbytes_8bit": "bnb 8-bit",
    "torchao_8bit": "torchao 8-bit",
}
#: Beside the faster ones they take most of the time of a run.
SLOW = (
    *("foreach", "default"),
    *("bitsandbytes", "torchao", "optimi", "bitsandbytes_8bit", "torchao_8bit"),
)


@dataclass(frozen=True)
class States:
    """How moments are kept.

    Attributes:
        name: As the tables show it.
        state_dtype: The option of ours.
        element_bytes: Bytes of an element of Adam's first and second moment, and of a moment of an
            optimizer that has no other.
    """

    name: str
    state_dtype: Any
    element_bytes: tuple[float, float, float]


FLOAT32 = States("32-bit states", torch.float32, (4, 4, 4))
AS_TORCH = States("16-bit states", None, (2, 2, 2))  # in the parameter's dtype, to nearest
BFLOAT16 = States("bf16 states", torch.bfloat16, (2, 2, 2))  # dithered
# What has groups has an exponent for each 32 elements.
EIGHT_BIT_FIRST = States("8bit-bf16 states", "8bit-bf16", (1, 2, 1 + 1 / 32))
EIGHT_BIT = States("8bit states", "8bit", (1, 1 + 1 / 32, 1 + 1 / 32))

Masters = bool | Literal["split", "split8"]  # the option of ours


@dataclass(frozen=True)
class Work:
    """One step of a scaler and an optimizer on gradients that are there.

    Attributes:
        optimizer: "AdamW", "Lion" or "SGD", which has momentum here.
        dtype: Of parameters and gradients.
        scaler: Whether a gradient scaler does the step.
        clip: Whether gradients are clipped by their norm.
        masters: What 16-bit parameters have as masters: the option of ours.
        states: How moments are kept.
    """

    optimizer: str
    dtype: torch.dtype
    scaler: bool = False
    clip: bool = False
    masters: Masters = True
    states: States = FLOAT32

    @property
    def has_masters(self) -> bool:
        """Whether there is a float32 master of each parameter."""
        return self.masters is True and self.dtype != torch.float32

    @property
    def is_wide(self) -> bool:
        """Whether 16-bit parameters have float32 moments but no masters."""
        return self.dtype != torch.float32 and not self.masters and self.states == FLOAT32

    @property
    def is_low(self) -> bool:
        """Whether it keeps what no optimizer of torch keeps, to take less memory."""
        return self.masters in ("split", "split8") or self.states not in (FLOAT32, AS_TORCH)

    @property
    def in_float32(self) -> Work:
        """The same step with masters and moments in float32."""
        return replace(self, masters=True, states=FLOAT32)

    @property
    def plain(self) -> Work:
        """The same step without scaler and clipping."""
        return replace(self, scaler=False, clip=False)

    @property
    def name(self) -> str:
        """As the tables show it."""
        plain = f"{self.optimizer} {DTYPES[self.dtype]}"
        parts = {
            "momentum": self.optimizer == "SGD",
            "master": self.has_masters,
            "split": self.masters == "split",
            "split8": self.masters == "split8",
            "scaler": self.scaler,
            "clip": self.clip,
            self.states.name: self.states != FLOAT32 or self.is_wide,
        }
        return " + ".join([plain, *(part for part, there in parts.items() if there)])

    @property
    def bytes_kept(self) -> tuple[float, float]:
        """Bytes of an element's master, or of what it has beside the parameter; of its moments."""
        *adam, alone = self.states.element_bytes
        master = 0 if self.dtype == torch.float32 else MASTER_BYTES[self.masters]
        return master, sum(adam) if self.optimizer == "AdamW" else alone

    @property
    def bytes_stored(self) -> float:
        """Bytes of an element between two steps: parameter, gradient, master and moments."""
        return 2 * self.dtype.itemsize + sum(self.bytes_kept)

    @property
    def bytes_per_element(self) -> float:
        """The least that memory must move: each operand read or written once, and one look.

        The look at the gradients, for inf and NaN or for the norm, comes before the step and so
        reads them a second time.
        """
        param = grad = self.dtype.itemsize
        reads = 0 if self.has_masters else param  # a whole master stands for its parameter
        look = grad if self.scaler or self.clip else 0
        return grad + reads + param + 2 * sum(self.bytes_kept) + look

    def sides(self, device_type: str) -> list[str]:
        """Returns who does the same work, the one that everything is compared with first."""
        if not hasattr(torch.optim, self.optimizer):
            return ["ours"]  # beside nothing but the bandwidth
        if self.is_low:
            return ["ours", "in_float32"]
        if self.is_wide:
            return ["ours"]  # torch's moments have the dtype of their parameters
        if self.has_masters:
            return ["ours", "by_hand", "by_hand_buffered"]
        # Without options torch takes foreach on a GPU and one operation after the other on a CPU.
        return ["ours", "fused", "foreach"] + (["default"] if device_type == "cpu" else [])


ADAMW = Work("AdamW", torch.float32, scaler=True)
ADAMW_CLIP = Work("AdamW", torch.float32, scaler=True, clip=True)
ADAMW_FP16 = Work("AdamW", torch.float16, scaler=True)
ADAMW_BF16_CLIP = Work("AdamW", torch.bfloat16, scaler=True, clip=True)
SGD = Work("SGD", torch.float32, scaler=True)

#: For every list of shapes.
FEATURED = [ADAMW, ADAMW_CLIP, ADAMW_FP16, ADAMW_BF16_CLIP, SGD, Work("AdamW", torch.float32)]

#: For the first two lists.
EVERY = FEATURED + [
    work
    for optimizer, dtype, scaler, clip in itertools.product(
        ("AdamW", "SGD", "Lion"), DTYPES, (False, True), (False, True)
    )
    if (work := Work(optimizer, dtype, scaler, clip)) not in FEATURED
]
# Moments in 16 bits and no masters, as torch does it. Not SGD: torch 2.13's fused one leaves most
# 16-bit parameters on a CPU as they were.
EVERY.append(Work("AdamW", torch.bfloat16, masters=False, states=AS_TORCH))

#: In less memory than float32 takes, beside which ours is then timed.
NARROW_STATES = [BFLOAT16, EIGHT_BIT_FIRST, EIGHT_BIT]
LOW_MEMORY = [
    work
    for optimizer in ("AdamW", "SGD")
    for work in (
        Work(optimizer, torch.bfloat16, masters="split"),
        *(
            Work(optimizer, torch.bfloat16, masters=masters, states=states)
            for states in NARROW_STATES
            for masters in MASTER_BYTES
            if masters is not True
        ),
        *(Work(optimizer, torch.float32, states=states) for states in NARROW_STATES),
    )
]
EVERY += LOW_MEMORY

#: What is timed beside the peers: everything that a step of AdamW may keep for bf16 parameters.
BESIDE_PEERS = [
    Work("AdamW", torch.float32),
    Work("AdamW", torch.bfloat16, masters=False),
    Work("AdamW", torch.bfloat16, masters=False, states=AS_TORCH),
    Work("AdamW", torch.bfloat16),
]

# Work, against whom, and the least ratio of times for each list of shapes, on two CPU cores.
_CPU_TARGETS = [
    (ADAMW, "fused", {"4 × 8M": 1.2, "300 × 100k": 1.4, "1,000 × 64": 30.0}),
    (ADAMW_CLIP, "fused", {"4 × 8M": 1.8, "300 × 100k": 1.9, "1,000 × 64": 45.0}),
    (ADAMW, "default", {"4 × 8M": 5.0, "300 × 100k": 5.0}),
    (ADAMW, "foreach", {"4 × 8M": 5.0, "300 × 100k": 5.0}),
    (ADAMW_FP16, "by_hand", {"4 × 8M": 4.2, "300 × 100k": 2.0, "1,000 × 64": 40.0}),
    (ADAMW_BF16_CLIP, "by_hand", {"4 × 8M": 4.5, "300 × 100k": 2.4}),
    (SGD, "fused", {"4 × 8M": 1.5, "300 × 100k": 1.7}),
]
_CUDA_TARGETS = [(ADAMW, "fused", 1.25), (ADAMW_CLIP, "fused", 1.5), (ADAMW_FP16, "by_hand", 2.0)]
_CUDA_LARGE = 100_000_000  # elements


def is_quick(work: Work, shapes: ShapeList, device_type: str) -> bool:
    """Returns whether a row belongs to the quick choice."""
    if device_type == "cpu":
        return bool(target_ratios(work, shapes, device_type))
    chosen = ("1 × 256M", "600 × 100k", "1,000 × 64")
    return shapes.name in chosen and work in (target for target, *_ in _CUDA_TARGETS)


def target_ratios(work: Work, shapes: ShapeList, device_type: str) -> dict[str, float]:
    """Returns how many times faster than each side ours is to be, where that was set."""
    if device_type == "cpu":
        return {
            side: ratios[shapes.name]
            for target, side, ratios in _CPU_TARGETS
            if target == work and shapes.name in ratios
        }
    if shapes.elements < _CUDA_LARGE:
        return {}
    return {side: ratio for target, side, ratio in _CUDA_TARGETS if target == work}


def target_share(shapes: ShapeList, device_type: str) -> float | None:
    """Returns the share of the streaming bandwidth that ours is to reach."""
    if device_type == "cpu":
        return 0.90 if shapes.elements >= LARGE else None
    return 0.92 if shapes.elements >= _CUDA_LARGE else None
