"""Stochastic gradient descent, plain or with (Nesterov) momentum."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.optim.fused_optimizer import FusedOptimizer


class SGD(FusedOptimizer):
    """SGD, in place of ``torch.optim.SGD``.

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; as a tensor, one element, read on its device at each step.
        momentum: Decay of the momentum buffer, per step.
        dampening: Share of the gradient that is kept out of the momentum buffer, except at the
            first step.
        weight_decay: Weight decay per step, before the learning rate.
        nesterov: Looks ahead along the momentum.
        maximize: Ascends instead.
        decoupled_weight_decay: Shrinks parameters instead of adding to gradients.
        master_weights: Keeps a float32 master of every float16 and bfloat16 parameter.
        state_dtype: torch.float32, the least precision of the momentum buffer, or None for the
            parameter's.
        max_grad_norm: Norm to keep the unscaled gradients of all groups together below, inside the
            step; the norm is then in ``grad_norm``. None measures and clips nothing, 0 makes every
            gradient 0.
        clip_value: Largest magnitude of an element of the unscaled gradients, after the norm.
        skip_nonfinite: Leaves every element alone whose gradient is inf or NaN, and leaves those
            out of the norm. Under a gradient scaler such a step is skipped whole all the same.
        write_back_grads: Leaves the unscaled, clipped gradients in ``.grad``; without it, a step
            leaves ``.grad`` as the backward pass made it.
        foreach: Accepted for drop-in use; there is one path.
        fused: Likewise.
        differentiable: Must be False.

    Raises:
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.

    Reference:
        Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in
        deep learning", 2013.
    """

    _required_options: ClassVar[tuple[str, ...]] = (
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        master_weights: bool = True,
        state_dtype: torch.dtype | None = torch.float32,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
        write_back_grads: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        """Checks the options; see the class."""
        if not momentum >= 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "master_weights": master_weights,
            "state_dtype": state_dtype,
            "max_grad_norm": max_grad_norm,
            "clip_value": clip_value,
            "write_back_grads": write_back_grads,
            "skip_nonfinite": skip_nonfinite,
        }
        super().__init__(params, defaults)

    def buffer_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the momentum buffer if a group has momentum."""
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _keeps_step(self, group: dict[str, Any]) -> bool:
        # Only dampening tells the first step from the others.
        return group["momentum"] != 0 and group["dampening"] != 0

    def _initial_step(self, state: dict[str, Any]) -> float:
        return 0.0 if state.get("momentum_buffer") is None else 1.0  # torch keeps no counter

    def _missing_from(self, group: dict[str, Any], state: dict[str, Any]) -> list[str]:
        return []  # without momentum_buffer the next step is the first

    def _hyperparameters(self, group: dict[str, Any], common: dict[str, Any]) -> Any:
        return ops.SgdHyperparameters(
            **common,
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
        )
