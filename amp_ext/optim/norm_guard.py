"""Skips steps whose gradients have a norm far above the previous ones, or clips the gradients."""

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
    """Statistics of a guard after the last step that the device has finished.

    Attributes:
        norms: Number of norms so far, including norms that were inf or NaN.
        last_norm: The last norm; inf if it was inf or NaN.
        mean: Mean of the norms that entered the statistics.
        deviation: Standard deviation of these norms, but at least 1 % of the mean.
        limit: A norm above this limit is an outlier. inf during the warmup, and if the next outlier
            is accepted as a new level (see ``patience``).
        outliers: Number of norms so far for which a step was skipped or its gradients were clipped.
        nonfinite: Number of norms so far that were inf or NaN.
        last_outlier: Position of the last outlier in the sequence of norms, counted from 1; 0 if
            there was no outlier.
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
    """The last 4,096 gradient norms of steps that the device has finished, oldest first.

    Attributes:
        numbers: Positions of these norms in the sequence of all norms, counted from 1.
        norms: Norms of the unscaled gradients; inf for a norm that was inf or NaN.
        withheld: True for each norm whose step was skipped or clipped.
    """

    numbers: list[int]
    norms: list[float]
    withheld: list[bool]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots the norms, with a cross at each skipped or clipped step, and saves the picture.

        Args:
            path: File of the picture, such as "norms.png"; its extension sets the format.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        marks = Marks("skipped or clipped", self.withheld)
        labels = "norm", "norm of the gradients"
        plot_over_time(path, labels, self.numbers, self.norms, marks)


class NormGuard:
    """Checks the norm of all gradients at every step of an optimizer, on the device.

    ::

        guard = amp_ext.optim.NormGuard()
        optimizer = amp_ext.optim.AdamW(model.parameters(), lr=1e-3, norm_guard=guard)

    A norm above ``mean + sigma_factor * deviation`` of the previous norms is an outlier, most often
    caused by a corrupt batch. Nothing waits for the device. The norm covers the unscaled gradients
    of all groups. Norms are float32, the statistics float64::

        weight = max(2 / (window + 1), 1 / n)  # with n norms, this one included
        difference = norm - mean
        mean += weight * difference
        variance = (1 - weight) * (variance + weight * difference**2)
        deviation = max(sqrt(variance), 0.01 * mean)

    Outliers and norms that are inf or NaN do not enter the statistics. A step has no norm if no
    parameter has a gradient or a scaler found an overflow. The ``patience``-th outlier in a row
    counts as a new level: its step is taken, its norm becomes the mean, and the deviation is scaled
    in proportion. The new statistics are used at once, without a warmup.

    The guard makes one decision for each step, for all devices and dtypes, before anything is
    written.

    An outlier is not an overflow: a gradient scaler treats its step as a clean one. Without a
    scaler, a norm that is inf or NaN also skips the step, unless the optimizer has
    ``skip_nonfinite``. To clip as well, give ``max_grad_norm`` to the optimizer, because clipping
    before the step would hide outliers from the guard.

    Args:
        sigma_factor: Number of deviations that a norm may be above the mean; above 0.
        window: Span of the exponential averages: the newest norm has the weight 2 / (window + 1).
            1 or more.
        warmup_steps: Number of norms in the statistics before these are used; 1 or more.
        max_norm: A norm above this value is an outlier from the first step on. Such outliers
            neither count for ``patience`` nor interrupt a row of outliers. None for no limit.
        action: At an outlier, "skip" writes nothing and does not count the step. "clip" scales the
            gradients down to the limit that the norm exceeds; with ``max_grad_norm``, the smaller
            of the two factors applies.
        patience: Number of outliers in a row of which the last is accepted as a new level; 1 or
            more. With 1 the statistics never skip or clip a step.
        process_group: A group of torch.distributed whose ranks hold different parameters of one
            model. The norm, also that of ``max_grad_norm``, is taken over these ranks, so that all
            ranks skip the same steps. Sharded DTensors need no group.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range.

    Reference:
        Statistics as in Finch, "Incremental calculation of weighted mean and variance", 2009.
        action="clip" is simpler than ZClip (Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM
        Pre-Training", 2025), which clips to another norm and averages that norm.
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
        """Creates empty statistics, and detaches the guard from its optimizer."""
        options = dict(self._options)
        limit = options["max_norm"]
        options["max_norm"] = math.inf if limit is None else float(limit)
        options["clips"] = options.pop("action") == "clip"
        #: The compiled statistics, used by the optimizer.
        self.statistics = ops.NormStatistics(**options)
        self._optimizer: weakref.ref[Any] | None = None

    def __repr__(self) -> str:
        """Returns a constructor call that makes an equal guard."""
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"NormGuard({options})"

    @property
    def options(self) -> dict[str, Any]:
        """A copy of the arguments of the constructor, except the process group."""
        return dict(self._options)

    @property
    def process_group(self) -> Any:
        """The process group over which squares are summed, or None. Set it again after unpickling.

        Raises:
            TypeError: If the new value is neither None nor a group that contains this process.
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
            RuntimeError: If the guard lost its process group in a pickle, and none was set since.
        """
        if self._lacks_group:
            raise RuntimeError(
                "NormGuard: the guard was unpickled without its process_group. Set "
                "guard.process_group to a group, or to None."
            )
        return self._process_group

    def is_free_for(self, optimizer: Any) -> bool:
        """Returns True unless the guard belongs to another optimizer that still exists."""
        other = None if self._optimizer is None else self._optimizer()
        return other is None or other is optimizer

    def attach(self, optimizer: Any) -> None:
        """Makes this the guard of one optimizer, which stores it as ``norm_guard``.

        Args:
            optimizer: An optimizer of :mod:`amp_ext.optim`, or None to detach the guard.

        Raises:
            ValueError: If the guard belongs to another optimizer that still exists.
        """
        if optimizer is not None and not self.is_free_for(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__}: norm_guard already belongs to another optimizer. "
                "Make a NormGuard for each optimizer."
            )
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def last_step_skipped(self, *, wait: bool = False) -> bool:
        """Returns True if the guard skipped the last step that the device has finished.

        Args:
            wait: Waits for the device, so that the answer is about the last step taken.
        """
        return self.statistics.last_step_skipped(wait)

    def stats(self, *, wait: bool = False) -> NormGuardStats:
        """Returns the statistics and counts.

        Args:
            wait: Waits for the device, so that the last step is included.
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
        """Returns the last 4,096 norms, but none from before the last ``load_state_dict``.

        Args:
            wait: Waits for the device, so that the history includes the last step.
        """
        first, norms, withheld = self.statistics.history(wait)
        return NormGuardHistory(list(range(first, first + len(norms))), norms, withheld)

    def warn_if_blind(self) -> None:
        """Warns once if all norms are equal, as after clipping outside of the optimizer."""
        if self.statistics.must_warn():
            warnings.warn(self.statistics.warning(), stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics and counts as plain numbers. Waits for the device."""
        return self.statistics.state(wait=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads statistics and counts. The arguments of the guard stay as constructed.

        Args:
            state_dict: A dict from ``state_dict()``.

        Raises:
            TypeError: If ``state_dict`` is not a dict.
            KeyError: If an entry is missing.
            ValueError: If an entry is not a number, or out of range. After any error the guard is
                unchanged.
        """
        operation = "NormGuard.load_state_dict"
        check_is_dict(operation, state_dict)
        names = self.statistics.state(wait=False)
        for name in names:
            if name not in state_dict:
                raise KeyError(missing_entry(operation, name, state_dict))
        self.statistics.load(
            {name: checked(operation, name, state_dict[name], ValueError) for name in names}
        )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the arguments and statistics, but neither optimizer nor process group."""
        has_group = self._process_group is not None or self._lacks_group
        return {"options": self._options, "statistics": self.state_dict(), "has_group": has_group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a guard from a pickle or a copy; it belongs to no optimizer yet."""
        self._options = dict(state["options"])
        self._process_group, self._lacks_group = None, state["has_group"]
        self._start()
        self.statistics.load(state["statistics"])

    def __copy__(self) -> NormGuard:
        """Copies the guard together with its process group, which a pickle can't hold."""
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())
        other._process_group, other._lacks_group = self._process_group, self._lacks_group
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> NormGuard:
        """Returns a copy, as ``copy.copy`` does."""
        return copy.copy(self)
