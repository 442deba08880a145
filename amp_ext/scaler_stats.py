"""What a gradient scaler tells of its updates."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ScalerHistory", "ScalerStats"]


@dataclass(frozen=True)
class ScalerStats:
    """Counts of a scaler since it was made, loaded from a pickle or copied.

    Attributes:
        updates: Number of the last update that the device has finished; all else is as of that one.
        steps: Updates after which every optimizer had stepped.
        skips: Updates of which an optimizer's step was skipped.
        consecutive_skips: Of these, how many were the last ones in a row.
        scale: Loss scale after the update; one set by ``update(new_scale)`` shows after the next.
        smallest_scale: Least scale so far.
        largest_scale: Largest scale so far.
        last_nonfinite: Name of the first tensor with an inf or NaN at the last skip that found one
            on this rank, or None: "layer.weight", or "group 0, param 3" where an optimizer was not
            given names (``named_parameters()``).
    """

    updates: int
    steps: int
    skips: int
    consecutive_skips: int
    scale: float
    smallest_scale: float
    largest_scale: float
    last_nonfinite: str | None


@dataclass(frozen=True)
class ScalerHistory:
    """The last 4,096 updates that the device has finished, oldest first.

    Attributes:
        updates: Their numbers, from 1.
        scales: The loss scale that each step had.
        skipped: Whether a step was skipped.
    """

    updates: list[int]
    scales: list[float]
    skipped: list[bool]
