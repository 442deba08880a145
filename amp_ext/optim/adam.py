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
        denominator_floor: Least value of the corrected second moment, under the root: the
            denominator is ``sqrt(max(v, denominator_floor)) + eps``.
        capturable: Accepted for drop-in use; every step can be captured.

    The other arguments are the options of a step, which all optimizers have:
    :class:`~amp_ext.optim.fused_optimizer.FusedOptimizer`.

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

    Args, errors: as :class:`Adam`, without ``decoupled_weight_decay``.

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
