"""Finds the loss in a model's output."""

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
