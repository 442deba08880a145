"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import options_of


class Lion(FusedOptimizer):
    """Lion, which steps by the sign of a moving average and needs half of Adam's state.

    Every element moves by the learning rate, so use an ``lr`` 3 to 10 times smaller than for AdamW
    and a ``weight_decay`` larger by the same factor. An element whose average is 0 does not move.
    inf and NaN in a gradient make the parameter NaN, unless a gradient scaler skips the step.

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; a tensor must have one element, and is read on its device at each step.
        betas: Decay rates of two averages: of the one whose sign is the step, and of the state.
        weight_decay: Weight decay coefficient, before multiplication by the learning rate;
            decoupled, unless ``decoupled_weight_decay`` is false.
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
        write_back_grads: Stores the unscaled, clipped gradients in ``.grad``.
        foreach: Accepted for compatibility with torch; there is only one implementation.
        fused: Accepted for compatibility with torch; there is only one implementation.
        differentiable: Must be False.
        track_grad_norms: Stores the norm of each gradient in ``grad_norms`` at every step.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips or clips outliers of the norm.

    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer` describes the options of all optimizers
    in more detail.

    Raises:
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.

    Reference:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2. Chen et
        al., "Cautious Weight Decay", arXiv 2510.12402.
    """

    _hyperparameters_class = "LionHyperparameters"
    _state_formats: ClassVar = {"lion": ("q8m",)}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        cautious_weight_decay: bool = False,
        master_weights: bool | Literal["split", "split8"] = True,
        state_dtype: torch.dtype | Literal["8bit-bf16", "8bit"] | None = torch.float32,
        rounding: Literal["dither", "nearest"] | None = None,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
        write_back_grads: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        track_grad_norms: bool = False,
        norm_guard: NormGuard | None = None,
    ) -> None:
        """Checks the options, which the docstring of the class describes."""
        super().__init__(params, options_of(locals()), track_grad_norms, norm_guard)
