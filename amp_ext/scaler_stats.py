"""What a gradient scaler tells of its updates."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.amp_protocol import check_has_groups, optimizer_inside
from amp_ext.history_plot import Marks, plot_over_time

__all__ = ["ScalerHistory", "ScalerReports", "ScalerStats"]

_LOGGER = logging.getLogger("amp_ext")


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

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the loss scale over the updates, with a cross at each skipped step; saves it.

        Args:
            path: Of the picture; its ending says the format, as "scale.png".

        Raises:
            ImportError: Without matplotlib.
        """
        marks = Marks("skipped step", self.skipped)
        plot_over_time(path, ("update", "loss scale"), self.updates, self.scales, marks, base=2)


class ScalerReports(torch.amp.GradScaler):
    """What :class:`amp_ext.GradScaler` tells of its updates, without waiting for a GPU."""

    _loss_scale: Any  # the compiled one; None if scaling is disabled
    _last_update: torch.cuda.Event | None

    def _mark_update(self, scale: Tensor) -> None:
        """Remembers where the update that was just launched ends, to be able to wait for it."""
        if torch.cuda.is_current_stream_capturing():
            self._last_update = None
        else:
            self._last_update = self._last_update or torch.cuda.Event()
            self._last_update.record(torch.cuda.current_stream(scale.device))

    def _wait(self) -> None:
        """Waits until the device has finished the last update."""
        if self._scale is None or not self._scale.is_cuda:
            return
        if self._last_update is not None:
            self._last_update.synchronize()
        else:  # it was captured into a graph, which may have run since
            torch.cuda.synchronize(self._scale.device)

    def _report(self, settled: str, skips: str, scale_is_too_small: bool) -> None:
        """Tells what the last finished update has shown, as far as it is worth a line."""
        if settled:
            _LOGGER.info(settled)
        if skips:
            _LOGGER.warning(skips)
        if scale_is_too_small and self._scale is not None:
            _warn_of_scale(self._scale.item(), stacklevel=4)

    def last_step_skipped(
        self, optimizer: torch.optim.Optimizer | None = None, *, wait: bool = False
    ) -> bool | None:
        """Returns whether the step before the last update that the device has finished was skipped.

        Args:
            optimizer: Whose step; None for that of any.
            wait: Waits for the last update, so that the answer is exact.

        Returns:
            None if no update has been finished yet, or none with this optimizer; False if scaling
            is disabled.

        Raises:
            TypeError: If it is no optimizer.
        """
        if not self._enabled:
            return False
        if optimizer is not None:
            check_has_groups("last_step_skipped", optimizer)
        if wait:
            self._wait()
        inside = None if optimizer is None else optimizer_inside(optimizer)
        skipped: bool | None = self._loss_scale.step_skipped(inside)
        return skipped

    def stats(self, *, wait: bool = False) -> ScalerStats:
        """Returns counts, the limits of the scale and the last bad tensor.

        Args:
            wait: Waits for the last update; else they are as of the last that the device finished.
        """
        if not self._enabled:
            return ScalerStats(0, 0, 0, 0, 1.0, 1.0, 1.0, None)
        if wait:
            self._wait()
        return ScalerStats(*self._loss_scale.stats(float(self._init_scale)))

    def history(self, *, wait: bool = False) -> ScalerHistory:
        """Returns the scales and skips of the last 4,096 updates, for plots.

        Args:
            wait: Waits for the last update, so that it is among them.
        """
        if not self._enabled:
            return ScalerHistory([], [], [])
        if wait:
            self._wait()
        first, scales, skipped = self._loss_scale.history()
        return ScalerHistory(list(range(first, first + len(scales))), scales, skipped)

    def get_scale(self) -> float:
        """Returns the scale, or 1.0 if scaling is disabled. Waits for a GPU."""
        scale = super().get_scale()
        if self._enabled and self._loss_scale.must_warn_of(scale):
            _warn_of_scale(scale)
        return scale


def _warn_of_scale(scale: float, *, stacklevel: int = 3) -> None:
    warnings.warn(ops.LossScale.warning_of(str(scale)), stacklevel=stacklevel)
