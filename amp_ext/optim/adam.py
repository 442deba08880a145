"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.optim.fused_optimizer import FusedOptimizer


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
        master_weights: Keeps a float32 master of every float16 and bfloat16 parameter.
        state_dtype: torch.float32, the least precision of the moments, or None for the parameter's.
        max_grad_norm: Norm to keep the unscaled gradients of all groups together below, inside the
            step; the norm is then in ``grad_norm``. None measures and clips nothing, 0 makes every
            gradient 0.
        clip_value: Largest magnitude of an element of the unscaled gradients, after the norm.
        skip_nonfinite: Leaves every element alone whose gradient is inf or NaN, and leaves those
            out of the norm. Under a gradient scaler such a step is skipped whole all the same.
        denominator_floor: Least value of the corrected second moment, under the root: the
            denominator is ``sqrt(max(v, denominator_floor)) + eps``.
        write_back_grads: Leaves the unscaled, clipped gradients in ``.grad``; without it, a step
            leaves ``.grad`` as the backward pass made it.
        foreach: Accepted for drop-in use; there is one path.
        fused: Likewise.
        capturable: Likewise; every step can be captured.
        differentiable: Must be False.

    Raises:
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.

    Reference:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
    """

    _required_options: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

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
        master_weights: bool = True,
        state_dtype: torch.dtype | None = torch.float32,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
        denominator_floor: float = 0.0,
        write_back_grads: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        """Checks the options; see the class."""
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        if not denominator_floor >= 0.0:
            raise ValueError(f"Invalid denominator_floor value: {denominator_floor}")
        for index, beta in enumerate(betas):
            if isinstance(beta, Tensor) and beta.numel() != 1:
                raise ValueError(f"Tensor betas[{index}] must be 1-element")
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if {type(beta) for beta in betas} not in ({float}, {Tensor}):
            raise ValueError("betas must be either both floats or both Tensors")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "master_weights": master_weights,
            "state_dtype": state_dtype,
            "max_grad_norm": max_grad_norm,
            "clip_value": clip_value,
            "write_back_grads": write_back_grads,
            "skip_nonfinite": skip_nonfinite,
            "denominator_floor": denominator_floor,
        }
        super().__init__(params, defaults)

    def buffer_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the moments that a group keeps."""
        if group["amsgrad"]:
            return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return ("exp_avg", "exp_avg_sq")

    def _hyperparameters(self, group: dict[str, Any], common: dict[str, Any]) -> Any:
        beta1, beta2 = group["betas"]
        return ops.AdamHyperparameters(
            **common,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            denominator_floor=group["denominator_floor"],
        )


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
        master_weights: bool = True,
        state_dtype: torch.dtype | None = torch.float32,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
        denominator_floor: float = 0.0,
        write_back_grads: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        """Checks the options; see :class:`Adam`."""
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            master_weights=master_weights,
            state_dtype=state_dtype,
            max_grad_norm=max_grad_norm,
            clip_value=clip_value,
            write_back_grads=write_back_grads,
            skip_nonfinite=skip_nonfinite,
            denominator_floor=denominator_floor,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores an optimizer; files of older releases of torch do not name the kind of decay."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
