"""Uses the scaler in Accelerate, and in the Trainer of Transformers, which uses Accelerate."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from amp_ext.clip_grad import clip_grad_norm_ as measure_grad_norm
from amp_ext.integrations import import_client
from amp_ext.scaler import GradScaler

_module = import_client("accelerate.optimizer", at_least="1.10", below="2")
_AcceleratedOptimizer: Any = _module.AcceleratedOptimizer

__all__ = ["PreparedOptimizer", "use_scaler"]

# Supported values of accelerator.distributed_type. Types such as FSDP have their own scalers.
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")


class PreparedOptimizer(_AcceleratedOptimizer):
    """The optimizer that ``accelerator.prepare`` returns after :func:`use_scaler`."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped; waits for the GPU if the optimizer is fused.

        Accelerate's own class reports a skip only if ``optimizer.step`` was not called. Fused
        optimizers, ours and torch's, are always called and skip on the device.
        """
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return bool(self.scaler.last_step_skipped(self.optimizer, wait=True))
        return bool(super().step_was_skipped)


def use_scaler(accelerator: Any, scaler: GradScaler | None = None) -> GradScaler:
    """Makes an accelerator use our scaler, and notice the steps that the scaler skips.

    With Transformers, call ``use_scaler(trainer.accelerator)`` before ``trainer.train()``. On CPUs,
    this also enables float16 autocast. Transformers calls ``accelerator.clip_grad_norm_`` with a
    limit of inf if it does not clip. That call then only measures the norm of float16 gradients,
    which stay scaled until the step. ::

        accelerator = accelerate.Accelerator(mixed_precision="fp16")
        scaler = use_scaler(accelerator)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    Args:
        accelerator: An ``accelerate.Accelerator`` with ``mixed_precision="fp16"`` that has not
            prepared an optimizer yet.
        scaler: An :class:`amp_ext.GradScaler`; by default a new one with the options of the
            accelerator's ``GradScalerKwargs``.

    Returns:
        The scaler.

    Raises:
        TypeError: If the scaler is not an :class:`amp_ext.GradScaler`.
        ValueError: If the accelerator has another precision, or a type of distribution with its own
            scaler (FSDP, DeepSpeed, Megatron-LM).
        RuntimeError: If the accelerator has already prepared an optimizer.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"use_scaler: scaler must be an amp_ext.GradScaler, got {type(scaler).__module__}."
            f"{type(scaler).__name__}"
        )
    if accelerator.mixed_precision != "fp16":
        raise ValueError(
            "use_scaler: accelerator.mixed_precision must be 'fp16', got "
            f"{accelerator.mixed_precision!r}: no other precision needs a scaler"
        )
    kind = accelerator.distributed_type.value
    if kind not in _KINDS:
        raise ValueError(
            f"use_scaler: accelerator.distributed_type must be one of {list(_KINDS)}, got {kind!r}"
        )
    if accelerator._optimizers:
        raise RuntimeError(
            "use_scaler: accelerator.prepare() has already prepared "
            f"{len(accelerator._optimizers)} optimizer(s). Call use_scaler() before it."
        )
    device = accelerator.device.type
    if scaler is None:
        numbers = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler else {}
        scaler = GradScaler(device, **numbers)
    accelerator.scaler = scaler
    # Binds functions of this module instead of closures, so that accelerators can be pickled.
    accelerator.clip_grad_norm_ = functools.partial(_clip_grad_norm_, accelerator)
    accelerator.prepare_optimizer = functools.partial(_prepare_optimizer, accelerator)
    accelerator.native_amp = True
    return scaler


def _prepare_optimizer(accelerator: Any, *arguments: Any, **options: Any) -> Any:
    """Prepares an optimizer as Accelerate does, and returns it as a :class:`PreparedOptimizer`."""
    prepared = type(accelerator).prepare_optimizer(accelerator, *arguments, **options)
    if type(prepared) is _AcceleratedOptimizer:
        prepared.__class__ = PreparedOptimizer
    return prepared


def _clip_grad_norm_(
    accelerator: Any,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Clips as Accelerate does, but only measures float16 gradients if the limit is inf.

    Released gradients are none, and their norm is 0: Accelerate would call ``unscale_``.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    dtypes = {param.grad.dtype for param in params if param.grad is not None}
    if max_norm == math.inf and norm_type == 2 and (torch.float16 in dtypes or not dtypes):
        norm = measure_grad_norm(params, math.inf)
        return norm / accelerator.scaler.scale(torch.ones_like(norm))
    clip = type(accelerator).clip_grad_norm_
    return clip(accelerator, params, max_norm, norm_type, *arguments, **options)
