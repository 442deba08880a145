"""Skips the steps whose gradients have a norm that is far above those before, or clips them."""

from __future__ import annotations

import copy
import math
import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from amp_ext import ops
from amp_ext.history_plot import Marks, plot_over_time
from amp_ext.saved_dicts import check_is_dict, missing_entry
from amp_ext.scaler_ranges import checked
from amp_ext.sharding import check_process_group

__all__ = ["NormGuard", "NormGuardHistory", "NormGuardStats"]


@dataclass(frozen=True)
class NormGuardStats:
    """What a guard knows after the last step that the device has finished.

    Attributes:
        norms: Number of norms so far, with those that were inf or NaN.
        last_norm: The last of them; inf if it was inf or NaN.
        mean: Mean of those that entered the statistics.
        deviation: Their standard deviation, and at least 1 % of the mean.
        limit: A next norm above it is an outlier; inf while none can be one: at first, and before
            the ``patience``-th outlier in a row.
        outliers: Norms so far by which a step was skipped, or its gradients clipped.
        nonfinite: Norms so far that were inf or NaN.
        last_outlier: Number of the last outlier among the norms, from 1; 0 if there was none.
    """

    norms: int
    last_norm: float
    mean: float
    deviation: float
    limit: float
    outliers: int
    nonfinite: int
    last_outlier: int


@dataclass(frozen=True)
class NormGuardHistory:
    """The last 4,096 norms of steps that the device has finished, oldest first.

    Attributes:
        numbers: Their numbers, from 1.
        norms: Of the unscaled gradients; inf for one that was inf or NaN.
        withheld: Whether the step was skipped, or its gradients clipped to the limit.
    """

    numbers: list[int]
    norms: list[float]
    withheld: list[bool]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the norms, with a cross at each that was skipped or clipped; saves the picture.

        Args:
            path: Of the picture; its ending says the format, as "norms.png".

        Raises:
            ImportError: Without matplotlib.
        """
        marks = Marks("skipped or clipped", self.withheld)
        labels = "norm", "norm of the gradients"
        plot_over_time(path, labels, self.numbers, self.norms, marks)


class NormGuard:
    """Judges the norm of all gradients at every step of an optimizer, on its device.

    ::

        guard = amp_ext.optim.NormGuard()
        optimizer = amp_ext.optim.AdamW(model.parameters(), lr=1e-3, norm_guard=guard)

    A norm above ``mean + sigma_factor * deviation`` of the norms before is an outlier: a corrupt
    batch, most often. Nothing waits for the device. The statistics are the exponentially weighted
    mean and variance of the float32 norms of the unscaled gradients of all groups, in float64::

        weight = max(2 / (window + 1), 1 / n)  # with n norms, this one included
        difference = norm - mean
        mean += weight * difference
        variance = (1 - weight) * (variance + weight * difference**2)
        deviation = max(sqrt(variance), 0.01 * mean)

    Outliers do not enter them; nor do norms that are inf or NaN, nor steps after which there is
    none: no parameter has a gradient, or a scaler found an overflow. The ``patience``-th outlier in
    a row is taken for a new level: it is stepped with, and the first of new statistics, which have
    the standard deviation of before in proportion to the mean, and judge at once.

    A step is judged as a whole, before anything is written, also over devices and dtypes. Its norm
    enters once, after it.

    An outlier is no overflow: the scale of a gradient scaler goes on as after a clean step. A norm
    that is inf or NaN without a scaler skips the step, too, unless the optimizer has
    ``skip_nonfinite``, whose norm is that of the finite elements. It is the optimizer's
    ``grad_norm``; to clip as well, give it ``max_grad_norm``: gradients that were clipped before
    the step hide outliers from the guard.

    Args:
        sigma_factor: Deviations above the mean that a norm may be; above 0.
        window: Norms whose plain average would give the newest one the same weight; 1 or more.
        warmup_steps: Norms that enter the statistics before these judge; 1 or more.
        max_norm: A norm above it is an outlier from the first step on, whatever the statistics say;
            such outliers do not count for ``patience``, nor do they break a row. None: no limit.
        action: At an outlier "skip" writes nothing, and steps are not counted; "clip" scales the
            gradients down to the limit that the norm has passed. With ``max_grad_norm``, the
            smaller factor of both is taken.
        patience: Outliers in a row of which the last is taken; 1 or more. With 1 the statistics
            withhold nothing.
        process_group: Ranks of torch.distributed that have other parameters than this one: the
            squares are summed over them, so that all skip together, and ``max_grad_norm`` clips
            by that norm, too. Parameters that are sharded DTensors share their norm without it.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If one is out of range.

    Reference:
        Statistics as in Finch, "Incremental calculation of weighted mean and variance", 2009. With
        action="clip" simpler than ZClip (Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM
        Pre-Training", 2025), which clips to another value and lets it enter.
    """

    def __init__(
        self,
        sigma_factor: float = 6.0,
        window: int = 128,
        warmup_steps: int = 64,
        max_norm: float | None = None,
        action: Literal["skip", "clip"] = "skip",
        patience: int = 16,
        process_group: Any = None,
    ) -> None:
        """Checks the arguments."""
        self._options: dict[str, Any] = {
            "sigma_factor": checked("NormGuard", "sigma_factor", sigma_factor),
            "window": checked("NormGuard", "window", window),
            "warmup_steps": checked("NormGuard", "warmup_steps", warmup_steps),
            "max_norm": None if max_norm is None else checked("NormGuard", "max_norm", max_norm),
            "action": action,
            "patience": checked("NormGuard", "patience", patience),
        }
        if action not in ("skip", "clip"):
            raise ValueError(f"NormGuard: action must be 'skip' or 'clip', got {action!r}")
        self.process_group = process_group
        self._start()

    def _start(self) -> None:
        """Makes statistics that nothing has entered, for no optimizer."""
        options = dict(self._options)
        limit = options["max_norm"]
        options["max_norm"] = math.inf if limit is None else float(limit)
        options["clips"] = options.pop("action") == "clip"
        #: The compiled part, for an optimizer.
        self.statistics = ops.NormStatistics(**options)
        self._optimizer: weakref.ref[Any] | None = None

    def __repr__(self) -> str:
        """Returns the call that makes such a guard."""
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"NormGuard({options})"

    @property
    def options(self) -> dict[str, Any]:
        """What the guard was made with, without its process group; a copy."""
        return dict(self._options)

    @property
    def process_group(self) -> Any:
        """The ranks over which squares are summed, or None. Of a pickle it has to be set again.

        Raises:
            TypeError: If what is set is neither None nor a group of which this process is a member.
        """
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        check_process_group(group, "NormGuard")
        self._process_group = group
        self._lacks_group = False

    def ranks(self) -> Any:
        """Returns the process group for a step.

        Raises:
            RuntimeError: If the guard was pickled with one, which no pickle can have.
        """
        if self._lacks_group:
            raise RuntimeError(
                "NormGuard: process_group must be set again after a pickle, which can't have it, "
                "got none: guard.process_group = group, or None"
            )
        return self._process_group

    def is_free_for(self, optimizer: Any) -> bool:
        """Returns whether no other optimizer has this guard."""
        other = None if self._optimizer is None else self._optimizer()
        return other is None or other is optimizer

    def attach(self, optimizer: Any) -> None:
        """Makes this the guard of an optimizer, whose ``norm_guard`` it is then, and of no other.

        Args:
            optimizer: One of :mod:`amp_ext.optim`; None: of none from here on.

        Raises:
            ValueError: If it is the guard of another optimizer that is still there.
        """
        if optimizer is not None and not self.is_free_for(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__}: norm_guard must belong to one optimizer, got that of "
                "another: make a guard for each"
            )
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def last_step_skipped(self, *, wait: bool = False) -> bool:
        """Returns whether the guard has skipped the last step that the device has finished.

        Args:
            wait: Waits for the device, so that the answer is that of the last step.
        """
        return self.statistics.last_step_skipped(wait)

    def stats(self, *, wait: bool = False) -> NormGuardStats:
        """Returns the statistics and counts.

        Args:
            wait: Waits for the device; else they are as of the last step that it has finished.
        """
        state = self.statistics.state(wait)
        deviation, limit = self.statistics.limits(wait)
        return NormGuardStats(
            norms=state["norms"],
            last_norm=state["last_norm"],
            mean=state["mean"],
            deviation=deviation,
            limit=limit,
            outliers=state["outliers"],
            nonfinite=state["nonfinite"],
            last_outlier=state["last_outlier"],
        )

    def history(self, *, wait: bool = False) -> NormGuardHistory:
        """Returns the last 4,096 norms, for plots; after a load those since.

        Args:
            wait: Waits for the device, so that the last step is among them.
        """
        first, norms, withheld = self.statistics.history(wait)
        return NormGuardHistory(list(range(first, first + len(norms))), norms, withheld)

    def warn_if_blind(self) -> None:
        """Warns once if all norms are the same, as those of gradients that were clipped before."""
        if self.statistics.must_warn():
            warnings.warn(self.statistics.warning(), stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics and counts as plain numbers. Waits for the device."""
        return self.statistics.state(wait=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads statistics and counts; the arguments of the guard stay as constructed.

        Args:
            state_dict: From ``state_dict()``.

        Raises:
            TypeError: If it is no dict.
            KeyError: If an entry is missing.
            ValueError: If an entry is no number, or out of range. Nothing has been changed after
                any of these.
        """
        operation = "NormGuard.load_state_dict"
        check_is_dict(operation, state_dict)
        names = self.statistics.state(wait=False)
        for name in names:
            if name not in state_dict:
                raise KeyError(missing_entry(operation, name, state_dict, _is_of_a_guard))
        self.statistics.load(
            {name: checked(operation, name, state_dict[name], ValueError) for name in names}
        )

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a pickle or a copy has: arguments and statistics, no optimizer or ranks."""
        has_group = self._process_group is not None or self._lacks_group
        return {"options": self._options, "statistics": self.state_dict(), "has_group": has_group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a guard from a pickle or a copy; it belongs to no optimizer yet."""
        self._options = dict(state["options"])
        self._process_group, self._lacks_group = None, state["has_group"]
        self._start()
        self.statistics.load(state["statistics"])

    def __copy__(self) -> NormGuard:
        """Copies the guard with its process group, which no pickle can have."""
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())
        other._process_group, other._lacks_group = self._process_group, self._lacks_group
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> NormGuard:
        """Does the same."""
        return copy.copy(self)


def _is_of_a_guard(mapping: Mapping[Any, Any]) -> bool:
    return "outliers_in_row" in mapping
