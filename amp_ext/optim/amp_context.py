"""The attributes ``grad_scale`` and ``found_inf``, which scalers set for an optimizer's step."""

from __future__ import annotations

from typing import Any

from amp_ext.amp_protocol import AmpStepContext

__all__ = [
    "GradScaleAttribute",
    "context_from_attributes",
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


def drop_amp_context(optimizer: Any) -> None:
    """Deletes ``grad_scale`` and ``found_inf``, regardless of the code that set them."""
    del optimizer.grad_scale, optimizer.found_inf
