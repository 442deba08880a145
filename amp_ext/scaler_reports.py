"""What a gradient scaler keeps to tell of its updates: monitor, records of optimizers, log."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import name_of_param
from amp_ext.scaler_stats import ScalerHistory, ScalerStats

__all__ = ["SCALES_DIFFER", "OptimizerRecord", "ScalerReports", "reference_to"]

_LOGGER = logging.getLogger("amp_ext")

#: Stands where a look writes the index of the first bad gradient, if ranks have different scales.
SCALES_DIFFER = 2**63 - 2  # beside NO_TENSOR, and of no parameter


@dataclass
class OptimizerRecord:
    """An optimizer that a scaler has looked at, and what is needed to name its bad gradients.

    Attributes:
        optimizer: A weak reference to it.
        slot: Number of its report.
        first_nonfinites: By device, where looks write the index of the first bad gradient. All
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
            with outside_inference_mode():
                self.first_nonfinites[device] = torch.full(
                    (), ops.NO_TENSOR, dtype=torch.int64, device=device
                )
        return self.first_nonfinites[device]

    def forget(self) -> None:
        """Drops what looks have found."""
        for first in self.first_nonfinites.values():
            first.fill_(ops.NO_TENSOR)

    def name_of(self, index: int) -> str | None:
        """Returns the name of the parameter at this index."""
        optimizer = self.optimizer()
        return None if optimizer is None else name_of_param(optimizer, index)


class ScalerReports:
    """Counts, scales and names of bad tensors since a scaler was made, loaded or copied.

    The kernel that updates the scale writes the monitor; reading it does not wait for a GPU. What
    holds memory is made when it is needed.
    """

    def __init__(self, warn_after: int) -> None:
        """Starts counting.

        Args:
            warn_after: Updates skipped in a row until a warning is logged.
        """
        self._warn_after = warn_after
        self._monitor: Any = None
        self._records: dict[int, OptimizerRecord] = {}  # by id
        self._last_update: torch.cuda.Event | None = None
        self._told_of_settling = False
        self._told_of_skips = False
        self._told_of_scales = 0  # the last update of which it was told that scales differed
        self._last_read: Any = None  # what the monitor told when it was read for the log

    def monitor(self, scale: Tensor) -> Any:
        """Returns what keeps the reports, beside the scale."""
        if self._monitor is None:
            self._monitor = ops.ScalerMonitor(scale)
        return self._monitor

    # Records.

    def record_of(self, optimizer: torch.optim.Optimizer, scale: Tensor) -> OptimizerRecord:
        """Returns the record of an optimizer, a new one if there is none.

        Args:
            optimizer: The optimizer.
            scale: The loss scale.
        """
        record = self._known(optimizer)
        if record is None:
            record = self._add(id(optimizer), reference_to(optimizer), scale)
        return record

    def record_for_look(self, optimizer: torch.optim.Optimizer, scale: Tensor) -> OptimizerRecord:
        """Returns the record of an optimizer whose gradients are about to be looked at."""
        record = self.record_of(optimizer, scale)
        if record.awaits_update:  # the iteration of the last look was dropped
            record.forget()
        record.awaits_update = True
        return record

    def record_for_update(self, key: int, scale: Tensor) -> OptimizerRecord:
        """Returns the record of the optimizer with this id, whose looks end in an update."""
        record = self._records.get(key)
        if record is None:  # someone's own way of looking
            record = self._add(key, lambda: None, scale)
        record.awaits_update = False
        return record

    def _known(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord | None:
        record = self._records.get(id(optimizer))  # the id may have been that of one that is gone
        return record if record is not None and record.optimizer() is optimizer else None

    def _add(
        self, key: int, reference: Callable[[], torch.optim.Optimizer | None], scale: Tensor
    ) -> OptimizerRecord:
        record = OptimizerRecord(reference, self.monitor(scale).add_optimizer())
        self._records[key] = record
        return record

    # Updates.

    def mark_update(self, scale: Tensor) -> None:
        """Remembers where the update that was just launched ends, to be able to wait for it."""
        if not scale.is_cuda:
            return
        if torch.cuda.is_current_stream_capturing():
            self._last_update = None
        else:
            self._last_update = self._last_update or torch.cuda.Event()
            self._last_update.record(torch.cuda.current_stream(scale.device))

    def wait(self, scale: Tensor | None) -> None:
        """Waits until the device has finished the last update."""
        if self._monitor is None or scale is None or not scale.is_cuda:
            return
        if self._last_update is not None:
            self._last_update.synchronize()
        else:  # it was captured into a graph, which may have run since
            torch.cuda.synchronize(scale.device)

    def log(self) -> None:
        """Logs what the last finished update has shown, as far as it is worth a line."""
        report = self._last_read = self._monitor.read()
        if not self._told_of_settling and report.settled_after >= 0:
            self._told_of_settling = True
            _LOGGER.info(
                "GradScaler: the loss scale settled at %g after %d skipped updates",
                report.settled_scale,
                report.settled_after,
            )
        if report.consecutive_skips < self._warn_after:
            self._told_of_skips = False
        elif not self._told_of_skips:
            self._told_of_skips = True
            is_of_these = report.nonfinite_update > report.updates - report.consecutive_skips
            name = self._name_of_nonfinite(report) if is_of_these else None
            _LOGGER.warning(
                "GradScaler: %d updates in a row were skipped, up to update %d; the loss scale is "
                "%g. The first bad gradient was that of %s. Gradients that are inf or NaN at any "
                "scale come from the model or the data.",
                report.consecutive_skips,
                report.updates,
                report.scale,
                name or "a parameter that is not known here",
            )

    def check_scales(self) -> None:
        """Raises RuntimeError if what was logged last is that ranks had different scales."""
        report = self._last_read
        if report is None or report.nonfinite_index != SCALES_DIFFER:
            return
        if report.nonfinite_update > self._told_of_scales:
            self._told_of_scales = report.nonfinite_update
            raise RuntimeError(
                "GradScaler: the scale must be the same on all ranks of process_group, got others; "
                f"here it is {report.scale:g} after update {report.updates}. All ranks have skipped"
                " their steps: load the scaler's state on every one of them"
            )

    def _name_of_nonfinite(self, report: Any) -> str | None:
        for record in list(self._records.values()):  # another thread may be adding to it
            if record.slot == report.nonfinite_slot:
                return record.name_of(report.nonfinite_index)
        return None

    # Answers, as of the last update that the device has finished.

    def step_skipped(self, optimizer: torch.optim.Optimizer | None) -> bool | None:
        """Returns whether the step of an optimizer, or of any, was skipped; None if unknown."""
        if self._monitor is None:
            return None
        if optimizer is None:
            report = self._monitor.read()
            return report.consecutive_skips > 0 if report.updates else None
        record = self._known(optimizer)
        if record is None:
            return None
        of_optimizer = self._monitor.read_optimizer(record.slot)
        return of_optimizer.last_was_skipped if of_optimizer.update else None

    def stats(self, initial_scale: float) -> ScalerStats:
        """Returns the counts.

        Args:
            initial_scale: The loss scale before the first update.
        """
        report = self._monitor.read() if self._monitor is not None else None
        if report is None or report.updates == 0:
            scale = initial_scale
            return ScalerStats(0, 0, 0, 0, scale, scale, scale, None)
        return ScalerStats(
            updates=report.updates,
            steps=report.updates - report.skips,
            skips=report.skips,
            consecutive_skips=report.consecutive_skips,
            scale=report.scale,
            smallest_scale=report.smallest_scale,
            largest_scale=report.largest_scale,
            last_nonfinite=self._name_of_nonfinite(report),
        )

    def history(self) -> ScalerHistory:
        """Returns the last 4,096 updates."""
        if self._monitor is None:
            return ScalerHistory([], [], [])
        history = self._monitor.history()
        first = history.first_update
        return ScalerHistory(
            list(range(first, first + len(history.scales))), history.scales, history.skipped
        )


def reference_to(optimizer: torch.optim.Optimizer) -> Callable[[], torch.optim.Optimizer | None]:
    """Returns what gives an optimizer as long as it is there."""
    try:
        return weakref.ref(optimizer)
    except TypeError:  # something that only looks like an optimizer
        return lambda: optimizer
