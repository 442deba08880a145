"""The gradient scaler: torch's class, over kernels that read the gradients once."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from amp_ext.amp_protocol import NO_CLOSURE, ScanResult, sum_of_flags
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.ops import extension
from amp_ext.params import name_of_param, params_of
from amp_ext.plain_numbers import numbers_on_host
from amp_ext.scaler.stats import ScalerStats
from amp_ext.sharding import all_reduce_flags, check_guard, check_process_group, local_grads

_TORCH = torch.amp.GradScaler  # torch.amp.GradScaler may be rebound later
_LOGGER = logging.getLogger("amp_ext")
_SUPPORTS = "_step_supports_amp_scaling"
_OF_TORCH = "growth_factor", "backoff_factor", "growth_interval"
_RULES = *_OF_TORCH, "min_scale", "max_scale", "hysteresis", "dynamic"
_SAVED: dict[str, Any] = dict.fromkeys(("scale", "growth_factor", "backoff_factor"), float)
_SAVED |= dict.fromkeys(("growth_interval", "_growth_tracker"), int)
_COUNTS = 11  # entries of the tensor that csrc/formulas/scale_counts.h describes


class GradScaler(torch.amp.GradScaler):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    Replaces ``torch.amp.GradScaler``, with the same constructor, methods, state dict, errors and
    results. Differences:

    * ``step`` searches for inf and NaN by reading the gradients, and never writes them.
    * ``step`` accepts float16 gradients if the optimizer is one of ``amp_ext.optim``.
    * A scale whose inverse is not finite (0, or 1e-39) counts as an overflow; torch would write NaN
      into the parameters.
    * The scale can be kept within limits, kept constant, or allowed to survive some overflows.
    * ``last_step_skipped`` and ``stats`` report what happened.

    With ``hysteresis=3``, the third overflow since the last growth of the scale reduces the scale,
    and so does each one after it. As in Megatron-LM, only a growth resets the count; in NeMo, every
    clean step does. torch has no hysteresis.

    The logger "amp_ext" gets a WARNING with the name of the first bad parameter when ``warn_after``
    updates in a row were skipped.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """

    _takes_fp16 = False  # whether unscale_() accepts float16 gradients
    _takes_released_gradients = True

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
            min_scale: Smallest value to which the scale can fall, or None. The scale may then stay
                the same after an overflow, so don't infer skipped steps from it.
            max_scale: Largest value to which the scale can grow, or None.
            dynamic: If false, the scale stays at ``init_scale``. Steps are still skipped after
                overflows.
            hysteresis: Number of overflows since the last growth after which the scale falls.
            warn_after: Number of consecutive skipped updates after which a warning is logged.
            process_group: Ranks that skip a step together, a ``torch.distributed.ProcessGroup``.
                They must step the same optimizers, because each scan ends with one all-reduce. If
                their scales differ, all skip. None suits ranks with equal scales and reduced
                gradients, as with DDP, or with DTensors.

        Raises:
            AssertionError: If a factor is out of range.
            ValueError: If ``init_scale`` is not within the limits, or ``hysteresis`` is below 1.
            RuntimeError, TypeError: If torch does not know the device.
            TypeError: If ``process_group`` is neither None nor a group that contains this process.
        """
        check_process_group(process_group)
        kind = torch.device(device).type if enabled else str(device)
        options: dict[str, Any] = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
        options |= {"init_scale": init_scale, "growth_interval": growth_interval}
        super().__init__(kind, enabled=enabled, **options)
        self._min_scale = 0.0 if min_scale is None else min_scale
        self._max_scale = math.inf if max_scale is None else max_scale
        self._dynamic, self._warn_after = dynamic, warn_after
        self._hysteresis = self._init_hysteresis_tracker = hysteresis
        self.process_group = process_group
        if enabled and not self._min_scale <= init_scale <= self._max_scale:
            raise ValueError(
                "GradScaler: init_scale must lie between min_scale and max_scale, got "
                f"init_scale={init_scale}, min_scale={min_scale}, max_scale={max_scale}"
            )
        if enabled and hysteresis < 1:
            raise ValueError(f"GradScaler: hysteresis must be at least 1, got {hysteresis}")
        self._forget()

    def _forget(self) -> None:
        """Starts counting from 0, as a new scaler and a copy of one do."""
        self._hysteresis_tracker: Tensor | None = None
        self._counts: Tensor | None = None  # on the device of the scale, as updates leave them
        self._seen: Tensor | None = None  # on the CPU, as they have arrived there
        self._has_warned = False
        # The states of the optimizers at the last update, and at each optimizer's last one, by id.
        self._last_states: dict[int, dict[str, Any]] = {}
        self._last_state_of: dict[int, dict[str, Any]] = {}

    @_disable_dynamo
    @outside_inference_mode()
    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        if self._hysteresis != 1:
            left = self._init_hysteresis_tracker
            self._hysteresis_tracker = torch.full((), left, dtype=torch.int32, device=dev)
        self._counts = self._seen = torch.zeros(_COUNTS, dtype=torch.float64, device=dev)
        if self._counts.is_cuda:
            self._seen = torch.zeros(_COUNTS, dtype=torch.float64, pin_memory=True)

    # Scans of the gradients.

    def scale(self, outputs: Any) -> Any:
        """Multiplies outputs by the scale.

        Args:
            outputs: A tensor, or an iterable of tensors, such as the loss.
        """
        if self._enabled and self._per_optimizer_states:  # empty in most loops
            self._note_scaled_loss()
        return super().scale(outputs)

    @_disable_dynamo
    def _note_scaled_loss(self) -> None:
        """Remembers unscaled gradients, because those that change now may carry the scale again."""
        self._forget_counted()
        for state in self._per_optimizer_states.values():
            state.pop("unscaled", None)
            optimizer = _optimizer_of(state)
            if (
                state["stage"] is OptState.UNSCALED
                and state["found_inf_per_device"]
                and optimizer is not None
            ):
                state.setdefault("versions", _versions(optimizer))

    def _forget_counted(self) -> None:
        """Forgets unscaled gradients that an update has counted and no step has used."""
        states = self._per_optimizer_states
        for key, state in [*states.items()]:
            if "is_counted" in state and state["stage"] is OptState.UNSCALED:
                del states[key]

    @_disable_dynamo  # torch.compile breaks the graph here
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales the gradients of an optimizer in place, and checks them for inf and NaN.

        Args:
            optimizer: The optimizer. Call this at most once between two updates, before its step.

        Raises:
            AssertionError: If no loss was scaled.
            RuntimeError: If, since the last update, the gradients were unscaled (also with another
                optimizer), or the optimizer has stepped.
            ValueError: If a gradient is float16.
        """
        if self._enabled and self._scale is not None:
            self._join(optimizer)
        _TORCH.unscale_(self, optimizer)  # FSDP1's override would reduce the flags a second time

    @_disable_dynamo  # torch.compile breaks the graph here
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer if its gradients are finite, and skips the step otherwise.

        Scans the gradients first, unless :meth:`unscale_` has. An optimizer that unscales inside
        its step receives the scale and the flag of the scan, and its step writes nothing if the
        flag is set; the gradients of a wrapper are unscaled before.

        Args:
            optimizer: The optimizer. Call this at most once between two updates.
            args: Positional arguments for ``optimizer.step``.
            kwargs: Keyword arguments for ``optimizer.step``, but not ``closure``.

        Returns:
            The result of ``optimizer.step``; None if it was not called.

        Raises:
            AssertionError: If no loss was scaled, or the optimizer had no gradient to scan.
            RuntimeError: If ``closure`` is given; if the optimizer has stepped since the last
                update; or if a gradient was written or replaced after ``unscale_`` and a later
                :meth:`scale`, or unscaled with another optimizer.
        """
        if not self._enabled or self._scale is None or "closure" in kwargs:
            return super().step(optimizer, *args, **kwargs)  # disabled: steps; otherwise raises
        unscales = getattr(optimizer, _SUPPORTS, False)
        if unscales and args and callable(args[0]):
            raise RuntimeError(NO_CLOSURE)  # gradients of a closure carry no scale
        state = self._join(optimizer)
        if "versions" in state and _versions(optimizer).items() - state["versions"].items():
            raise RuntimeError(
                "GradScaler.step: a gradient was changed after unscale_() and a later scale(), so "
                "it may carry the scale again. Call optimizer.zero_grad() and scaler.update(), "
                "then run backward() again."
            )
        if unscales and (_held_by(optimizer) or not _has_own_flag(optimizer)):
            # torch sets the scale and the flag on the wrapper, where the optimizers inside do not
            # see them. So the gradients are unscaled before the step.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        elif unscales and not _takes_scaler(getattr(optimizer.step, "__func__", optimizer.step)):
            return self._step_with_scale(optimizer, state, *args, **kwargs)
        return super().step(optimizer, *args, **kwargs)

    def _step_with_scale(
        self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Steps an optimizer that unscales inside its step, as torch does."""
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if self._reduces_over() is not None:
            check_guard(optimizer)
        scale: Any = self._scale
        grad_scale = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            grad_scale = scale if grad_scale is None else scale * grad_scale
        found_inf = sum_of_flags(state["found_inf_per_device"], scale.device)
        try:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
            returned = optimizer.step(*args, **kwargs)
        finally:
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
        state["stage"] = OptState.STEPPED
        return returned

    def _join(self, optimizer: Any) -> dict[str, Any]:
        """Returns the state of an optimizer, which it shares with a wrapper around it."""
        inside, states = _inside(optimizer), self._per_optimizer_states
        state = states[id(optimizer)]
        if state["stage"] is OptState.READY:
            state = states.get(id(inside), state)
        states[id(optimizer)] = states[id(inside)] = state
        state["optimizer"] = _reference(inside)
        return state

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Any]:
        """Scans gradients that stay scaled. An optimizer of amp_ext keeps the sums for its step."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        self._refuse_unscaled(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        flags: dict[Any, Any]
        if getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS:
            flags = super()._check_inf_per_device(optimizer)  # by a subclass or a patch
        elif not hasattr(optimizer, "scan_gradients"):
            flags = self._scan_with_operator(optimizer, scale.new_zeros(()), None, allow_fp16=True)
        else:
            if optimizer.gradient_release is not None:
                optimizer.gradient_release.check_scaler(self, "step")
            state["scan"] = scan = optimizer.scan_gradients(scale)
            flags = self._flags_of_all_ranks(scan.found_infs)
        state["found_inf_per_device"] = flags
        return flags

    @_disable_dynamo
    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients of an optimizer in place, for torch's ``unscale_``."""
        self._refuse_unscaled(optimizer)
        release = getattr(optimizer, "gradient_release", None)
        if release is not None:
            release.check_scaler(self, "unscale_")
        return self._scan_with_operator(
            optimizer, found_inf, inv_scale, allow_fp16 or self._takes_fp16
        )

    @outside_inference_mode()
    def _scan_with_operator(
        self, optimizer: Any, found_inf: Tensor, inv_scale: Tensor | None, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Scans gradients that a step of ours does not scan: for ``unscale_``, and of others.

        Multiplies them by ``inv_scale`` if it is given.
        """
        grads, sharded_over = local_grads(optimizer, "GradScaler")
        inputs = found_inf, self._scale, inv_scale, allow_fp16
        found = extension.scan_grads(params_of(optimizer), grads, *inputs)
        if found is None:  # torch's code takes gradients that our kernels can't read
            unscale = torch.ones_like(found_inf) if inv_scale is None else inv_scale
            return _TORCH._unscale_grads_(self, optimizer, unscale, found_inf, allow_fp16)
        flags = {flag.device: flag for flag, _ in found}
        if sharded_over:
            flags, _ = sharded_over.all_reduce(found_inf, flags.values())
        state = self._per_optimizer_states[id(optimizer)]
        state["scan"] = ScanResult(flags, {first.device: first for _, first in found})
        if inv_scale is not None:
            state["unscaled"] = {id(grad) for grad in grads if grad is not None}
        return self._flags_of_all_ranks(flags)

    def _refuse_unscaled(self, optimizer: Any) -> None:
        """Refuses gradients that another optimizer has unscaled since the last update."""
        states = self._per_optimizer_states
        for state in states.values():
            if "unscaled" not in state or state is states[id(optimizer)]:
                continue
            if any(id(param.grad) in state["unscaled"] for param in params_of(optimizer)):
                raise RuntimeError(
                    "GradScaler: a gradient was already unscaled with another optimizer, which has "
                    "the same parameter. Give each parameter to one optimizer."
                )

    def _reduces_over(self) -> Any:
        """Returns the process group whose ranks skip steps together, or None."""
        return self.process_group

    def _flags_of_all_ranks(self, flags: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Returns the flags of a scan over all ranks, which also skip if their scales differ."""
        group, scale = self._reduces_over(), self._scale
        return flags if group is None or scale is None else all_reduce_flags(flags, scale, group)

    # Updates, and what they report.

    @_disable_dynamo  # torch.compile breaks the graph here
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of an iteration, without waiting for a GPU.

        An optimizer whose gradients are unscaled may step after the update, until the next
        :meth:`scale`, if ``new_scale`` is None. Torch's scaler would unscale them again.

        Args:
            new_scale: Sets the scale to this value instead of adjusting it after overflows: a
                number, or a tensor of one element.

        Raises:
            AssertionError: If no loss was scaled, no ``step`` or ``unscale_`` scanned gradients, or
                torch would refuse the tensor ``new_scale``.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        states, found_infs, scanned = self._per_optimizer_states, [], []
        unscaled = {
            key: state
            for key, state in states.items()
            if state["stage"] is OptState.UNSCALED and state["found_inf_per_device"]
        }
        self._forget_counted()
        once = {id(state): (key, state) for key, state in states.items()}  # wrappers share states
        for key, state in once.values():
            scan = state.get("scan")
            for device, flag in state["found_inf_per_device"].items():
                first = None if scan is None else scan.first_nonfinites.get(device)
                found_infs.append(flag)
                scanned.append((first, key, scan is not None and scan.counts_tensors))
        rules = {name: getattr(self, f"_{name}") for name in _RULES}
        is_ours = self._counts is not None and (scale.is_cpu or scale.is_cuda)
        if new_scale is not None or not found_infs or not is_ours:
            if isinstance(new_scale, Tensor) and new_scale.numel() == 1:
                new_scale = new_scale.reshape(())
            super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
            rules["dynamic"] = False  # the flags only count
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if new_scale is None:
            for state in unscaled.values():
                state["is_counted"] = True
            self._per_optimizer_states.update(unscaled)
        self._last_states, self._last_state_of = states, self._last_state_of | states
        if not found_infs or not is_ours:
            return
        tensors = tracker, found_infs, self._hysteresis_tracker, scanned, self._counts, self._seen
        skips_in_a_row = extension.update_scale_(scale, *tensors, **rules)
        if skips_in_a_row >= self._warn_after and not self._has_warned:
            stats = self.stats()
            update_of_name = self._seen[8]  # type: ignore[index]  # ScaleCounts::nonfinite_update
            is_of_these = update_of_name > stats.updates - stats.consecutive_skips
            _LOGGER.warning(
                "GradScaler: %d updates in a row were skipped, up to update %d; the loss scale is "
                "%g. The first bad gradient was that of %s. Gradients that are inf or NaN at any "
                "scale come from the model or the data.",
                *(stats.consecutive_skips, stats.updates, stats.scale),
                (is_of_these and stats.last_nonfinite) or "a parameter that is not known here",
            )
        self._has_warned = skips_in_a_row >= self._warn_after

    def last_step_skipped(
        self, optimizer: torch.optim.Optimizer | None = None, *, wait: bool = False
    ) -> bool | None:
        """Returns whether the last update was skipped, or the step of an optimizer before it.

        Args:
            optimizer: The optimizer whose step is meant, which waits for a GPU; None stands for any
                optimizer.
            wait: Waits for a GPU without an optimizer, too. Otherwise the answer is about the last
                update that the device has finished.

        Returns:
            None if there was no update, or none with this optimizer; False if scaling is disabled.
        """
        if not self._enabled:
            return False
        if optimizer is not None:
            inside = _inside(optimizer)
            state = self._last_state_of.get(id(inside), {})
            if _optimizer_of(state) is not inside:
                return None
            found = any(flag.item() != 0 for flag in state["found_inf_per_device"].values())
            return found or _was_withheld(state, wait=True)
        stats = self.stats(wait=wait)
        if stats.updates == 0:
            return None
        is_withheld = [_was_withheld(state, wait) for state in self._last_states.values()]
        return stats.consecutive_skips > 0 or any(is_withheld)

    def stats(self, *, wait: bool = False) -> ScalerStats:
        """Returns counts, the extremes of the scale and the name of the last bad tensor.

        Args:
            wait: Waits for the last update. Otherwise the counts are those after the last update
                that the device has finished.
        """
        counts = [0.0]
        if self._counts is not None and self._seen is not None:
            counts = numbers_on_host(self._counts, self._seen, wait=wait)
        if counts[0] == 0:
            scale = float(self._init_scale) if self._enabled else 1.0
            return ScalerStats(0, 0, 0, 0, scale, scale, scale, None)
        updates, skips, in_a_row, scale, smallest, largest, key, index, _, tensors, _ = counts
        optimizer = _optimizer_of(self._last_state_of.get(int(key), {}))
        name = name_of_param(optimizer, int(index)) or None
        whole = int(updates), int(updates - skips), int(skips), int(in_a_row)
        return ScalerStats(*whole, scale, smallest, largest, name, int(tensors))

    # State dicts and pickles.

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's five entries, and the hysteresis counter if ``hysteresis`` is not 1."""
        state = super().state_dict()
        if state and self._hysteresis != 1:
            state["_hysteresis_tracker"] = self._hysteresis_left()
        return state

    @outside_inference_mode()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of torch's. The limits stay as constructed.

        Args:
            state_dict: A dict from ``state_dict()``.

        Raises:
            RuntimeError: If the dict is empty, as that of a disabled scaler is.
            KeyError, TypeError, ValueError: If an entry is missing or not a number. After any error
                the scaler is unchanged.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # disabled: does nothing; empty: raises
            return
        numbers = {name: kind(state_dict[name]) for name, kind in _SAVED.items()}
        left = min(int(state_dict.get("_hysteresis_tracker", self._hysteresis)), self._hysteresis)
        super().load_state_dict(numbers)
        self._init_hysteresis_tracker = left
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(left)

    def _hysteresis_left(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle or a copy, which counts from 0."""
        state = super().__getstate__() | {"_init_hysteresis_tracker": self._hysteresis_left()}
        of_process = ("_hysteresis_tracker", "_counts", "_seen", "_last_states", "_last_state_of")
        return {name: value for name, value in state.items() if name not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a scaler from a pickle or a copy."""
        super().__setstate__(state)
        if self._enabled:  # a shallow copy would otherwise share this dict with the original
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._forget()


# Kept to notice an override, also one patched into the class.
_UNSCALE_GRADS = GradScaler._unscale_grads_


@functools.lru_cache(maxsize=32)  # inspecting a signature takes longer than a small step
def _takes_scaler(step: Any) -> bool:
    """Returns True if a ``step`` has an argument for the scaler, an older way of torch."""
    return "grad_scaler" in inspect.signature(step).parameters


def _has_own_flag(optimizer: Any) -> bool:
    """Returns False if an object has delegated the flag that it unscales inside its step."""
    return hasattr(type(optimizer), _SUPPORTS) or _SUPPORTS in getattr(optimizer, "__dict__", {})


def _held_by(outer: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers to which an object delegates, or that its attributes hold."""
    of = type(outer)
    if hasattr(of, "scan_gradients") or of.__module__.startswith("torch.optim."):
        return []
    owner = getattr(getattr(outer, "register_step_pre_hook", None), "__self__", None)
    held = [owner]
    for name, value in getattr(outer, "__dict__", {}).items():
        if name not in ("state", "param_groups"):
            values = value.values() if isinstance(value, dict) else value
            held += values if isinstance(value, (dict, list, tuple)) else [value]
    return [each for each in held if isinstance(each, torch.optim.Optimizer) and each is not outer]


def _inside(optimizer: Any) -> Any:
    """Returns the optimizer that a wrapper steps, which has the same parameters, or the object."""
    for each in _held_by(optimizer):
        if list(map(id, params_of(each))) == list(map(id, params_of(optimizer))):
            return _inside(each)
    return optimizer


def _reference(optimizer: Any) -> Any:
    """Returns a weak reference to an optimizer, or a strong one if its class supports none."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


def _optimizer_of(state: dict[str, Any]) -> Any:
    """Returns the optimizer of a state, or None if it is gone or other code has made the state."""
    return state["optimizer"]() if "optimizer" in state else None


def _was_withheld(state: dict[str, Any], wait: bool) -> bool:
    """Returns True if the guard of an optimizer skipped its last step."""
    guard = getattr(_optimizer_of(state), "norm_guard", None)
    return guard is not None and bool(guard.last_step_skipped(wait=wait))


def _versions(optimizer: Any) -> dict[int, tuple[int, int]]:
    """Returns what changes when a gradient of an optimizer is written, replaced or added."""
    grads = ((id(param), param.grad) for param in params_of(optimizer))
    return {key: (id(grad), grad._version) for key, grad in grads if grad is not None}
