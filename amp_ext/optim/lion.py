"""Lion."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import options_of


class Lion(FusedOptimizer):
    """Lion, which steps by the sign of an average: half of Adam's state.

    Every element moves by the learning rate, so ``lr`` is 3 to 10 times smaller than AdamW's and
    ``weight_decay`` as much larger. A gradient of NaN makes its parameter NaN at once, one of inf
    at the next step; a scaler skips both. An element whose average is 0 stays.

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; as a tensor, one element, read on its device at each step.
        betas: Decay per step of the average in the step, and of the one that is kept.
        weight_decay: Weight decay per step, before the learning rate; decoupled, unless
            ``decoupled_weight_decay`` is false.
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
        write_back_grads: Leaves the unscaled, clipped gradients in ``.grad``; without it, a step
            leaves ``.grad`` as the backward pass made it.
        foreach: Accepted for drop-in use; there is one path.
        fused: Accepted for drop-in use; there is one path.
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
        Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
    """

    _hyperparameters_class = "LionHyperparameters"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
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
        """Checks the options; see the class."""
        super().__init__(params, options_of(locals()), track_grad_norms, norm_guard)
