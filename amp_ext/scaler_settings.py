"""The settings of a gradient scaler: constructor, setters, state dicts and pickles."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from amp_ext import ops
from amp_ext.amp_protocol import GradScaleAttributes
from amp_ext.nonfinite import name_of_param
from amp_ext.saved_dicts import check_is_dict, missing_entry
from amp_ext.scaler_ranges import as_number, check_range, checked
from amp_ext.scaler_stats import ScalerReports
from amp_ext.sharding import check_process_group

__all__ = ["DEVICE_TYPES", "ScalerSettings"]

#: Device types that our kernels support. On others torch's code runs, and limits of the scale are
#: refused.
DEVICE_TYPES = ("cpu", "cuda")

_OF_TORCH = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


class ScalerSettings(ScalerReports):
    """The settings of :class:`amp_ext.GradScaler`, and the content of its copies and files."""

    _hysteresis: int
    _hysteresis_tracker: Tensor | None = None

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        dynamic: bool = True,
        hysteresis: int = 1,
        warn_after: int = 10,
        process_group: Any = None,
    ) -> None:
        """Sets the options. Tensors are created on the device of the first scaled loss.

        Args:
            device: The device used for training, or its type: "cuda" or "cpu".
            init_scale: Scale of the first iteration.
            growth_factor: Factor by which the scale grows after ``growth_interval`` clean
                iterations; above 1.
            backoff_factor: Factor by which the scale falls after an overflow; below 1.
            growth_interval: Number of clean iterations until the scale grows.
            enabled: If false, every method passes its input through.
            min_scale: Smallest value to which the scale can fall, or None. At this limit the
                scale no longer falls after an overflow, so don't infer skipped steps from it.
            max_scale: Largest value to which the scale can grow, or None.
            dynamic: If false, the scale stays at ``init_scale``. Steps are still skipped after
                overflows.
            hysteresis: Number of overflows since the last growth after which the scale falls.
            warn_after: Number of consecutive skipped updates after which a warning is logged.
            process_group: Ranks that skip a step together, a ``torch.distributed.ProcessGroup``.
                Each scan ends with one all-reduce of three numbers over them, so all of them must
                step the same optimizers. If their scales differ, all skip and ``update`` raises.
                With None there is no collective: ranks agree anyway if their scales are the same
                and their gradients are reduced, as with DDP, or are DTensors.

        Raises:
            AssertionError: If a factor is out of range.
            ValueError: If another number is out of range, ``init_scale`` is not within the limits,
                torch does not know the device, or limits are given for a device other than "cuda"
                and "cpu".
            TypeError: If a numeric option is no number, a flag is a string, ``device`` no device,
                or ``process_group`` is neither None nor a group that contains this process.
        """
        check_process_group(process_group)
        _check_flag("enabled", enabled)
        options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "min_scale": 0.0 if min_scale is None else min_scale,
            "max_scale": math.inf if max_scale is None else max_scale,
            "hysteresis": hysteresis,
            "warn_after": warn_after,
        }
        if enabled:
            options = {name: as_number("GradScaler", name, each) for name, each in options.items()}
        kind = _device_type_of(device, enabled)
        super().__init__(kind, **{name: options[name] for name in _OF_TORCH}, enabled=enabled)
        if self._enabled:
            _check_options(options, dynamic, self._device)
        else:
            self._scale = None  # torch sets none of these, so that its getters fail
        vars(self).update({f"_{name}": option for name, option in options.items()})
        self._init_hysteresis_tracker = self._hysteresis
        self._dynamic = dynamic
        self.process_group = process_group
        self._start_reports()

    def __repr__(self) -> str:
        """Returns the options and the counts after the last update that the device has finished."""
        name = type(self).__name__
        if not self._enabled:
            return f"{name}(enabled=False)"
        options = {"device": self._device} | {
            each: getattr(self, f"_{each}") for each in (*_OF_TORCH, "min_scale", "max_scale")
        }
        options |= {"dynamic": self._dynamic, "hysteresis": self._hysteresis}
        stats = self.stats()
        listed = ", ".join(f"{each}={value!r}" for each, value in options.items())
        return f"{name}({listed}; scale {stats.scale}, {stats.skips} of {stats.updates} skipped)"

    def _start_reports(self) -> None:
        """Starts counting from 0; the attributes set here are never copied to another process."""
        self._loss_scale = ops.LossScale(name_of_param) if self._enabled else None
        self._last_update = None
        self._grad_scale_attributes = GradScaleAttributes()

    @_disable_dynamo
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            super()._lazy_init_scale_growth_tracker(dev)  # raises: the tensors exist already
        self._loss_scale.make(vars(self), torch.device(dev))

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor; ValueError if it is not above 1, TypeError if no number."""
        super().set_growth_factor(self._checked("growth_factor", new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor after an overflow; ValueError if it is not above 0 and below 1."""
        super().set_backoff_factor(self._checked("backoff_factor", new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the clean iterations until the scale grows; ValueError if below 1."""
        super().set_growth_interval(self._checked("growth_interval", new_interval))

    def _checked(self, name: str, value: Any) -> Any:
        """Returns the number that a setter stores; a disabled scaler accepts anything."""
        return checked(f"GradScaler.set_{name}", name, value) if self._enabled else value

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, and the hysteresis counter if ``hysteresis`` is not 1."""
        state = super().state_dict()
        if state and self._hysteresis != 1:
            state["_hysteresis_tracker"] = self._get_hysteresis_tracker()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of torch's. The limits stay as constructed.

        Args:
            state_dict: A dict from ``state_dict()``.

        Raises:
            RuntimeError: If the dict is empty, as that of a disabled scaler is.
            TypeError: If ``state_dict`` is not a dict.
            KeyError: If an entry is missing.
            ValueError: If an entry is not a number, or out of range. After any error or an
                interrupt the scaler is unchanged.
        """
        operation = "GradScaler.load_state_dict"
        if self._enabled:
            check_is_dict(operation, state_dict)
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # disabled: does nothing; empty: raises
            return
        entry = functools.partial(checked, operation, wrong_type=ValueError)
        try:
            self._loss_scale.load(vars(self), dict(state_dict), entry)
        except KeyError as error:
            name = error.args[0]
            raise KeyError(missing_entry(operation, name, state_dict, _is_of_a_scaler)) from None

    def _get_hysteresis_tracker(self) -> int:
        if self._hysteresis_tracker is None:
            return self._init_hysteresis_tracker
        return int(self._hysteresis_tracker.item())

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without process-specific objects; a copy counts from 0."""
        state = super().__getstate__()
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        for name in (
            "_hysteresis_tracker",
            "_loss_scale",
            "_last_update",
            "_grad_scale_attributes",
        ):
            state.pop(name, None)
        if self._enabled and self._loss_scale.warned_of_scale:
            state["_warned_of_scale"] = True
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a scaler from a pickle or a copy."""
        self.__dict__.update(state)
        self._start_reports()
        if self._enabled:
            self._loss_scale.warned_of_scale = self.__dict__.pop("_warned_of_scale", False)
            # A shallow copy would otherwise share this dict with the original.
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


def _check_options(options: dict[str, Any], dynamic: Any, device: str) -> None:
    """Checks the options of the constructor, except the factors, which torch has checked."""
    _check_flag("dynamic", dynamic)
    for name, option in options.items():
        check_range("GradScaler", name, option)
    smallest, largest = options["min_scale"], options["max_scale"]
    if not smallest <= options["init_scale"] <= largest:
        raise ValueError(
            "GradScaler: init_scale must lie between min_scale and max_scale, got "
            f"init_scale={options['init_scale']}, min_scale={smallest}, max_scale={largest}"
        )
    has_options = (smallest, largest, dynamic, options["hysteresis"]) != (0, math.inf, True, 1)
    if has_options and device not in DEVICE_TYPES:
        raise ValueError(
            "GradScaler: min_scale, max_scale, dynamic and hysteresis need device 'cuda' or "
            f"'cpu', got {device!r}"
        )


def _device_type_of(device: Any, enabled: bool) -> Any:
    """Returns the type of a device, such as "cuda". A disabled scaler accepts anything."""
    if isinstance(device, torch.device):
        return device.type
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):
            return torch.device(device.lower()).type
    if not enabled:
        return device
    text = f"GradScaler: device must be a type of device such as 'cuda' or 'cpu', got {device!r}"
    if isinstance(device, str):
        raise ValueError(text)
    raise TypeError(f"{text}; init_scale comes after it")


def _check_flag(name: str, value: Any) -> None:
    """Raises TypeError for a string."""
    if isinstance(value, str):  # torch accepts any value, and "no" counts as true
        raise TypeError(f"GradScaler: {name} must be a bool, got {value!r}")


def _is_of_a_scaler(mapping: Mapping[Any, Any]) -> bool:
    return "scale" in mapping and "growth_factor" in mapping
