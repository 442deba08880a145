"""Counts and history of the updates of a gradient scaler."""

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
            this rank, or None: "layer.weight", or "group 0, param 3" if the optimizer was
            constructed without names (``named_parameters()``).
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
        updates: Numbers of the updates, from 1.
        scales: Loss scale during the step before each update.
        skipped: True for each update whose step was skipped.
    """

    updates: list[int]
    scales: list[float]
    skipped: list[bool]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots the loss scale over the updates, with a cross at each skipped step, and saves it.

        Args:
            path: File of the picture, such as "scale.png"; its extension sets the format.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        marks = Marks("skipped step", self.skipped)
        plot_over_time(path, ("update", "loss scale"), self.updates, self.scales, marks, base=2)


class ScalerReports(torch.amp.GradScaler):
    """The reports of :class:`amp_ext.GradScaler`, which do not wait for a GPU."""

    _loss_scale: Any  # an ops.LossScale; None if scaling is disabled
    _last_update: torch.cuda.Event | None

    def _mark_update(self, scale: Tensor) -> None:
        """Records an event after the update that was just launched, to be able to wait for it."""
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
        else:  # the update is in a CUDA graph, which may be running
            torch.cuda.synchronize(self._scale.device)

    def _report(self, settled: str, skips: str, scale_is_too_small: bool) -> None:
        """Logs the messages of the last finished update and warns of a scale that is too small."""
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
            optimizer: The optimizer whose step is meant; None stands for any optimizer.
            wait: Waits for the last update, so that the answer is up to date.

        Returns:
            None if no update, or none with this optimizer, has finished yet; False if scaling is
            disabled.

        Raises:
            TypeError: If ``optimizer`` is not an optimizer.
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
        """Returns counts, the extremes of the scale and the name of the last bad tensor.

        Args:
            wait: Waits for the last update. Otherwise the counts are those after the last update
                that the device has finished.
        """
        if not self._enabled:
            return ScalerStats(0, 0, 0, 0, 1.0, 1.0, 1.0, None)
        if wait:
            self._wait()
        return ScalerStats(*self._loss_scale.stats(float(self._init_scale)))

    def history(self, *, wait: bool = False) -> ScalerHistory:
        """Returns the scales and skips of the last 4,096 updates, for plots.

        Args:
            wait: Waits for the last update, so that the history includes it.
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
