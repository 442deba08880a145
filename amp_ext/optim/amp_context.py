"""What gradient scalers have handed an optimizer for one step: by two attributes, as torch does."""

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
    """An attribute in which torch's scaler hands something over: ``grad_scale``, ``found_inf``.

    torch sets both, calls ``optimizer.step`` and deletes both, unless that call raises: then the
    step drops them itself. What anybody else sets stays until it is deleted, or a step raises.
    While a hand-over is accepted, it is in both.
    """

    def __init__(self, meaning: str) -> None:
        """Sets the docstring.

        Args:
            meaning: What the attribute holds.
        """
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name  # also in the instance's dict, where this descriptor comes first

    def __get__(self, optimizer: Any, owner: type) -> Any:
        if optimizer is None:
            return self
        attributes = vars(optimizer)
        amp_context = attributes.get("_amp_context")
        if amp_context is not None:
            return getattr(amp_context, self._name)
        if self._name not in attributes:
            raise AttributeError(f"no gradient scaler has handed over {self._name}")
        return attributes[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        vars(optimizer)[self._name] = value

    def __delete__(self, optimizer: Any) -> None:
        vars(optimizer).pop(self._name, None)  # torch deletes what may have been dropped


def context_from_attributes(optimizer: Any) -> AmpStepContext:
    """Returns what is in both attributes, None where nothing is."""
    context = vars(optimizer).get
    return AmpStepContext(context("grad_scale"), context("found_inf"))


def context_from_scaler(scaler: Any, optimizer: Any, operation: str) -> AmpStepContext:
    """Returns what a scaler, ours or torch's, would hand over if it stepped an optimizer now.

    ``found_inf`` is None where the scaler has not looked yet: then the gradients carry the scale.

    Args:
        scaler: The scaler, which is left as it is.
        optimizer: Which unscales in its step.
        operation: What errors begin with.

    Raises:
        TypeError: If it is no scaler.
        RuntimeError: If it has scaled nothing yet, or has stepped the optimizer.
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
            f"{operation}: scaler must have scaled the loss of these gradients, got one that has "
            "scaled nothing yet"
        )
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    stage = state.get("stage", OptState.READY)
    if stage is OptState.STEPPED:
        raise RuntimeError(
            f"{operation}: there must be gradients to inspect, got those that scaler.step() has "
            "taken: call it between backward() and step(), or inspect_next() at any time"
        )
    if stage is OptState.READY:
        return AmpStepContext(
            scale if context.grad_scale is None else scale * context.grad_scale, None
        )
    return AmpStepContext(
        context.grad_scale, sum_of_flags(state["found_inf_per_device"], scale.device)
    )


def drop_amp_context(optimizer: Any) -> None:
    """Drops both attributes, whoever has set them."""
    del optimizer.grad_scale, optimizer.found_inf
