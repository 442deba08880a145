"""Gradient clipping outside of a step, in place of ``torch.nn.utils.clip_grad_norm_``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import GeneratorType

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.amp_protocol import to_device


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    total_norm: Tensor | float | None = None,
) -> Tensor:
    """Clips the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` does.

    Reads every gradient once, and writes gradients only if the norm is too large. Nothing waits for
    a GPU. Clipping inside a step costs nothing more: see ``max_grad_norm`` of the optimizers.

    Args:
        parameters: A tensor or an iterable of tensors; a tensor listed twice counts once. Their
            gradients are multiplied in place by ``min(1, max_norm / (norm + 1e-6))``.
        max_norm: Largest norm; 0 makes every gradient 0.
        norm_type: Order of the norm. Orders other than 2 are computed by torch's function.
        error_if_nonfinite: Raises if the norm is inf or NaN; this waits for a GPU.
        foreach: Accepted for compatibility with torch; the fused kernels ignore it.
        total_norm: The norm, one number, if it is known already. If it is a tensor with a dtype
            other than float64, all gradients are multiplied in float32.

    Returns:
        The norm before clipping, one number on the device of the first gradient. The norm is
        float64 if a gradient is float64, otherwise float32. With a float64 norm, float64 gradients
        are multiplied in float64, and on a GPU they are written even if the factor is 1.

    Raises:
        RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is true, or if a gradient
            is refused, for example because it shares memory with another. No gradient is written.

    Reference:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
        2013.
    """
    is_generator = isinstance(parameters, GeneratorType)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if is_generator and not parameters:
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
        )
    norm_type = float(norm_type)
    by_device: dict[torch.device, list[Tensor]] = {}
    ours = True
    for param in dict.fromkeys(parameters):  # a shared parameter counts once
        if (grad := param.grad) is not None:
            by_device.setdefault(grad.device, []).append(grad)
            ours &= type(grad) is Tensor and not grad.is_sparse and grad.is_floating_point()
    ours &= all(device.type in ("cpu", "cuda") for device in by_device)
    dtypes = {grad.dtype for grads in by_device.values() for grad in grads}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    if total_norm is None:
        if norm_type != 2.0 or not ours or not by_device:
            return torch.nn.utils.clip_grad_norm_(
                parameters, max_norm, norm_type, error_if_nonfinite, foreach
            )
        first_device = next(iter(by_device))
        total = torch.zeros((), dtype=torch.float64, device=first_device)
        for device, grads in by_device.items():
            sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
            found_inf = torch.zeros((), dtype=torch.float32, device=device)
            ops.check_finite_(grads, found_inf, sum_of_squares=sum_of_squares)
            total += to_device(sum_of_squares, first_device)
        total_norm = total.sqrt().to(dtype)
    if not isinstance(total_norm, Tensor):  # on the gradients' device, not the default device
        some_device = next(iter(by_device), torch.device("cpu"))
        total_norm = torch.tensor(total_norm, dtype=dtype, device=some_device)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients "
            "by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    if ours:
        for device, grads in by_device.items():
            norm = to_device(total_norm, device)
            norm = norm if norm.dtype == torch.float64 else norm.float()
            ops.clip_grads_(grads, norm, max_norm=float(max_norm))
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
    return total_norm
