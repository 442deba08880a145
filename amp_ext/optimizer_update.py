"""One step of an optimizer, with an interface that is common in hand-written CUDA training code."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.plain_numbers import timestep_of


class OptimizerType(enum.Enum):
    """The algorithms of :func:`optimizer_update_`: plain SGD, SGD with momentum, or AdamW."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


class OptimizerWorkspace:
    """Memory for the norm of the gradients, reused from one update to the next.

    Updates that may run at the same time, on two streams or threads, need separate workspaces.

    Attributes:
        grad_norm: Norm of the gradients in the last update with ``max_grad_norm``, one float32 on
            their device; None before the first such update. Later updates overwrite the norm.
    """

    def __init__(self) -> None:
        self.grad_norm: Tensor | None = None


def optimizer_update_(
    optimizer_type: OptimizerType,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    velocities: Sequence[Tensor] | None = None,
    exp_avgs: Sequence[Tensor] | None = None,
    exp_avg_sqs: Sequence[Tensor] | None = None,
    master_params: Sequence[Tensor] | None = None,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    timestep: int,
    clip_value: float | None = None,
    max_grad_norm: float | None = None,
    workspace: OptimizerWorkspace | None = None,
) -> None:
    """Takes one step of an optimizer, for training loops that manage their own buffers.

    Weight decay is decoupled for all three optimizers. An element whose gradient is inf or NaN is
    not updated. Adam's denominator is ``sqrt(max(v, 1e-12)) + eps`` with the bias-corrected second
    moment v. :func:`amp_ext.ops.adam_` and :func:`amp_ext.ops.sgd_` have all options.

    Args:
        optimizer_type: SGD: ``p -= lr * g``; MOMENTUM: ``v = beta1 * v + g; p -= lr * v``; ADAM.
        params: Parameters of any shapes. Updated in place; before the step,
            ``p *= 1 - lr * weight_decay``.
        grads: Gradients of the parameters' shapes, only read.
        velocities: For MOMENTUM only: running sums of the parameters' shapes, zeros at first.
            float32 or the parameter's dtype; float64 for float64 parameters. Updated in place.
        exp_avgs: For ADAM only: first moments, like ``velocities``. Updated in place.
        exp_avg_sqs: For ADAM only: second moments, like ``velocities``. Updated in place.
        master_params: float32 masters of 16-bit parameters, or None. Updated in place.
        lr: Learning rate. A tensor must have one element and is read on its device.
        beta1: Decay of the velocity or of the first moment, per step.
        beta2: Decay of the second moment, per step.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay coefficient, before multiplication by the learning rate.
        timestep: Number of this step, from 1, for Adam's bias corrections.
        clip_value: Largest magnitude of a gradient element, applied after ``max_grad_norm``.
        max_grad_norm: Largest norm of all gradients together, measured over their finite elements.
        workspace: Memory to reuse; with None each call allocates new memory.

    Raises:
        RuntimeError: If ``timestep`` is below 1, a required buffer is missing, another buffer is
            given, or lists and tensors do not match each other.

    Example::

        workspace = ops.OptimizerWorkspace()
        for timestep, batch in enumerate(batches, start=1):
            grads = torch.autograd.grad(loss_of(batch), params)
            ops.optimizer_update_(
                ops.OptimizerType.MOMENTUM, params, grads, velocities=velocities,
                lr=0.1, timestep=timestep, workspace=workspace,
            )

    Reference:
        See :func:`amp_ext.ops.adam_` and :func:`amp_ext.ops.sgd_`.
    """
    if not isinstance(optimizer_type, OptimizerType):
        raise RuntimeError(
            "optimizer_update_: optimizer_type must be an OptimizerType, got "
            f"{type(optimizer_type).__name__}"
        )
    timestep = timestep_of("optimizer_update_", timestep)
    buffers = {"velocities": velocities, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    needed = _BUFFERS_OF[optimizer_type]
    for name, tensors in buffers.items():
        if (tensors is not None) != (name in needed):
            wanted = "given" if name in needed else "None"
            got = "None" if tensors is None else f"{len(tensors)} tensors"
            raise RuntimeError(
                f"optimizer_update_: {name} must be {wanted} for {optimizer_type}, got {got}"
            )
    workspace = workspace or OptimizerWorkspace()
    grad_norm = None
    if max_grad_norm is not None and len(params) > 0:
        grad_norm, device = workspace.grad_norm, params[0].device
        if grad_norm is None or grad_norm.device != device:
            with outside_inference_mode():
                grad_norm = torch.zeros((), dtype=torch.float32, device=device)
    common: dict[str, Any] = {
        "params": params,
        "grads": grads,
        "master_params": master_params,
        "lr": lr,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": True,
        "clip_value": clip_value,
        "max_grad_norm": max_grad_norm,
        "grad_norm": grad_norm,
        "skip_nonfinite": True,
        "operation": "optimizer_update_",
        "buffers": needed,
        **{name: buffers[name] for name in needed},
    }
    if optimizer_type is OptimizerType.ADAM:
        moments = {"beta1": beta1, "beta2": beta2, "eps": eps, "denominator_floor": 1e-12}
        ops.extension.adam_(**common, **moments, timestep=timestep)
    else:
        momentum = beta1 if optimizer_type is OptimizerType.MOMENTUM else 0.0
        ops.extension.sgd_(**common, momentum=momentum)
    if grad_norm is not None:
        workspace.grad_norm = grad_norm


_BUFFERS_OF = {
    OptimizerType.SGD: (),
    OptimizerType.MOMENTUM: ("velocities",),
    OptimizerType.ADAM: ("exp_avgs", "exp_avg_sqs"),
}
