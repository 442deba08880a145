"""A few real iterations of mixed precision, beside torch's own, to see that they work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import amp_ext

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_ITERATIONS = 4
_OVERFLOW = 1  # the iteration whose gradients are inf
_INIT_SCALE = 256.0


def check(device: torch.device, dtype: torch.dtype) -> str | None:
    """Trains a tiny model with our scaler and AdamW and compares it with torch's result.

    ``scale``, ``backward``, ``step`` and ``update`` run four times; the second time the gradients
    overflow.

    Args:
        device: Where.
        dtype: Of the parameters. torch keeps float32 masters by hand, ours in its own step.

    Returns:
        What is wrong, or None.
    """
    try:
        ours = _train_ours(_start(device, dtype))
        theirs = _train_torchs(_start(device, dtype))
        return _difference(ours, theirs)
    except Exception as error:  # whatever it is, it is the answer
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _start(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-2, 2, 67).to(device, dtype)


def _loss(param: Tensor, iteration: int) -> Tensor:
    loss = (param - 0.5).square().float().sum()
    return loss * float("inf") if iteration == _OVERFLOW else loss


def _train_ours(start: Tensor) -> tuple[Tensor, float]:
    param = torch.nn.Parameter(start)
    optimizer = amp_ext.optim.AdamW([param], lr=0.1)
    scaler = amp_ext.GradScaler(param.device.type, _INIT_SCALE)
    for iteration in range(_ITERATIONS):
        optimizer.zero_grad()
        scaler.scale(_loss(param, iteration)).backward()
        scaler.step(optimizer)
        scaler.update()
    return param.detach(), scaler.get_scale()


def _train_torchs(start: Tensor) -> tuple[Tensor, float]:
    param = torch.nn.Parameter(start)
    master = torch.nn.Parameter(start.to(torch.float32, copy=True))
    optimizer = torch.optim.AdamW([master], lr=0.1)
    scaler = torch.amp.GradScaler(param.device.type, _INIT_SCALE)
    for iteration in range(_ITERATIONS):
        (grad,) = torch.autograd.grad(scaler.scale(_loss(param, iteration)), [param])
        master.grad = grad.float()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            param.copy_(master)
    return param.detach(), scaler.get_scale()


def _difference(ours: tuple[Tensor, float], theirs: tuple[Tensor, float]) -> str | None:
    (param, scale), (torchs_param, torchs_scale) = ours, theirs
    if scale != torchs_scale:
        return f"the loss scale is {scale:g}, torch's {torchs_scale:g}"
    # A few roundings of the stored number, each of half an eps.
    limit: Any = 4 * torch.finfo(param.dtype).eps * torchs_param.abs().max().item()
    worst = (param - torchs_param).abs().max().item()
    if not worst <= limit:
        return f"a parameter is {worst:.2g} away from torch's, {limit:.2g} is allowed"
    return None
