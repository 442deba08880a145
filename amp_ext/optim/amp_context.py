"""The attributes ``grad_scale`` and ``found_inf``, which scalers set for an optimizer's step."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from amp_ext.amp_protocol import AmpStepContext, sum_of_flags

__all__ = [
    "GradScaleAttribute",
    "context_from_attributes",
    "context_from_scaler",
    "drop_amp_context",
]


class GradScaleAttribute:
    """A descriptor for ``grad_scale`` or ``found_inf``, attributes that torch's scaler sets.

    torch's scaler sets both attributes, calls ``optimizer.step`` and deletes them. If the step
    raises, torch's scaler does not delete them, so the step itself does. During a step of our
    scaler, both attributes show the values of its :class:`AmpStepContext`.
    """

    def __init__(self, meaning: str) -> None:
        """Sets the docstring.

        Args:
            meaning: Description of the attribute's value.
        """
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name  # also the key in vars(optimizer), which this descriptor hides

    def __get__(self, optimizer: Any, owner: type) -> Any:
        if optimizer is None:
            return self
        attributes = vars(optimizer)
        amp_context = attributes.get("_amp_context")
        if amp_context is not None:
            return getattr(amp_context, self._name)
        if self._name not in attributes:
            raise AttributeError(f"no gradient scaler has set {self._name}")
        return attributes[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        vars(optimizer)[self._name] = value

    def __delete__(self, optimizer: Any) -> None:
        vars(optimizer).pop(self._name, None)  # the step may have deleted it before torch does


def context_from_attributes(optimizer: Any) -> AmpStepContext:
    """Returns a context with ``grad_scale`` and ``found_inf``; each is None if it is not set."""
    context = vars(optimizer).get
    return AmpStepContext(context("grad_scale"), context("found_inf"))


def context_from_scaler(scaler: Any, optimizer: Any, operation: str) -> AmpStepContext:
    """Returns the context that a scaler, ours or torch's, would pass to a step taken now.

    If the scaler has not scanned the gradients yet, ``found_inf`` is None and the gradients still
    carry the loss scale.

    Args:
        scaler: The scaler; it does not change.
        optimizer: An optimizer that unscales inside its step.
        operation: Start of errors.

    Raises:
        TypeError: If ``scaler`` is not a gradient scaler.
        RuntimeError: If the scaler has not scaled a loss yet, or has already stepped the optimizer.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"{operation}: scaler must be a torch.amp.GradScaler or one of amp_ext, got "
            f"{type(scaler).__name__}"
        )
    context = context_from_attributes(optimizer)
    if not scaler.is_enabled():
        return context
    scale = scaler._scale
    if scale is None:
        raise RuntimeError(
            f"{operation}: this scaler has not scaled a loss yet. Pass the scaler whose scale() "
            "was called on the loss of these gradients."
        )
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    stage = state.get("stage", OptState.READY)
    if stage is OptState.STEPPED:
        raise RuntimeError(
            f"{operation}: scaler.step() has already used these gradients. Call inspect() after "
            "backward() and before step(), or call inspect_next() at any time."
        )
    if stage is OptState.READY:
        return AmpStepContext(
            scale if context.grad_scale is None else scale * context.grad_scale, None
        )
    return AmpStepContext(
        context.grad_scale, sum_of_flags(state["found_inf_per_device"], scale.device)
    )


def drop_amp_context(optimizer: Any) -> None:
    """Deletes ``grad_scale`` and ``found_inf``, regardless of the code that set them."""
    del optimizer.grad_scale, optimizer.found_inf
