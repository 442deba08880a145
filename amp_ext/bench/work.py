"""What is timed: the work of a step, its floor in bytes, who does it, and the ratios to reach."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from amp_ext.bench.shapes import LARGE, ShapeList

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

#: Everyone who does the work, and what the tables call them. By hand is a loop around float32
#: masters that torch's fused optimizer steps; the buffered one keeps its gradients' memory. The
#: rest are peers (``peers.py``), which take part with ``--peers`` only.
SIDES = {
    "ours": "amp_ext",
    "fused": "torch fused",
    "foreach": "torch foreach",
    "default": "torch default",
    "by_hand": "by hand",
    "by_hand_buffered": "buffered",
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
class Work:
    """One step of a scaler and an optimizer on gradients that are there.

    Attributes:
        optimizer: "AdamW", "Lion" or "SGD", which has momentum here.
        dtype: Of parameters and gradients.
        scaler: Whether a gradient scaler does the step.
        clip: Whether gradients are clipped by their norm.
        masters: Whether 16-bit parameters have float32 masters.
        narrow_states: Whether moments have the dtype of 16-bit parameters, without masters.
    """

    optimizer: str
    dtype: torch.dtype
    scaler: bool = False
    clip: bool = False
    masters: bool = True
    narrow_states: bool = False

    @property
    def has_masters(self) -> bool:
        """Whether there is a float32 master of each parameter."""
        return self.masters and self.dtype != torch.float32

    @property
    def is_wide(self) -> bool:
        """Whether 16-bit parameters have float32 moments but no masters."""
        return self.dtype != torch.float32 and not (self.masters or self.narrow_states)

    @property
    def state_bytes(self) -> int:
        """Bytes of a moment of an element."""
        return self.dtype.itemsize if self.narrow_states else 4

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
            "scaler": self.scaler,
            "clip": self.clip,
            "16-bit states": self.narrow_states,
            "32-bit states": self.is_wide,
        }
        return " + ".join([plain, *(part for part, there in parts.items() if there)])

    @property
    def bytes_per_element(self) -> int:
        """The least that memory must move: each operand read or written once, and one look.

        The look at the gradients, for inf and NaN or for the norm, comes before the step and so
        reads them a second time.
        """
        param = grad = self.dtype.itemsize
        states = 2 if self.optimizer == "AdamW" else 1
        held = 4 + 4 + param if self.has_masters else param + param  # the last is only written
        look = grad if self.scaler or self.clip else 0
        return grad + held + 2 * states * self.state_bytes + look

    def sides(self, device_type: str) -> list[str]:
        """Returns who does the same work, the one that everything is compared with first."""
        if not hasattr(torch.optim, self.optimizer):
            return ["ours"]  # beside nothing but the bandwidth
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
EVERY.append(Work("AdamW", torch.bfloat16, masters=False, narrow_states=True))

#: What is timed beside the peers: everything that a step of AdamW may keep for bf16 parameters.
BESIDE_PEERS = [
    Work("AdamW", torch.float32),
    Work("AdamW", torch.bfloat16, masters=False),
    Work("AdamW", torch.bfloat16, masters=False, narrow_states=True),
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
