"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import options_of


class Adam(FusedOptimizer):
    """Adam, a replacement for ``torch.optim.Adam``.

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; a tensor must have one element, and is read on its device at each step.
        betas: Decay rates, per step, of the first and of the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay coefficient, before multiplication by the learning rate.
        amsgrad: Divides by the largest second moment so far (AMSGrad).
        maximize: Maximizes the objective instead of minimizing it.
        decoupled_weight_decay: Shrinks parameters (as AdamW) instead of adding to gradients.
        cautious_weight_decay: Shrinks only elements that the update does not move away from 0.
            Needs ``decoupled_weight_decay``.
        master_weights: Keeps a float32 master of every 16-bit parameter; "split" and "split8" store
            it in fewer bytes.
        state_dtype: Dtype of the moments; None means the parameter's. "8bit" and "8bit-bf16"
            quantize moments to 8 bits.
        rounding: Rounding to 16 or 8 bits: "nearest" or "dither"; None lets ``state_dtype`` decide.
        max_grad_norm: Clips the norm of all unscaled gradients to this value; None does not clip.
        clip_value: Clips each unscaled gradient element to this magnitude, after clipping by norm.
        skip_nonfinite: Does not update elements whose gradient is inf or NaN.
        denominator_floor: Lower limit of the bias-corrected second moment v, whose denominator is
            ``sqrt(max(v, denominator_floor)) + eps``.
        write_back_grads: Stores the unscaled, clipped gradients in ``.grad``.
        foreach: Accepted for compatibility with torch; there is only one implementation.
        fused: Accepted for compatibility with torch; there is only one implementation.
        capturable: Accepted for compatibility with torch; CUDA graphs can capture every step.
        differentiable: Must be False.
        track_grad_norms: Stores the norm of each gradient in ``grad_norms`` at every step.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips or clips outliers of the norm.

    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer` describes the options of all optimizers
    in more detail.

    Raises:
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.

    Reference:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015. Chen et al., "Cautious
        Weight Decay", arXiv 2510.12402.
    """

    _hyperparameters_class = "AdamHyperparameters"
    _state_formats: ClassVar = {"adam": ("q8h", "q8s"), "amsgrad": ("", "", "")}

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
        cautious_weight_decay: bool = False,
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
        """Checks the options, which the docstring of the class describes."""
        super().__init__(params, options_of(locals()), track_grad_norms, norm_guard)


class AdamW(Adam):
    """AdamW, a replacement for ``torch.optim.AdamW``: Adam with decoupled weight decay.

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; a tensor must have one element, and is read on its device at each step.
        betas: Decay rates, per step, of the first and of the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay coefficient, before multiplication by the learning rate.
        amsgrad: Divides by the largest second moment so far (AMSGrad).
        maximize: Maximizes the objective instead of minimizing it.
        cautious_weight_decay: Shrinks only elements that the update does not move away from 0.
        master_weights: Keeps a float32 master of every 16-bit parameter; "split" and "split8" store
            it in fewer bytes.
        state_dtype: Dtype of the moments; None means the parameter's. "8bit" and "8bit-bf16"
            quantize moments to 8 bits.
        rounding: Rounding to 16 or 8 bits: "nearest" or "dither"; None lets ``state_dtype`` decide.
        max_grad_norm: Clips the norm of all unscaled gradients to this value; None does not clip.
        clip_value: Clips each unscaled gradient element to this magnitude, after clipping by norm.
        skip_nonfinite: Does not update elements whose gradient is inf or NaN.
        denominator_floor: Lower limit of the bias-corrected second moment v, whose denominator is
            ``sqrt(max(v, denominator_floor)) + eps``.
        write_back_grads: Stores the unscaled, clipped gradients in ``.grad``.
        foreach: Accepted for compatibility with torch; there is only one implementation.
        fused: Accepted for compatibility with torch; there is only one implementation.
        capturable: Accepted for compatibility with torch; CUDA graphs can capture every step.
        differentiable: Must be False.
        track_grad_norms: Stores the norm of each gradient in ``grad_norms`` at every step.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips or clips outliers of the norm.

    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer` describes the options of all optimizers
    in more detail.

    Raises:
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.

    Reference:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. Chen et al., "Cautious
        Weight Decay", arXiv 2510.12402.
    """

    _state_formats: ClassVar = {"adamw": ("q8h", "q8s")}
    _fixed_options: ClassVar = {"decoupled_weight_decay": True}

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
        cautious_weight_decay: bool = False,
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
        """Checks the options, which the docstring of the class describes."""
        options = options_of(locals()) | self._fixed_options
        super().__init__(
            params, **options, track_grad_norms=track_grad_norms, norm_guard=norm_guard
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores an optimizer; adds ``decoupled_weight_decay``, which files of old torch lack."""
        for group in state["param_groups"]:
            group.update(self._fixed_options)
        super().__setstate__(state)
