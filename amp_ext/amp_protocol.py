"""The protocol between a gradient scaler and an optimizer that unscales inside its own step.

The scaler first lets the optimizer scan its gradients for inf and NaN. For the step itself it
passes an :class:`AmpStepContext` with the loss scale that the gradients carry, the ``found_inf``
flag and the result of the scan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "AmpStepContext",
    "GradScan",
    "SupportsFusedUnscale",
    "check_has_groups",
    "optimizer_inside",
    "sum_of_flags",
    "takes_released_gradients",
    "takes_scale",
    "to_device",
    "unscaling_optimizer",
]

#: The error of torch's scaler and ours for a ``step`` without a scan.
NOTHING_WAS_SCANNED = "No inf checks were recorded for this optimizer."
#: The error with which torch's scaler refuses ``closure=``.
NO_CLOSURE = "Closure use is not currently supported if GradScaler is enabled."

_SUPPORTS = "_step_supports_amp_scaling"
_TAKES_RELEASED = "_takes_released_gradients"


@dataclass(slots=True)
class GradScan:
    """The result of one scan of all gradients of an optimizer for inf and NaN.

    Attributes:
        found_infs: Maps each device with gradients to one float32: not 0 if a gradient there has
            inf or NaN.
        first_nonfinites: Maps each of these devices to one int64, the index of the first parameter
            whose gradient has inf or NaN. ``GradScaler.update`` reads and resets these indices.
        sum_of_squares: One float64, the sum of squares of all scaled gradients over all ranks. None
            if no norm is needed, or if no other rank contributes: without sharded parameters and
            without a process group of a norm guard.
        counts_tensors: True if each flag is the number of parameters that were skipped, each for
            its own gradient, because the gradients were released.
    """

    found_infs: Mapping[torch.device, Tensor]
    first_nonfinites: Mapping[torch.device, Tensor]
    sum_of_squares: Tensor | None = None
    counts_tensors: bool = False


@dataclass(slots=True)
class AmpStepContext:
    """Everything that a scaler passes to an optimizer for one step.

    Attributes:
        grad_scale: One float32, the loss scale that the gradients carry. None if they are unscaled.
        found_inf: One float32; the step is skipped if it is not 0. The int 0 if no parameter had a
            gradient during the scan, None if there is no scaler.
        scan: The scan for this step, which the optimizer replaces if it scans again. None if
            ``unscale_`` was called before.
        is_used: True once the optimizer has stepped with this context. Set right before the first
            write, and reset if nothing was written after all.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | int | None
    scan: GradScan | None = None
    is_used: bool = False


class SupportsFusedUnscale(Protocol):
    """An optimizer that unscales gradients inside its own step.

    A scaler also finds such an optimizer behind a wrapper that delegates its attributes, because a
    method looked up on the wrapper is bound to the optimizer.
    """

    def scan_gradients(self, found_inf: Tensor, grad_scale: Tensor | None = None) -> GradScan:
        """Scans all gradients for inf and NaN without writing them.

        Args:
            found_inf: One float32, the initial value of each device's flag; copied, not written.
            grad_scale: One float32, the loss scale, or None. A scale whose inverse is not finite
                counts as an overflow.
        """

    def set_amp_context(self, amp_context: AmpStepContext | None) -> None:
        """Sets the context of the next step and drops an earlier context. None ends the step."""


def unscaling_optimizer(optimizer: Any) -> SupportsFusedUnscale | None:
    """Returns the optimizer behind an object, or None if it can't unscale in its step.

    Args:
        optimizer: The optimizer, or a wrapper that delegates to it and has the same parameters.
    """
    found = getattr(getattr(optimizer, "set_amp_context", None), "__self__", None)
    if found is None or found is optimizer or _has_params_of(optimizer, found):
        return found
    return None


def optimizer_inside(optimizer: Any) -> Any:
    """Returns the optimizer that a wrapper delegates to, or the object itself if it wraps none.

    Args:
        optimizer: The optimizer itself or a wrapper. A wrapper delegates attributes to the
            optimizer, or has the same groups and stores the optimizer in an attribute.
    """
    inside = unscaling_optimizer(optimizer)
    if inside is not None:
        return inside
    for other in (_owner_of_hooks(optimizer), *_optimizers_in(optimizer)):
        if other is not optimizer and _has_params_of(optimizer, other):
            return optimizer_inside(other)
    return optimizer


def takes_scale(optimizer: Any) -> bool:
    """Returns True if the gradients may stay scaled when the scaler steps an object.

    A wrapper may copy ``_step_supports_amp_scaling`` from its optimizers without passing the scale
    on to them. The scaler therefore unscales the gradients of a wrapper before the step. Only if a
    wrapper delegates everything to one optimizer, the scaler passes the scale to that optimizer.

    Raises:
        TypeError: If the object has the attribute, but the optimizer behind it can't be found.
    """
    if not getattr(optimizer, _SUPPORTS, False):
        return False
    if unscaling_optimizer(optimizer) is not None:
        return True
    owner = _owner_of_hooks(optimizer)
    if _optimizers_in(owner) or not _has_params_of(optimizer, owner):
        return False
    if not hasattr(type(owner), _SUPPORTS) and _SUPPORTS not in getattr(owner, "__dict__", {}):
        raise TypeError(
            "GradScaler.step: the scaler can't find the optimizer inside "
            f"{type(optimizer).__name__}. Pass the inner optimizer to scaler.step()."
        )
    return True


def takes_released_gradients(scaler: Any) -> bool:
    """Returns True for a scaler whose ``step`` needs no gradients, if hooks have used them."""
    return isinstance(scaler, torch.amp.GradScaler) and getattr(scaler, _TAKES_RELEASED, False)


def _owner_of_hooks(optimizer: Any) -> Any:
    """Returns the optimizer to which a wrapper's methods are bound, or the object itself."""
    return getattr(getattr(optimizer, "register_step_pre_hook", None), "__self__", optimizer)


def _optimizers_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns other optimizers in the attributes of an object, and in lists and dicts there."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return []  # torch's optimizers wrap no others, and a search takes longer than a step
    found = []
    for name, value in getattr(optimizer, "__dict__", {}).items():
        if name in ("state", "param_groups"):  # skips large values without optimizers
            continue
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            value = (value,)
        found += [each for each in value if isinstance(each, torch.optim.Optimizer)]
    return [each for each in found if each is not optimizer]


def _has_params_of(optimizer: Any, other: Any) -> bool:
    """Returns True if an object has no ``param_groups``, or the same parameters as an optimizer."""
    if optimizer is other:
        return True
    groups, others = getattr(optimizer, "param_groups", None), other.param_groups
    return groups is None or groups is others or _ids_of_params(groups) == _ids_of_params(others)


def _ids_of_params(groups: Any) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in groups]


def check_has_groups(operation: str, optimizer: Any) -> None:
    """Raises TypeError if an object has no ``param_groups``; the error names the operation."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"GradScaler.{operation}: optimizer must have param_groups, as a "
            f"torch.optim.Optimizer, got {type(optimizer).__name__}"
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device. A copy to the CPU is synchronous and can be read at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def sum_of_flags(flags: Mapping[torch.device, Tensor], device: torch.device) -> Tensor | int:
    """Returns the sum of all flags, or the int 0 if there are none, as in torch.

    Args:
        flags: Maps each device to one float32.
        device: The device of the sum.
    """
    if not flags:
        return 0
    first, *others = (to_device(flag, device) for flag in flags.values())
    return sum(others, first)


class GradScaleAttributes:
    """Sets ``grad_scale`` and ``found_inf`` on optimizers for one step, as torch's scaler does."""

    def __init__(self) -> None:
        """Starts without any attributes to delete later."""
        self._values: list[tuple[Any, str, Any]] = []

    def set_for(self, optimizer: Any, amp_context: AmpStepContext) -> None:
        """Sets ``grad_scale`` and ``found_inf`` on an optimizer until :meth:`take_back` is called.

        Args:
            optimizer: The optimizer, or a wrapper that delegates to it. Both get the attributes.
            amp_context: The context with the values of the attributes.
        """
        inner = _owner_of_hooks(optimizer)
        for holder in [optimizer] if inner is optimizer else [optimizer, inner]:
            for name in ("grad_scale", "found_inf"):
                value = getattr(amp_context, name)
                # Appends before setattr(), so that take_back() works even if an interrupt comes in
                # between.
                self._values.append((holder, name, value))
                setattr(holder, name, value)

    def take_back(self) -> None:
        """Deletes the attributes that were set, unless someone has replaced their values since."""
        for holder, name, value in self._values:
            if getattr(holder, name, None) is value:
                with contextlib.suppress(AttributeError):  # gone if wrapper and optimizer share it
                    delattr(holder, name)
        self._values.clear()
