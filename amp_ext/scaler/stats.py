"""The counts of a gradient scaler."""

from __future__ import annotations

from dataclasses import dataclass


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
