"""Whether a side does AdamW at all: its updates beside those of torch in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_ext.bench import peers
from amp_ext.bench.shapes import ShapeList
from amp_ext.bench.steps import make_program
from amp_ext.bench.work import BESIDE_PEERS, Work

STEPS = 50
# The first is large enough for moments in 8 bits, the last is a multiple of no vector.
_SHAPES = ShapeList("agreement", ((128, 128), (128,), (1_003,)))
# Of parameters: large enough that a missing weight decay shows, in 16 bits too.
_SPREAD = 0.1
_CPU = torch.device("cpu")

# How far the way of a parameter may lie from that in float64, as a share of it. Roundings to
# float32; to bf16 at the end; to bf16 in each step. A tenth of the weight decay, a rate that is
# 10 % off or a momentum of 0.95 are 6 to 18 %.
_FP32, _WIDE, _NARROW, _MASTER = BESIDE_PEERS
TOLERANCES = {_FP32: 1e-4, _MASTER: 0.005, _WIDE: 0.035, _NARROW: 0.035}


def compare(side: str, work: Work) -> dict[str, Any]:
    """Steps a side and torch's AdamW in float64 with the same random gradients.

    Args:
        side: A key of ``SIDES`` that does the work.
        work: One of ``BESIDE_PEERS``, with or without a scaler.

    Returns:
        What the side keeps (``states``, ``master``), its ``deviation`` as a share of the way that
        the parameters went, ``same``: whether that is what the work asks for, within the
        ``tolerance``; and ``why`` it can't be measured, or None.
    """
    how = peers.method(side, work)
    assert how is not None
    row: dict[str, Any] = {
        "work": work.name,
        "side": side,
        "states": how.states,
        "master": how.master,
    }
    row |= {"same": False, "deviation": None, "tolerance": TOLERANCES[work.plain], "why": None}
    try:
        row["deviation"] = deviation(side, work)
    except Exception as error:
        if side not in peers.PEERS:
            raise
        row["why"] = peers.reason(error)
    else:
        row["same"] = how.same and row["deviation"] <= row["tolerance"]
    return row


def deviation(side: str, work: Work) -> float:
    """Returns how far a side's parameters come to lie from float64, as a share of their way.

    Args:
        side: A key of ``SIDES`` that does the work.
        work: One of ``BESIDE_PEERS``, with or without a scaler.

    Raises:
        ValueError: If there is an inf or a NaN among them.
    """
    program = make_program(side, work, _SHAPES, _CPU, _SPREAD)
    starts = tuple(param.detach().double() for param in program.params)
    for step in range(STEPS):
        grads = _gradients(step, work.dtype)
        for param, grad in zip(program.params, grads, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)  # anew in each step, for some write into it
        program.step()
    shares = []
    ends = _reference(work.dtype)
    for param, start, end in zip(program.params, starts, ends, strict=True):
        share = (param.detach() - end).norm() / (end - start).norm()
        shares.append(share.item())
    if not all(map(math.isfinite, shares)):
        raise ValueError("its parameters become inf or NaN")
    return max(shares)


@functools.cache
def _reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns where torch's AdamW in float64 leads from the same start."""
    work = Work("AdamW", dtype, masters=False)
    start = make_program("ours", work, _SHAPES, _CPU, _SPREAD).params
    params = [Parameter(param.detach().double()) for param in start]
    optimizer = torch.optim.AdamW(params, **peers.OPTIONS)
    for step in range(STEPS):
        for param, grad in zip(params, _gradients(step, dtype), strict=True):
            param.grad = grad.double()
        optimizer.step()
    return tuple(param.detach() for param in params)


def _gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [(1e-2 * torch.randn(size, generator=generator)).to(dtype) for size in _SHAPES.sizes]


def compare_all(works: Iterable[Work], report: Callable[[str], None]) -> dict[str, Any]:
    """Looks for all peers, and compares all sides in some work.

    Args:
        works: Some of ``BESIDE_PEERS``, with or without a scaler.
        report: Called with the name of each before it is done.

    Returns:
        ``peers``, with version and ``why`` it is missing or None, and ``methods``: what
        :func:`compare` returns for each side of each work.
    """
    found = {side: peers.find(side) for side in peers.PEERS}
    methods = []
    for work in works:
        report(f"{work.name}, beside float64")
        able = [side for side, (_, why) in found.items() if why is None]
        sides = work.sides(_CPU.type) + [side for side in able if peers.method(side, work)]
        methods += [compare(side, work) for side in sides]
    packages = {
        peers.PEERS[side].distribution: {"version": version, "why": why}
        for side, (version, why) in found.items()
    }
    return {"peers": packages, "methods": methods}
