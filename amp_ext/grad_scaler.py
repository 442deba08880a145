"""The gradient scaler: torch's, with kernels that look once and only read."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from amp_ext import ops

_DEVICE_TYPES = ("cpu", "cuda")


class GradScaler(torch.amp.GradScaler):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    Takes the place of ``torch.amp.GradScaler``: the same constructor, methods, state dict, errors
    and results. What differs:

    * The search for inf and NaN in ``step`` reads gradients and never writes them.
    * float16 gradients are welcome in ``step`` with an optimizer of ``amp_ext.optim``.
    * A scale that has no finite inverse (0, or 1e-39) counts as an overflow and warns once; torch
      would write NaN into the parameters.
    * ``update`` also takes an int, or a tensor of one element and any shape.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """

    _warned_of_scale = False

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """Sets the options; tensors are made where the first scaled loss is.

        Args:
            device: Type of the device that trains: "cuda" or "cpu".
            init_scale: Scale of the first iteration.
            growth_factor: Factor of growth after ``growth_interval`` clean iterations, above 1.
            backoff_factor: Factor after an overflow, below 1.
            growth_interval: Clean iterations until the scale grows.
            enabled: If false, every method passes through.

        Raises:
            AssertionError: If a factor is out of range.
        """
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        if not self._enabled:  # torch leaves these out, and its getters fail then
            self._scale = None
            self._growth_factor = growth_factor
            self._backoff_factor = backoff_factor
            self._growth_interval = growth_interval

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscales an optimizer's gradients in place; returns a found_inf for each device."""
        grads = _gradients(optimizer, allow_fp16)
        if not _are_ours(grads):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags: dict[torch.device, Tensor] = {}
        for device, group in _by_device(grads).items():
            flags[device] = found_inf.to(device, non_blocking=True, copy=True)
            ops.unscale_(group, inv_scale.to(device, non_blocking=True), flags[device])
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Looks for inf and NaN in an optimizer's gradients, which it does not write."""
        if getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS:
            return super()._check_inf_per_device(optimizer)  # someone's own way of looking
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        check_finite = getattr(optimizer, "_check_finite", None)
        if check_finite is not None:
            flags = check_finite(found_inf, scale)
        else:
            grads = _gradients(optimizer, allow_fp16=True)
            if not _are_ours(grads):
                return super()._check_inf_per_device(optimizer)
            flags = {}
            for device, group in _by_device(grads).items():
                flags[device] = found_inf.to(device, non_blocking=True, copy=True)
                grad_scale = scale.to(device, non_blocking=True)
                ops.check_finite_(group, flags[device], grad_scale=grad_scale)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of an iteration, without a look from the host.

        Args:
            new_scale: Sets the scale instead of letting it follow the overflows: a number, or a
                tensor of one element.

        Raises:
            AssertionError: If nothing was scaled, or no step or ``unscale_`` looked at gradients,
                or ``new_scale`` does not fit.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            if isinstance(new_scale, Tensor):
                if new_scale.numel() == 1:
                    new_scale = new_scale.reshape(())
            else:
                new_scale = float(new_scale)
            super().update(new_scale)
        elif scale.device.type not in _DEVICE_TYPES:
            super().update()
        else:
            found_infs = [
                found_inf.to(scale.device, non_blocking=True)
                for state in self._per_optimizer_states.values()
                for found_inf in state["found_inf_per_device"].values()
            ]
            if not found_infs:
                raise AssertionError("No inf checks were recorded prior to update.")
            ops.update_scale_(
                scale,
                growth_tracker,
                found_infs,
                growth_factor=self._growth_factor,
                backoff_factor=self._backoff_factor,
                growth_interval=self._growth_interval,
            )
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if scale.is_cpu:
            self._warn_of_scale(scale.item())

    def get_scale(self) -> float:
        """Returns the scale, or 1.0 if scaling is disabled. Waits for a GPU."""
        scale = super().get_scale()
        if self._enabled:
            self._warn_of_scale(scale)
        return scale

    def _warn_of_scale(self, scale: float) -> None:
        if self._warned_of_scale or abs(scale) > 2.0**-128 or math.isnan(scale):
            return
        self._warned_of_scale = True
        warnings.warn(
            f"GradScaler: the scale fell to {scale}, whose inverse is not finite: every step is "
            "skipped from here on. The gradients are inf or NaN at any scale; look for the cause "
            "in the model or the data, then set the scale with update(new_scale).",
            stacklevel=3,
        )


# What tells an override, also one that was patched into the class.
_UNSCALE_GRADS = GradScaler._unscale_grads_


def _gradients(optimizer: torch.optim.Optimizer, allow_fp16: bool) -> list[Tensor]:
    """Collects what is to be looked at: gradients, and the values of sparse ones."""
    grads: list[Tensor] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.dtype == torch.float16:
                if not allow_fp16:
                    raise ValueError(
                        "Attempting to unscale FP16 gradients. They would vanish in float16: call "
                        "scaler.step(optimizer) alone, with an optimizer of amp_ext.optim, which "
                        "unscales them in float32 inside its step; to clip them, construct it with "
                        "max_grad_norm=."
                    )
                if grad.is_sparse:
                    # The sum of duplicate entries may overflow where none of them does.
                    param.grad = grad = grad.coalesce()
            grads.append(grad._values() if grad.is_sparse else grad)
    return grads


def _are_ours(grads: list[Tensor]) -> bool:
    """Returns whether our kernels take these; torch has its own for the rest."""
    return all(
        grad.device.type in _DEVICE_TYPES
        and type(grad) in (Tensor, torch.nn.Parameter)
        and not grad.is_complex()
        for grad in grads
    )


def _by_device(grads: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device].append(grad)
    return groups
