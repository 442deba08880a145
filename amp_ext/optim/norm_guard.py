"""Skips steps whose gradients have a norm far above the previous ones, or clips the gradients."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.plain_numbers import is_number, numbers_on_host, plain
from amp_ext.saved_dicts import check_is_dict, check_keys
from amp_ext.sharding import check_process_group

# Names of the numbers in the state tensor, in the order of csrc/judge_norm.h. "entered"
# counts all norms that entered the statistics, "count" those since the last new level, and
# "outliers_in_row" the outliers since a norm last entered, without those above max_norm.
_COUNTS = ("norms", "entered", "outliers", "nonfinite", "last_outlier", "outliers_in_row", "count")
_SAVED = (*_COUNTS, "mean", "variance", "last_norm")
_NUMBERS = ("number", *_SAVED, "limit", "last_was_skipped", "similar_norms", "similar_norm", "end")
_OPTIONS = ("sigma_factor", "window", "warmup_steps", "max_norm", "patience", "clips")
# The smallest and the largest value of each number, and what an error calls them.
_LEAST, _LARGEST = 5e-324, sys.float_info.max
_FROM_1 = 1, 2**63 - 1, "an int from 1 to 9.22e+18"
_RANGES: dict[str, tuple[float, float, str]] = {
    "sigma_factor": (_LEAST, _LARGEST, "a finite number above 0"),
    **dict.fromkeys(("window", "warmup_steps", "patience"), _FROM_1),
    "max_norm": (_LEAST, math.inf, "a number above 0"),
    **dict.fromkeys(_COUNTS, (0, 2**63 - 1, "an int from 0 to 9.22e+18")),
    **dict.fromkeys(("mean", "variance"), (0.0, _LARGEST, "a finite number of at least 0")),
    "last_norm": (0.0, math.inf, "a number of at least 0"),
}
_MANY_SIMILAR_NORMS = 64  # so many hardly occur unless the gradients were clipped before


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

    @outside_inference_mode()
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
            "sigma_factor": _checked("NormGuard", "sigma_factor", sigma_factor),
            "window": _checked("NormGuard", "window", window),
            "warmup_steps": _checked("NormGuard", "warmup_steps", warmup_steps),
            "max_norm": None if max_norm is None else _checked("NormGuard", "max_norm", max_norm),
            "action": action,
            "patience": _checked("NormGuard", "patience", patience),
        }
        if action not in ("skip", "clip"):
            raise ValueError(f"NormGuard: action must be 'skip' or 'clip', got {action!r}")
        self.process_group = process_group
        self._optimizer: weakref.ref[Any] | None = None
        self._has_warned = False
        self._earlier: list[Tensor] = []  # captured CUDA graphs still write tensors of before
        self._place(self._new_state({}), torch.device("cpu"))

    def _new_state(self, saved: Mapping[str, Any]) -> Tensor:
        """Returns a state tensor in host memory with the numbers of a state dict."""
        limit, clips = self._options["max_norm"] or math.inf, self._options["action"] == "clip"
        known = {**self._options, **saved, "max_norm": limit, "clips": clips}
        names = (*_NUMBERS, "max_norm_of_step", *_OPTIONS)
        state = torch.tensor([known.get(name, 0.0) for name in names], dtype=torch.float64)
        # A step without gradients changes the limit alone.
        ops.extension.judge_norm_(state, torch.zeros(()), None, None, None, False)
        return state

    @outside_inference_mode()
    def _place(self, state: Tensor, device: torch.device) -> None:
        """Moves a state tensor to a device, for all steps from now on."""
        self._state = state.to(device)
        numbers = self._state[: len(_NUMBERS)]
        self._on_host = numbers.cpu().pin_memory() if self._state.is_cuda else numbers
        self._similar_norms = self._on_host[_NUMBERS.index("similar_norms")]
        self._max_norm_of_step = self._state[len(_NUMBERS)]
        self._skips = torch.zeros((), device=device)

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

    def judge(self, device: torch.device, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Judges the norm of a step and enters it into the statistics, without waiting.

        Warns once if all norms are equal, as after clipping outside of the optimizer.

        Args:
            device: The device for the statistics, which are moved if they are elsewhere.
            inputs: The loss scale that the gradients carry, one float32 or None; a found_inf, one
                float32 or None; the sum of squares of all scaled gradients, one float64, or None
                if no parameter has a gradient; and whether the sum leaves out inf and NaN.

        Returns:
            The found_inf of the step, one float32, and the limit to which the step clips the norm,
            one float64. The next call overwrites both.
        """
        if not self._has_warned and self._similar_norms.item() >= _MANY_SIMILAR_NORMS:
            self._has_warned = True
            warnings.warn(
                "NormGuard: 64 norms in a row lie within 1e-4 of one value. The gradients were "
                "probably clipped before the optimizer, which hides outliers from the guard. Clip "
                "with max_grad_norm of the optimizer, and turn off the clipping of the trainer.",
                stacklevel=7,
            )
        if self._state.device != device:
            self._read(wait=True)
            self._earlier += [self._state, self._on_host, self._skips]
            self._place(self._state, device)
        ops.extension.judge_norm_(self._state, self._skips, *inputs)
        if self._state.is_cuda:
            self._on_host.copy_(self._state[: len(_NUMBERS)], non_blocking=True)
        return self._skips, self._max_norm_of_step

    def _read(self, wait: bool) -> dict[str, Any]:
        """Returns the numbers after the last step that the device has finished."""
        numbers = numbers_on_host(self._state, self._on_host, wait=wait)
        found = zip(_NUMBERS, numbers, strict=True)
        return {name: int(n) if name in _COUNTS else n for name, n in found}

    def last_step_skipped(self, *, wait: bool = False) -> bool:
        """Returns True if the guard skipped the last step that the device has finished.

        Args:
            wait: Waits for the device, so that the answer is about the last step taken.
        """
        return bool(self._read(wait)["last_was_skipped"])

    def stats(self, *, wait: bool = False) -> NormGuardStats:
        """Returns the statistics and counts.

        Args:
            wait: Waits for the device, so that the last step is included.
        """
        found = self._read(wait)
        found["deviation"] = max(math.sqrt(found["variance"]), 0.01 * found["mean"])
        return NormGuardStats(**{name: found[name] for name in NormGuardStats.__annotations__})

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics and counts as plain numbers. Waits for the device."""
        found = self._read(wait=True)
        return {name: found[name] for name in _SAVED}

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
        check_keys(f"{operation}: state_dict", _SAVED, state_dict)
        saved = {n: _checked(operation, n, state_dict[n], ValueError) for n in _SAVED}
        state = self._new_state(saved)
        self._read(wait=True)  # steps on other streams
        self._state.copy_(state)  # in place, because captured CUDA graphs use the tensor
        self._on_host.copy_(state[: len(_NUMBERS)])

    def __getstate__(self) -> dict[str, Any]:
        """Returns the arguments and statistics, but neither optimizer nor process group."""
        has_group = self._process_group is not None or self._lacks_group
        return {"options": self._options, "statistics": self.state_dict(), "has_group": has_group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a guard from a pickle or a copy; it belongs to no optimizer yet."""
        NormGuard.__init__(self, **state["options"])
        self._lacks_group = state["has_group"]
        self.load_state_dict(state["statistics"])

    def __copy__(self) -> NormGuard:
        """Copies the guard together with its process group, which a pickle can't hold."""
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())
        other._process_group, other._lacks_group = self._process_group, self._lacks_group
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> NormGuard:
        """Returns a copy, as ``copy.copy`` does."""
        return self.__copy__()


def _checked(operation: str, name: str, value: Any, wrong_type: type[Exception] = TypeError) -> Any:
    """Returns a number that lies in the range of its name; also from a tensor of one element."""
    least, largest, wanted = _RANGES[name]
    number = value = plain(value)
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    text = f"{operation}: {name} must be {wanted}, got {value!r}"
    if not is_number(number) or (isinstance(least, int) and not isinstance(number, int)):
        raise wrong_type(text)
    number = number if isinstance(number, (int, float)) else float(number)
    if not least <= number <= largest:
        raise ValueError(text)
    return number
