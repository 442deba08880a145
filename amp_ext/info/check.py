"""Checks that amp_ext works: compares a few mixed-precision iterations with torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import amp_ext
from amp_ext import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(device: torch.device, dtype: torch.dtype) -> str | None:
    """Trains a tiny model with our scaler and AdamW and compares the result with torch's.

    Runs ``scale``, ``backward``, ``step`` and ``update`` four times, once with an overflow.

    Args:
        device: The device to train on.
        dtype: The dtype of the parameters. torch's optimizer steps float32 masters, which are
            copied into the parameters after each step.

    Returns:
        A description of the fault, or None if there is none.
    """
    try:
        start = torch.linspace(-2, 2, 67).to(device, dtype)
        param, scale = _train(amp_ext.optim.AdamW, amp_ext.GradScaler, start, start)
        torchs_param, torchs_scale = _train(
            torch.optim.AdamW, torch.amp.GradScaler, start, start.float()
        )
    except Exception as error:  # any exception is a fault to report
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if scale != torchs_scale:
        return f"the loss scale is {scale:g}, torch's {torchs_scale:g}"
    # Allows for eight roundings to dtype, each by at most half of eps.
    limit = 4 * torch.finfo(dtype).eps * torchs_param.abs().max().item()
    worst = (param - torchs_param).abs().max().item()
    if not worst <= limit:
        return f"a parameter is {worst:.2g} away from torch's, {limit:.2g} is allowed"
    return None


def check_division(device: torch.device) -> str | None:
    """Compares the fast square roots and quotients of the CUDA kernels with exact results.

    The kernels refine approximate GPU instructions, whose results no standard specifies. Takes
    milliseconds.

    Args:
        device: A GPU.

    Returns:
        A description of the fault, or None if there is none.
    """
    errors = ops.count_division_errors(device, 1).tolist()
    if any(errors):
        return (
            "{} square roots, {} reciprocals and {} quotients of the fast path are off by a "
            "rounding; AMP_EXT_CUDA_FAST_PATH=0 in the environment avoids it".format(*errors)
        )
    return None


def _train(optimizer_class: Any, scaler_class: Any, start: Tensor, stepped: Tensor) -> Any:
    """Runs four iterations and returns the resulting parameter and loss scale.

    The optimizer steps ``stepped``, which may be a float32 master. After each step the value of
    ``stepped`` is copied into the parameter, which has the dtype of ``start``.
    """
    param, stepped = start.clone(), torch.nn.Parameter(stepped.clone())
    optimizer = optimizer_class([stepped], lr=0.1)
    scaler = scaler_class(param.device.type, 256.0)
    for iteration in range(4):
        weight = param.clone().requires_grad_()
        loss = (weight - 0.5).square().float().sum() * (float("inf") if iteration == 1 else 1.0)
        (grad,) = torch.autograd.grad(scaler.scale(loss), [weight])
        stepped.grad = grad.to(stepped.dtype)
        scaler.step(optimizer)
        scaler.update()
        param.copy_(stepped.detach())
    return param, scaler.get_scale()
