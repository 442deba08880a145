"""Other packages' AdamW for the CPU: what each does, whether it is there, and how it is made."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from amp_ext.bench.work import AS_TORCH, BESIDE_PEERS, Work

# The same for everybody. Of what a package takes by itself, something differs each time.
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}

_FP32, _WIDE, _NARROW, _MASTER = BESIDE_PEERS


@dataclass(frozen=True)
class Method:
    """How a side does some work.

    Attributes:
        states: What holds its moments.
        master: What keeps the updates that are too small for a 16-bit parameter.
        same: Whether that is what the work asks for.
        by_hand: Whether it steps float32 masters that a loop copies from and to the parameters.
    """

    states: str
    master: str
    same: bool
    by_hand: bool = False


@dataclass(frozen=True)
class Peer:
    """A package with an optimizer of its own.

    Attributes:
        module: What Python calls it.
        distribution: What pip calls it.
        make: Makes its optimizer for some parameters and some work.
        methods: What of ``BESIDE_PEERS`` it does, and how.
    """

    module: str
    distribution: str
    make: Callable[[list[Parameter], Work], torch.optim.Optimizer]
    methods: dict[Work, Method]


def _as_asked(work: Work, master: str = "none", by_hand: bool = False) -> Method:
    states = "bf16" if work.states == AS_TORCH else "fp32"
    return Method(states, master, True, by_hand)


def _in_8_bits(master: str = "none") -> Method:
    return Method("8 bit, in blocks of 256", master, False)


def method(side: str, work: Work) -> Method | None:
    """Returns how a side does some work, None if it doesn't.

    Args:
        side: A key of ``SIDES``.
        work: One of ``BESIDE_PEERS``, with or without a scaler.
    """
    work = work.plain
    if side in PEERS:
        return PEERS[side].methods.get(work)
    if not work.has_masters:
        return _as_asked(work)
    return _as_asked(work, "fp32, in the step" if side == "ours" else "fp32, copied by a loop")


def find(side: str) -> tuple[str, str | None]:
    """Imports a peer.

    Args:
        side: A key of ``PEERS``.

    Returns:
        Its version, and why it can't take part or None.
    """
    peer = PEERS[side]
    try:
        version = importlib.metadata.version(peer.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for others
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool beside the measurement
    package = peer.module.partition(".")[0]
    try:
        with _talking_to_stderr():
            importlib.import_module(package)
            importlib.import_module(peer.module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return version, f"not installed: pip install {peer.distribution}"
        return version, reason(error)
    return version, None


def reason(error: BaseException | None) -> str:
    """Returns the first lines of an error and of what it came from."""
    texts = []
    while error is not None:
        line = str(error).strip().partition("\n")[0]
        texts.append(f"{type(error).__name__}: {line}" if line else type(error).__name__)
        error = error.__cause__
    return ", from ".join(texts)


def make_optimizer(side: str, params: list[Parameter], work: Work) -> torch.optim.Optimizer:
    """Makes a peer's optimizer, which may build or compile something first.

    Args:
        side: A key of ``PEERS``.
        params: What it is to step: the masters where its method is ``by_hand``.
        work: What it is to do.
    """
    with _talking_to_stderr():
        return PEERS[side].make(params, work)


@contextlib.contextmanager
def _talking_to_stderr() -> Iterator[None]:
    """Keeps what packages print away from tables that may go to a file."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _deepspeed(params: list[Parameter], work: Work) -> torch.optim.Optimizer:
    module = importlib.import_module(PEERS["deepspeed"].module)
    return module.DeepSpeedCPUAdam(params, **OPTIONS, fp32_optimizer_states=work.states != AS_TORCH)


def _bitsandbytes(params: list[Parameter], work: Work) -> torch.optim.Optimizer:
    return importlib.import_module("bitsandbytes").optim.AdamW(params, **OPTIONS)


def _bitsandbytes_8bit(params: list[Parameter], work: Work) -> torch.optim.Optimizer:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, **OPTIONS)


def _torchao(params: list[Parameter], work: Work) -> torch.optim.Optimizer:
    module = importlib.import_module(PEERS["torchao"].module)
    return module._AdamW(params, **OPTIONS, bf16_stochastic_round=work.has_masters)


def _torchao_8bit(params: list[Parameter], work: Work) -> torch.optim.Optimizer:
    module = importlib.import_module(PEERS["torchao_8bit"].module)
    return module.AdamW8bit(params, **OPTIONS, bf16_stochastic_round=work.has_masters)


def _optimi(params: list[Parameter], work: Work) -> torch.optim.Optimizer:
    module = importlib.import_module(PEERS["optimi"].module)
    return module.AdamW(params, **OPTIONS, kahan_sum=work.has_masters)


#: By the side that each is. Its 8-bit optimizers are sides of their own.
PEERS = {
    "deepspeed": Peer(
        "deepspeed.ops.adam",
        "deepspeed",
        _deepspeed,
        {
            **{work: _as_asked(work) for work in (_FP32, _WIDE, _NARROW)},
            _MASTER: _as_asked(_MASTER, "fp32, copied by a loop", by_hand=True),
        },
    ),
    "bitsandbytes": Peer(
        "bitsandbytes",
        "bitsandbytes",
        _bitsandbytes,
        {work: _as_asked(work) for work in (_FP32, _WIDE)},
    ),
    "torchao": Peer(
        "torchao.optim",
        "torchao",
        _torchao,
        {
            **{work: _as_asked(work) for work in (_FP32, _NARROW)},
            _MASTER: Method("bf16", "none: rounds at random", False),
        },
    ),
    "optimi": Peer(
        "optimi",
        "torch-optimi",
        _optimi,
        {
            **{work: _as_asked(work) for work in (_FP32, _NARROW)},
            _MASTER: Method("bf16", "none: Kahan sum in bf16", False),
        },
    ),
    "bitsandbytes_8bit": Peer(
        "bitsandbytes",
        "bitsandbytes",
        _bitsandbytes_8bit,
        {work: _in_8_bits() for work in (_FP32, _NARROW)},
    ),
    "torchao_8bit": Peer(
        "torchao.optim",
        "torchao",
        _torchao_8bit,
        {
            **{work: _in_8_bits() for work in (_FP32, _NARROW)},
            _MASTER: _in_8_bits("none: rounds at random"),
        },
    ),
}
