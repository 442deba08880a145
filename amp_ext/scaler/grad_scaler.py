"""The gradient scaler: torch's interface, with kernels that read the gradients once."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from amp_ext import ops
from amp_ext.amp_protocol import (
    NO_CLOSURE,
    NOTHING_WAS_SCANNED,
    AmpStepContext,
    GradScaleAttributes,
    SupportsFusedUnscale,
    check_has_groups,
    optimizer_inside,
    sum_of_flags,
    takes_scale,
    unscaling_optimizer,
)
from amp_ext.nonfinite import name_of_param, params_of
from amp_ext.saved_dicts import check_is_dict, missing_entry
from amp_ext.scaler.options import (
    DEVICE_TYPES,
    OF_TORCH,
    check_flag,
    check_options,
    device_type_of,
)
from amp_ext.scaler.stats import (
    ScalerStats,
    mark_update,
    report,
    wait_for,
    warn_of_scale,
)
from amp_ext.scaler_ranges import as_number, checked
from amp_ext.sharding import all_reduce_flags, check_guard, check_process_group, local_grads

_TORCH_GRAD_SCALER = torch.amp.GradScaler  # torch.amp.GradScaler may be rebound later


class GradScaler(torch.amp.GradScaler):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    Replaces ``torch.amp.GradScaler``, with the same constructor, methods, state dict, errors and
    results. Differences:

    * ``step`` searches for inf and NaN by reading the gradients, and never writes them.
    * ``step`` accepts float16 gradients if the optimizer is one of ``amp_ext.optim``.
    * A scale whose inverse is not finite (0, or 1e-39) counts as an overflow and warns once; torch
      would write NaN into the parameters.
    * ``update`` also accepts an int, or a tensor of one element and any shape.
    * If an exception interrupts ``unscale_`` or ``step`` after a possible write, both raise errors
      until ``update`` is called.
    * The scale can be kept within limits, kept constant, or allowed to survive some overflows.
    * ``last_step_skipped`` and ``stats`` report what happened without waiting for a GPU.

    With ``hysteresis=3``, the third overflow since the last growth of the scale reduces the scale,
    and so does each one after it. As in Megatron-LM, only a growth resets the count; in NeMo, every
    clean step does. torch has no hysteresis.

    The logger "amp_ext" gets a WARNING with the name of the first bad parameter when ``warn_after``
    updates in a row were skipped.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """

    _takes_fp16 = False
    _takes_released_gradients = True
    _hysteresis: int
    _hysteresis_tracker: Tensor | None = None
    _loss_scale: Any  # an ops.LossScale; None if scaling is disabled
    _last_update: torch.cuda.Event | None

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
                their scales differ, all skip and ``update`` raises. None suits ranks with equal
                scales and reduced gradients, as with DDP, or with DTensors.

        Raises:
            AssertionError: If a factor is out of range.
            ValueError: If another number is out of range, ``init_scale`` is not within the limits,
                torch does not know the device, or limits are given for a device other than "cuda"
                and "cpu".
            TypeError: If a numeric option is no number, a flag is a string, ``device`` no device,
                or ``process_group`` is neither None nor a group that contains this process.
        """
        check_process_group(process_group)
        check_flag("enabled", enabled)
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
        kind = device_type_of(device, enabled)
        super().__init__(kind, **{name: options[name] for name in OF_TORCH}, enabled=enabled)
        if self._enabled:
            check_options(options, dynamic, self._device)
        else:
            self._scale = None  # torch sets none of these, so that its getters fail
        vars(self).update({f"_{name}": option for name, option in options.items()})
        self._init_hysteresis_tracker = self._hysteresis
        self._dynamic = dynamic
        self.process_group = process_group
        self._start_reports()

    def scale(self, outputs: Any) -> Any:
        """Multiplies outputs by the scale.

        Args:
            outputs: A tensor, or an iterable of tensors, such as the loss.
        """
        if self._enabled and self._per_optimizer_states:  # empty in most loops
            _on_loss_scaled(self._per_optimizer_states)
        return super().scale(outputs)

    @_disable_dynamo  # torch.compile breaks the graph here
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales the gradients of an optimizer in place, and checks them for inf and NaN.

        Args:
            optimizer: The optimizer. Call this at most once between two updates, before its step.

        Raises:
            AssertionError: If no loss was scaled.
            RuntimeError: If a gradient is complex. Also if, since the last update, these gradients
                were unscaled (also with another optimizer), the optimizer has stepped, or one of
                these calls was interrupted.
            ValueError: If a gradient is float16.
            TypeError: If ``optimizer`` is not an optimizer.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        check_has_groups("unscale_", optimizer)
        state = _state_of(self._per_optimizer_states, optimizer)
        if "iteration" in state:
            state["iteration"].check_needs_no_reset("unscale_")
        if state["stage"] is OptState.READY:
            _start_iteration(self, "unscale_", optimizer, state)
        # FSDP1's override would reduce the flags a second time.
        _TORCH_GRAD_SCALER.unscale_(self, optimizer)
        _agree_over_group(self, state)
        state["iteration"].needs_reset = False  # an exception above leaves it True

    def _reduces_over(self) -> Any:
        """Returns the process group whose ranks skip steps together, or None."""
        return self.process_group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients of an optimizer in place; returns ``found_inf`` by device."""
        state = _state_of(self._per_optimizer_states, optimizer)
        if "iteration" not in state:  # called directly, not through unscale_
            _start_iteration(self, "unscale_", optimizer, state)
        allow_fp16 = allow_fp16 or self._takes_fp16
        flags = _scan(self, optimizer, state, found_inf, inv_scale, allow_fp16)
        if flags is None:
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Scans the gradients of an optimizer for inf and NaN without writing them."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        states = self._per_optimizer_states
        state = states.get(id(optimizer)) or _state_of(states, optimizer)
        found_inf = _start_iteration(self, "step", optimizer, state)
        flags: dict[torch.device, Tensor] | None = None
        unscaling = unscaling_optimizer(optimizer)
        if getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS:
            pass  # a subclass or patch checks them in its own way
        elif unscaling is None:
            flags = _scan(self, optimizer, state, found_inf, None, allow_fp16=True)
        else:
            state["scan"] = unscaling.scan_gradients(found_inf, scale)
            flags = dict(state["scan"].found_infs)
        if flags is not None:
            state["found_inf_per_device"] = flags
            return flags if self._reduces_over() is None else _agree_over_group(self, state)
        try:  # like torch, unscales by 1, which does not change the gradients
            super()._check_inf_per_device(optimizer)
        finally:
            state["iteration"].forget_unscaling()
        return _agree_over_group(self, state)

    @_disable_dynamo  # torch.compile breaks the graph here
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer if its gradients are finite, and skips the step otherwise.

        Scans the gradients first, unless :meth:`unscale_` has. An optimizer that unscales inside
        its step, also one behind a wrapper, receives the scale for this step.

        Args:
            optimizer: The optimizer. Call this at most once between two updates.
            args: Positional arguments for ``optimizer.step``.
            kwargs: Keyword arguments for ``optimizer.step``, but not ``closure``.

        Returns:
            The result of ``optimizer.step``; None if it was not called.

        Raises:
            AssertionError: If no loss was scaled, or the optimizer had no gradient to scan.
            RuntimeError: If ``closure`` is given or a gradient is complex. If, since the last
                update, the optimizer has stepped, or a call was interrupted. If a gradient may
                carry another scale than expected, because it appeared after ``unscale_``, was
                written or replaced after a later :meth:`scale`, or was unscaled with another
                optimizer.
            TypeError: If ``optimizer`` is not an optimizer, or is a wrapper that hides the
                optimizer that needs the scale.
        """
        if not self._enabled or "closure" in kwargs or self._scale is None:
            return super().step(optimizer, *args, **kwargs)  # disabled: steps; otherwise raises
        keeps_scale = takes_scale(optimizer)
        if not keeps_scale:
            check_has_groups("step", optimizer)
        elif args and callable(args[0]):
            raise RuntimeError(NO_CLOSURE)  # gradients from a closure carry no scale
        state = _state_of(self._per_optimizer_states, optimizer)
        if "iteration" in state:
            state["iteration"].check_needs_no_reset("step")
        if state["stage"] is OptState.UNSCALED:
            _check_unscaled(optimizer, state)
        if state["stage"] is OptState.STEPPED:
            return super().step(optimizer, *args, **kwargs)  # raises: it has stepped already
        if not keeps_scale:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            if not state["found_inf_per_device"]:
                raise AssertionError(NOTHING_WAS_SCANNED)
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)
        unscaling = unscaling_optimizer(optimizer)
        if unscaling is not None or not _takes_scaler(
            getattr(optimizer.step, "__func__", optimizer.step)
        ):
            return _step_with_scale(self, optimizer, unscaling, state, args, kwargs)
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:  # the optimizer may have stepped
            _invalidate(state)
            raise

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Steps an optimizer that does not take the scale, unless an overflow was found."""
        try:
            returned = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
            optimizer_state["stage"] = OptState.STEPPED  # at once, to refuse a second step
        except BaseException:  # how far the step came is unknown
            _invalidate(optimizer_state)
            raise
        return returned

    @_disable_dynamo  # torch.compile breaks the graph here
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of an iteration, without waiting for a GPU.

        Args:
            new_scale: Sets the scale to this value instead of adjusting it after overflows: a
                number, or a tensor of one element.

        Raises:
            AssertionError: If no loss was scaled, or no ``step`` or ``unscale_`` scanned gradients
                and none was interrupted, or torch would refuse the tensor ``new_scale``.
            RuntimeError: If ``new_scale`` is a finite number that does not fit float32. Also if the
                ranks of ``process_group`` had different scales in the last finished update; only
                this error ends the iteration.
            ValueError: If ``new_scale`` is negative, NaN or inf. A tensor on a GPU is not read.
            TypeError: If ``new_scale`` is not a number.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        if isinstance(new_scale, Tensor):
            if (
                new_scale.numel() != 1
                or new_scale.device.type != self._device
                or new_scale.requires_grad
            ):
                super().update(new_scale)  # raises before anything changes
            new_scale = new_scale.reshape(())
            if new_scale.is_cpu:
                checked("GradScaler.update", "new_scale", new_scale)
        elif new_scale is not None:
            new_scale = float(checked("GradScaler.update", "new_scale", new_scale))
        messages: Any = None
        if scale.device.type in DEVICE_TYPES:
            next_states: Any = defaultdict(_refresh_per_optimizer_state)
            # Ends the iteration, so that another update does not count the same scans again.
            # Returns None and changes nothing if nothing was scanned.
            messages = self._loss_scale.update(vars(self), new_scale, next_states)
        if messages is None:
            # torch updates the scale without our kernels, and raises if nothing was scanned.
            super().update(new_scale)
        else:
            if scale.is_cuda:
                self._last_update = mark_update(self._last_update, scale.device)
            report(scale, *messages)
        if self._reduces_over() is not None:
            self._loss_scale.check_scales()

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
            wait_for(self._last_update, self._scale)
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
            wait_for(self._last_update, self._scale)
        return ScalerStats(*self._loss_scale.stats(float(self._init_scale)))

    def get_scale(self) -> float:
        """Returns the scale, or 1.0 if scaling is disabled. Waits for a GPU."""
        scale = super().get_scale()
        if self._enabled and self._loss_scale.must_warn_of(scale):
            warn_of_scale(scale)
        return scale

    def __repr__(self) -> str:
        """Returns the options and the counts after the last update that the device has finished."""
        name = type(self).__name__
        if not self._enabled:
            return f"{name}(enabled=False)"
        options = {"device": self._device} | {
            each: getattr(self, f"_{each}") for each in (*OF_TORCH, "min_scale", "max_scale")
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
            ValueError: If an entry is not a number, or out of range. After any error or interrupt
                the scaler is unchanged.
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
            raise KeyError(missing_entry(operation, name, state_dict)) from None

    def _get_hysteresis_tracker(self) -> int:
        if self._hysteresis_tracker is None:
            return self._init_hysteresis_tracker
        return int(self._hysteresis_tracker.item())

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without process-specific objects; a copy counts from 0."""
        state = super().__getstate__()
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        of_process = ("_loss_scale", "_last_update", "_grad_scale_attributes")
        for name in ("_hysteresis_tracker", *of_process):
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


# Kept to detect an overridden method, including one that was patched into the class.
_UNSCALE_GRADS = GradScaler._unscale_grads_


@_disable_dynamo
def _on_loss_scaled(states: Mapping[Any, dict[str, Any]]) -> None:
    """Records which gradients are unscaled now; later gradients may carry the scale."""
    for state in states.values():
        if "iteration" in state:
            state["iteration"].on_loss_scaled(state["stage"] is OptState.STEPPED)


def _state_of(states: dict[int, dict[str, Any]], optimizer: Any) -> dict[str, Any]:
    """Returns the dict with the state of an optimizer since the last update.

    torch and other libraries look this dict up under ``id(optimizer)``. A wrapper and the optimizer
    inside share one dict. If an id is reused by a new object, the old dict moves to another key.
    """
    inside = optimizer_inside(optimizer)
    for key in {id(optimizer), id(inside)}:
        iteration = states.get(key, {}).get("iteration")
        if iteration is not None and not iteration.is_of(inside):
            states[-id(iteration)] = states.pop(key)  # update() still counts it
    state = states.get(id(optimizer))
    if state is None or state == _refresh_per_optimizer_state():
        state = states[id(inside)]
    states[id(optimizer)] = states[id(inside)] = state
    return state


def _start_iteration(
    scaler: GradScaler, operation: str, optimizer: Any, state: dict[str, Any]
) -> Any:
    """Starts the iteration of an optimizer; returns the initial ``found_inf`` flag of its scan.

    Raises RuntimeError if its gradients no longer carry the scale. Adds ``state["iteration"]``, the
    compiled module's data about the optimizer until the update.
    """
    inside = optimizer_inside(optimizer)
    check_scaler = getattr(inside, "check_scaler", None)
    if check_scaler is not None:
        check_scaler(scaler, operation)
    return scaler._loss_scale.start_iteration(operation, vars(scaler), state, inside)


def _scan(
    scaler: GradScaler,
    optimizer: Any,
    state: dict[str, Any],
    found_inf: Tensor,
    inv_scale: Tensor | None,
    allow_fp16: bool,
) -> dict[torch.device, Tensor] | None:
    """Scans the gradients, and multiplies them by ``inv_scale`` if it is given.

    Returns ``found_inf`` for each device, or None if only torch's code can handle these gradients.
    """
    grads, sharded_over = local_grads(optimizer, "GradScaler")
    flags: dict[torch.device, Tensor] | None = scaler._loss_scale.scan(
        state["iteration"], grads, found_inf, inv_scale, allow_fp16
    )
    if flags is not None and sharded_over:
        flags, _ = sharded_over.all_reduce(found_inf, flags.values())
    return flags


def _agree_over_group(scaler: GradScaler, state: dict[str, Any]) -> dict[torch.device, Tensor]:
    """Reduces the flags of this scan over all ranks, including ranks without a gradient."""
    flags: dict[torch.device, Tensor] = state["found_inf_per_device"]
    group = scaler._reduces_over()
    if group is not None:
        scale, _ = scaler._check_scale_growth_tracker("unscale_")
        flags, differ = all_reduce_flags(flags, scale, group)
        state["found_inf_per_device"] = flags
        scaler._loss_scale.note_different_scales(state, flags, differ)
    return flags


def _check_unscaled(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuses gradients that appeared after ``unscale_``, because they may still be scaled."""
    if not state["found_inf_per_device"]:
        if any(param.grad is not None for param in params_of(optimizer)):
            raise AssertionError(NOTHING_WAS_SCANNED)
    elif "iteration" in state:
        state["iteration"].check_unscaled()


def _step_with_scale(
    scaler: GradScaler,
    optimizer: Any,
    unscaling: SupportsFusedUnscale | None,
    state: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Steps an optimizer that receives the scale and unscales inside its step."""
    if scaler._reduces_over() is not None:
        check_guard(unscaling)
    attributes = scaler._grad_scale_attributes
    attributes.take_back()  # the last step may have been interrupted before it removed them
    if unscaling is not None:
        unscaling.set_amp_context(None)
    preset = grad_scale = getattr(optimizer, "grad_scale", None)
    scale: Any = scaler._scale
    state.pop("scan", None)
    if state["stage"] is OptState.READY:
        scaler._check_inf_per_device(optimizer)
        grad_scale = scale if preset is None else scale * preset
    scan = state.get("scan")
    found_inf = sum_of_flags(state["found_inf_per_device"], scale.device)
    amp_context = AmpStepContext(grad_scale, found_inf, scan)
    try:
        try:
            if unscaling is None:
                attributes.set_for(optimizer, amp_context)
                amp_context.is_used = True  # how far a foreign step came is unknown
            else:
                unscaling.set_amp_context(amp_context)
            returned = optimizer.step(*args, **kwargs)
        finally:
            if unscaling is None:
                attributes.take_back()
            else:
                unscaling.set_amp_context(None)
        if unscaling is not None and preset is not None:
            with contextlib.suppress(AttributeError):  # the optimizer may have deleted it
                del optimizer.grad_scale
        again = None if amp_context.scan is scan else amp_context.scan
        # Keep the first scan if ranks agreed on it, or if a hook removed all gradients.
        if again is not None and again.found_infs and scaler._reduces_over() is None:
            state["found_inf_per_device"] = dict(again.found_infs)
        state["stage"] = OptState.STEPPED
    except BaseException:
        if amp_context.is_used:
            _invalidate(state)
        raise
    return returned


@functools.lru_cache(maxsize=32)  # inspecting a signature takes 9 µs
def _takes_scaler(step: Any) -> bool:
    """Returns True if a ``step`` method has an argument for the scaler, an older way of torch."""
    return "grad_scaler" in inspect.signature(step).parameters


def _invalidate(state: dict[str, Any]) -> None:
    """Marks an interrupted step, which may have written, so that only ``update`` is allowed."""
    if "iteration" in state:
        state["iteration"].needs_reset = True
    else:  # code outside amp_ext created the state
        state["stage"] = OptState.STEPPED
