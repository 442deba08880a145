"""What a gradient scaler and an optimizer that unscales inside its own step say to each other.

A scaler asks such an optimizer to look at its gradients, and hands over for one step what that step
must know: the scale that they carry, whether one of them is inf or NaN, and the look.
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
    "takes_scale",
    "to_device",
    "unscaling_optimizer",
]

#: Of torch's scaler and of ours: what an optimizer says that found no gradient looked at.
NOTHING_WAS_SCANNED = "No inf checks were recorded for this optimizer."
#: The text with which torch's scaler refuses ``closure=``.
NO_CLOSURE = "Closure use is not currently supported if GradScaler is enabled."

_SUPPORTS = "_step_supports_amp_scaling"


@dataclass(slots=True)
class GradScan:
    """What a look at all gradients of an optimizer has found.

    Attributes:
        found_infs: By device that holds a gradient, one float32: not 0 if one is inf or NaN.
        first_nonfinites: By device, one int64: the index of the first bad gradient. An update of
            the scale reads and resets it.
        sum_of_squares: One float64, of the gradients as they were, over all ranks that have parts
            of them. None if no other rank has, or no norm is wanted.
        squares_of_params: For each parameter one float64, likewise of its gradient, NaN if it has
            none. None where ``sum_of_squares`` is, or the norm of each is not wanted.
    """

    found_infs: Mapping[torch.device, Tensor]
    first_nonfinites: Mapping[torch.device, Tensor]
    sum_of_squares: Tensor | None = None
    squares_of_params: Tensor | None = None


@dataclass(slots=True)
class AmpStepContext:
    """What a scaler hands to an optimizer for one step.

    Attributes:
        grad_scale: One float32, the scale that the gradients carry; None: they carry none.
        found_inf: One float32; anything but 0: the step is skipped. The int 0 if nothing had a
            gradient when the scaler looked; None if there is no scaler.
        look: The look of this step; None if the gradients were unscaled before. The optimizer
            replaces it if it had to look again.
        is_used: Whether the optimizer has stepped with it. It says so right before it writes, and
            takes it back if nothing was written.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | int | None
    scan: GradScan | None = None
    is_used: bool = False


class SupportsFusedUnscale(Protocol):
    """An optimizer that unscales gradients inside its own step.

    A scaler finds both methods through an object that delegates to the optimizer as well: looked up
    there, they are bound to the optimizer itself.
    """

    def scan_gradients(self, found_inf: Tensor, grad_scale: Tensor | None = None) -> GradScan:
        """Looks for inf and NaN in all gradients, which it does not write.

        Args:
            found_inf: One float32 that the flags start from; copied, not written.
            grad_scale: One float32, or None. Without a finite inverse it counts as an overflow.
        """

    def set_amp_context(self, amp_context: AmpStepContext | None) -> None:
        """Takes what the next step needs, in place of all that was set before; None ends it."""


def unscaling_optimizer(optimizer: Any) -> SupportsFusedUnscale | None:
    """Returns the optimizer behind an object, if it unscales in its step and says so here.

    Args:
        optimizer: The optimizer itself, or an object that delegates to it and has its parameters.
    """
    found = getattr(getattr(optimizer, "set_amp_context", None), "__self__", None)
    if found is None or found is optimizer or _has_params_of(optimizer, found):
        return found
    return None


def optimizer_inside(optimizer: Any) -> Any:
    """Returns the optimizer that an object stands for: the one that it delegates to, or itself.

    Args:
        optimizer: The optimizer; an object that delegates to it; or one that shows its groups and
            has it among its attributes, as a class that derives from ``torch.optim.Optimizer``.
    """
    inside = unscaling_optimizer(optimizer)
    if inside is not None:
        return inside
    for other in (_owner_of_hooks(optimizer), *_optimizers_in(optimizer)):
        if other is not optimizer and _has_params_of(optimizer, other):
            return optimizer_inside(other)
    return optimizer


def takes_scale(optimizer: Any) -> bool:
    """Returns whether the gradients may keep their scale for the step of an object.

    An object that steps other optimizers may have copied ``_step_supports_amp_scaling`` from them,
    or may delegate it, and not pass on the scale that it is given. So its gradients are unscaled
    before its step, which is right in any case. The exception is an object that delegates all to
    one optimizer: the scaler finds that one and gives it the scale itself.

    Raises:
        TypeError: If the object hides the optimizer whose attribute it shows.
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
            "GradScaler.step: optimizer must show the optimizer that it delegates to, got "
            f"{type(optimizer).__name__}, which hides it: step the optimizer that is inside"
        )
    return True


def _owner_of_hooks(optimizer: Any) -> Any:
    """Returns the optimizer that a delegating object shows by its methods, or the object itself."""
    return getattr(getattr(optimizer, "register_step_pre_hook", None), "__self__", optimizer)


def _optimizers_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the other optimizers among an object's attributes, also in lists and dicts."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return []  # a look into all of its attributes takes longer than its step
    found = []
    for name, value in getattr(optimizer, "__dict__", {}).items():
        if name in ("state", "param_groups"):  # long, and without optimizers
            continue
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            value = (value,)
        found += [each for each in value if isinstance(each, torch.optim.Optimizer)]
    return [each for each in found if each is not optimizer]


def _has_params_of(optimizer: Any, other: Any) -> bool:
    """Returns whether an object has the parameters of an optimizer, all of them and no others."""
    if optimizer is other:
        return True
    groups, others = getattr(optimizer, "param_groups", None), other.param_groups
    return groups is None or groups is others or _ids_of_params(groups) == _ids_of_params(others)


def _ids_of_params(groups: Any) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in groups]


def check_has_groups(operation: str, optimizer: Any) -> None:
    """Refuses what has no groups of parameters, on behalf of an operation of a scaler."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"GradScaler.{operation}: optimizer must have param_groups, as a "
            f"torch.optim.Optimizer, got {type(optimizer).__name__}"
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device; what is read on the CPU has arrived there."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def sum_of_flags(flags: Mapping[torch.device, Tensor], device: torch.device) -> Tensor | int:
    """Returns a new tensor with the sum of all devices' flags; the int 0 without any, as torch.

    Args:
        flags: By device, one float32.
        device: Where the sum is to be.
    """
    if not flags:
        return 0
    first, *others = (to_device(flag, device) for flag in flags.values())
    return sum(others, first.clone())


class GradScaleAttributes:
    """What optimizers are handed in torch's way: ``grad_scale`` and ``found_inf``, for a step."""

    def __init__(self) -> None:
        """Starts with none."""
        self._values: list[tuple[Any, str, Any]] = []

    def set_for(self, optimizer: Any, amp_context: AmpStepContext) -> None:
        """Sets them until they are taken back, also on the optimizer that an object delegates to.

        Args:
            optimizer: The optimizer, or an object that delegates to it.
            amp_context: What it must know.
        """
        inner = _owner_of_hooks(optimizer)
        for holder in [optimizer] if inner is optimizer else [optimizer, inner]:
            for name in ("grad_scale", "found_inf"):
                value = getattr(amp_context, name)
                self._values.append((holder, name, value))  # first: an interrupt may come
                setattr(holder, name, value)

    def take_back(self) -> None:
        """Deletes those that were set, and no others."""
        for holder, name, value in self._values:
            if getattr(holder, name, None) is value:
                with contextlib.suppress(AttributeError):  # the same object behind both
                    delattr(holder, name)
        self._values.clear()
