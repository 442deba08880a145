"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import options_of


class Adam(FusedOptimizer):
    """Adam, in place of ``torch.optim.Adam``.

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; as a tensor, one element, read on its device at each step.
        betas: Decay per step of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay per step, before the learning rate.
        amsgrad: Divides by the largest second moment so far.
        maximize: Ascends instead.
        decoupled_weight_decay: Shrinks parameters (as AdamW) instead of adding to gradients.
        master_weights: Keeps a float32 master of every float16 and bfloat16 parameter. "split"
            keeps 16 more bits beside the parameter instead, "split8" 8 more.
        state_dtype: Dtype of the moments: torch.float32 or torch.bfloat16, or None for the
            parameter's. "8bit-bf16" and "8bit" keep them in 8 bits.
        rounding: How numbers in 16 and 8 bits are rounded: "dither", which loses no small change in
            the mean, or "nearest". None dithers unless ``state_dtype`` is None.
        max_grad_norm: Norm to keep the unscaled gradients of all groups together below, inside the
            step; the norm is then in ``grad_norm``. None clips nothing.
        clip_value: Largest magnitude of an element of the unscaled gradients, after the norm.
        skip_nonfinite: Leaves every element alone whose gradient is inf or NaN, and leaves those
            out of the norm.
        denominator_floor: Least value of the corrected second moment, under the root: the
            denominator is ``sqrt(max(v, denominator_floor)) + eps``.
        write_back_grads: Leaves the unscaled, clipped gradients in ``.grad``; without it, a step
            leaves ``.grad`` as the backward pass made it.
        foreach: Accepted for drop-in use; there is one path.
        fused: Accepted for drop-in use; there is one path.
        capturable: Accepted for drop-in use; every step can be captured.
        differentiable: Must be False.
        track_grad_norms: Keeps the norm of each gradient at every step, in ``grad_norms``.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips steps whose gradients have a
            norm far above those before, or clips them.

    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer` says more about the options that all
    optimizers have.

    Raises:
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.

    Reference:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
    """

    _hyperparameters_class = "AdamHyperparameters"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        master_weights: bool | Literal["split", "split8"] = True,
        state_dtype: torch.dtype | Literal["8bit-bf16", "8bit"] | None = torch.float32,
        rounding: Literal["dither", "nearest"] | None = None,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
        denominator_floor: float = 0.0,
        write_back_grads: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        track_grad_norms: bool = False,
        norm_guard: NormGuard | None = None,
    ) -> None:
        """Checks the options; see the class."""
        super().__init__(params, options_of(locals()), track_grad_norms, norm_guard)


class AdamW(Adam):
    """AdamW, in place of ``torch.optim.AdamW``: Adam with decoupled weight decay.

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; as a tensor, one element, read on its device at each step.
        betas: Decay per step of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay per step, before the learning rate.
        amsgrad: Divides by the largest second moment so far.
        maximize: Ascends instead.
        master_weights: Keeps a float32 master of every float16 and bfloat16 parameter. "split"
            keeps 16 more bits beside the parameter instead, "split8" 8 more.
        state_dtype: Dtype of the moments: torch.float32 or torch.bfloat16, or None for the
            parameter's. "8bit-bf16" and "8bit" keep them in 8 bits.
        rounding: How numbers in 16 and 8 bits are rounded: "dither", which loses no small change in
            the mean, or "nearest". None dithers unless ``state_dtype`` is None.
        max_grad_norm: Norm to keep the unscaled gradients of all groups together below, inside the
            step; the norm is then in ``grad_norm``. None clips nothing.
        clip_value: Largest magnitude of an element of the unscaled gradients, after the norm.
        skip_nonfinite: Leaves every element alone whose gradient is inf or NaN, and leaves those
            out of the norm.
        denominator_floor: Least value of the corrected second moment, under the root: the
            denominator is ``sqrt(max(v, denominator_floor)) + eps``.
        write_back_grads: Leaves the unscaled, clipped gradients in ``.grad``; without it, a step
            leaves ``.grad`` as the backward pass made it.
        foreach: Accepted for drop-in use; there is one path.
        fused: Accepted for drop-in use; there is one path.
        capturable: Accepted for drop-in use; every step can be captured.
        differentiable: Must be False.
        track_grad_norms: Keeps the norm of each gradient at every step, in ``grad_norms``.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips steps whose gradients have a
            norm far above those before, or clips them.

    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer` says more about the options that all
    optimizers have.

    Raises:
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.

    Reference:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool | Literal["split", "split8"] = True,
        state_dtype: torch.dtype | Literal["8bit-bf16", "8bit"] | None = torch.float32,
        rounding: Literal["dither", "nearest"] | None = None,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
        denominator_floor: float = 0.0,
        write_back_grads: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        track_grad_norms: bool = False,
        norm_guard: NormGuard | None = None,
    ) -> None:
        """Checks the options; see :class:`Adam`."""
        options = options_of(locals()) | {"decoupled_weight_decay": True}
        super().__init__(
            params, **options, track_grad_norms=track_grad_norms, norm_guard=norm_guard
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores an optimizer; files of older releases of torch do not name the kind of decay."""
        for group in state["param_groups"]:
            group["decoupled_weight_decay"] = True
        super().__setstate__(state)
