"""What a gradient scaler tells of its updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.nonfinite import name_of_param


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


@dataclass
class LookedAt:
    """An optimizer that a scaler has seen, and what is needed to name its bad gradients.

    Attributes:
        optimizer: A weak reference to it.
        slot: Number of its report.
        first_nonfinites: By device, where looks write the number of the first bad gradient. All
            parameters of all groups are counted, also those without a gradient.
        awaits_update: Whether it was looked at since the last update.
    """

    optimizer: Callable[[], torch.optim.Optimizer | None]
    slot: int
    first_nonfinites: dict[torch.device, Tensor] = field(default_factory=dict)
    awaits_update: bool = False

    def first_nonfinite(self, device: torch.device) -> Tensor:
        """Returns one int64 on a device for looks to lower."""
        if device not in self.first_nonfinites:
            self.first_nonfinites[device] = torch.full(
                (), ops.NO_TENSOR, dtype=torch.int64, device=device
            )
        return self.first_nonfinites[device]

    def forget(self) -> None:
        """Drops what looks have found."""
        for first in self.first_nonfinites.values():
            first.fill_(ops.NO_TENSOR)

    def name_of(self, number: int) -> str | None:
        """Returns the name of the parameter with this number."""
        optimizer = self.optimizer()
        return None if optimizer is None else name_of_param(optimizer, number)
