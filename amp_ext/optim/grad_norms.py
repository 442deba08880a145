"""The norm of each gradient, for optimizers that track norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_ext.amp_protocol import to_device


@torch.no_grad()
def norms_of_grads(
    grads: Sequence[Tensor | None], grad_scale: Tensor | None, device: torch.device
) -> Tensor:
    """Returns the norms of unscaled gradients, float32 of shape ``[grads]``.

    A norm is NaN without a gradient, and inf if it is not finite in float32. A gradient that a step
    refuses counts as absent, because the error of the step explains it.

    Args:
        grads: The gradients, or shards of them.
        grad_scale: One float32, the loss scale that the gradients carry, or None.
        device: The device of the result.
    """
    norms = [torch.full((), math.nan, device=device)] * len(grads)
    on_device: dict[torch.device, dict[int, Tensor]] = {}
    for index, grad in enumerate(grads):
        if grad is not None and grad.layout is torch.strided and grad.is_floating_point():
            read = grad.float() if grad.dtype is torch.float64 else grad  # or torch refuses it
            on_device.setdefault(grad.device, {})[index] = read
    for here, present in on_device.items():
        found = torch.stack(torch._foreach_norm(list(present.values()), dtype=torch.float32))
        if grad_scale is not None:
            found = found * to_device(grad_scale.reshape(()), here).reciprocal()
        found = to_device(found.nan_to_num(nan=math.inf, posinf=math.inf), device)
        for index, norm in zip(present, found.unbind(), strict=True):
            norms[index] = norm
    return torch.stack(norms)
