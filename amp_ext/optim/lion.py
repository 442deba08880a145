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

    The other arguments are the options of a step, which all optimizers have:
    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer`.

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
