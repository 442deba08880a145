"""Finds the loss in a model's output, and checks that a loss is one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def loss_in(output: Any) -> Any:
    """Returns the loss in a model's output.

    Args:
        output: The loss itself, an object with ``.loss``, a mapping with ``["loss"]``, or a tuple
            or list whose first item is the loss.

    Returns:
        The loss; None if the output has none.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, (tuple, list)) and output else None


def one_number(loss: Any, source: str) -> Tensor:
    """Returns a loss of one element as a tensor of shape ``()``.

    Args:
        loss: The result of a loss function or of :func:`loss_in`.
        source: Origin of the loss, for the error.

    Raises:
        ValueError: If the loss is not a tensor with one element.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    got = "none" if loss is None else type(loss).__name__
    if isinstance(loss, Tensor):
        got = f"shape {tuple(loss.shape)}"
    raise ValueError(f"train_step: {source} must give a loss, a tensor of one number, got {got}")
