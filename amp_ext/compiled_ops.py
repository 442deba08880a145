"""The operations as ``torch.compile`` takes them: whole, with what each of them writes declared.

Inside a compiled region the functions of :mod:`amp_ext.ops` call these; elsewhere they call the
binary directly, which costs 40 µs less. An absent list is an empty one here, for a schema has no
optional lists that are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_ext import ops


@torch.library.custom_op(
    "amp_ext::check_finite", mutates_args=("found_inf", "sum_of_squares", "first_nonfinite")
)
def check_finite(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    grad_scale: Tensor | None,
    sum_of_squares: Tensor | None,
    first_nonfinite: Tensor | None,
) -> None:
    """Is :func:`amp_ext.ops.check_finite_`."""
    ops.check_finite_(
        tensors,
        found_inf,
        grad_scale=grad_scale,
        sum_of_squares=sum_of_squares,
        first_nonfinite=first_nonfinite,
    )


@torch.library.custom_op("amp_ext::count_nonfinite", mutates_args=())
def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Is :func:`amp_ext.ops.count_nonfinite`."""
    return ops.count_nonfinite(tensors)


@count_nonfinite.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else "cpu"
    return torch.empty(len(tensors), dtype=torch.int64, device=device)


@torch.library.custom_op("amp_ext::clip_grads", mutates_args=("grads",))
def clip_grads(grads: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Is :func:`amp_ext.ops.clip_grads_`."""
    ops.clip_grads_(grads, total_norm, max_norm=max_norm)


@torch.library.custom_op("amp_ext::unscale", mutates_args=("grads", "found_inf", "first_nonfinite"))
def unscale(
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    first_nonfinite: Tensor | None,
) -> None:
    """Is :func:`amp_ext.ops.unscale_`."""
    ops.unscale_(grads, inv_scale, found_inf, first_nonfinite=first_nonfinite)


@torch.library.custom_op(
    "amp_ext::update_scale", mutates_args=("scale", "growth_tracker", "hysteresis_tracker")
)
def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    hysteresis_tracker: Tensor | None,
    dynamic: bool,
) -> None:
    """Is :func:`amp_ext.ops.update_scale_`, without a monitor."""
    ops.update_scale_(
        scale,
        growth_tracker,
        found_infs,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        hysteresis_tracker=hysteresis_tracker,
        dynamic=dynamic,
    )


@torch.library.custom_op(
    "amp_ext::adam",
    mutates_args=(
        *("params", "grads", "exp_avgs", "exp_avg_sqs", "steps"),
        *("max_exp_avg_sqs", "master_params", "grad_norm"),
    ),
)
def adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    master_params: Sequence[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    decoupled_weight_decay: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    clip_value: float | None,
    max_grad_norm: float | None,
    sum_of_squares: Tensor | None,
    grad_norm: Tensor | None,
    write_back_grads: bool,
    skip_nonfinite: bool,
    denominator_floor: float,
) -> None:
    """Is :func:`amp_ext.ops.adam_`."""
    ops.adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps,
        max_exp_avg_sqs=max_exp_avg_sqs or None,
        master_params=master_params or None,
        lr=lr if lr_tensor is None else lr_tensor,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        decoupled_weight_decay=decoupled_weight_decay,
        grad_scale=grad_scale,
        found_inf=found_inf,
        clip_value=clip_value,
        max_grad_norm=max_grad_norm,
        sum_of_squares=sum_of_squares,
        grad_norm=grad_norm,
        write_back_grads=write_back_grads,
        skip_nonfinite=skip_nonfinite,
        denominator_floor=denominator_floor,
    )


@torch.library.custom_op(
    "amp_ext::sgd",
    mutates_args=("params", "grads", "momentum_buffers", "steps", "master_params", "grad_norm"),
)
def sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    steps: Sequence[Tensor],
    master_params: Sequence[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    decoupled_weight_decay: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    clip_value: float | None,
    max_grad_norm: float | None,
    sum_of_squares: Tensor | None,
    grad_norm: Tensor | None,
    write_back_grads: bool,
    skip_nonfinite: bool,
) -> None:
    """Is :func:`amp_ext.ops.sgd_`."""
    ops.sgd_(
        params,
        grads,
        momentum_buffers=momentum_buffers or None,
        steps=steps or None,
        master_params=master_params or None,
        lr=lr if lr_tensor is None else lr_tensor,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        decoupled_weight_decay=decoupled_weight_decay,
        grad_scale=grad_scale,
        found_inf=found_inf,
        clip_value=clip_value,
        max_grad_norm=max_grad_norm,
        sum_of_squares=sum_of_squares,
        grad_norm=grad_norm,
        write_back_grads=write_back_grads,
        skip_nonfinite=skip_nonfinite,
    )


@torch.library.custom_op("amp_ext::refresh_masters", mutates_args=("master_params",))
def refresh_masters(params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None:
    """Is :func:`amp_ext.ops.refresh_masters_`."""
    ops.refresh_masters_(params, master_params)
