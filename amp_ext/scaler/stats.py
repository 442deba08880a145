"""Counts and log messages of the updates of a gradient scaler."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_ext import ops

__all__ = ["ScalerStats", "mark_update", "report", "wait_for", "warn_of_scale"]

_LOGGER = logging.getLogger("amp_ext")


@dataclass(frozen=True)
class ScalerStats:
    """Counts of a scaler since it was constructed, unpickled or copied.

    All values are those after the last update that the device has finished.

    Attributes:
        updates: Number of updates.
        steps: Number of updates in whose iteration every optimizer stepped.
        skips: Number of updates in whose iteration the step of an optimizer was skipped.
        consecutive_skips: Number of skips in a row up to the last update; 0 if that had none.
        scale: Loss scale. A scale set by ``update(new_scale)`` shows after the next update.
        smallest_scale: Smallest scale so far.
        largest_scale: Largest scale so far.
        last_nonfinite: Name of the first tensor with inf or NaN at the last skip that found one on
            this rank, or None. Without ``named_parameters()`` a position: "group 0, param 3".
        skipped_tensors: Number of parameters that were skipped one by one, because their optimizer
            releases its gradients.
    """

    updates: int
    steps: int
    skips: int
    consecutive_skips: int
    scale: float
    smallest_scale: float
    largest_scale: float
    last_nonfinite: str | None
    skipped_tensors: int = 0


def mark_update(event: torch.cuda.Event | None, device: torch.device) -> torch.cuda.Event | None:
    """Records an event after the update that was just launched; returns None within a capture."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = event or torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None, scale: Tensor | None) -> None:
    """Waits until the device of the scale has finished the update that :func:`mark_update` saw."""
    if scale is None or not scale.is_cuda:
        return
    if event is not None:
        event.synchronize()
    else:  # the update is in a CUDA graph, which may be running
        torch.cuda.synchronize(scale.device)


def report(scale: Tensor, skips: str, is_too_small: bool) -> None:
    """Logs the messages of the last finished update and warns of a scale that is too small."""
    if skips:
        _LOGGER.warning(skips)
    if is_too_small:
        warn_of_scale(scale.item(), stacklevel=4)


def warn_of_scale(scale: float, *, stacklevel: int = 3) -> None:
    """Warns that the inverse of the scale is not finite."""
    warnings.warn(ops.LossScale.warning_of(str(scale)), stacklevel=stacklevel)
