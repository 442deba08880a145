"""The gradient scaler: torch's interface, with kernels that read the gradients once."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from amp_ext.amp_protocol import (
    NO_CLOSURE,
    NOTHING_WAS_SCANNED,
    AmpStepContext,
    SupportsFusedUnscale,
    check_has_groups,
    optimizer_inside,
    sum_of_flags,
    takes_scale,
    unscaling_optimizer,
)
from amp_ext.nonfinite import params_of
from amp_ext.scaler_ranges import checked
from amp_ext.scaler_settings import DEVICE_TYPES, ScalerSettings
from amp_ext.sharding import all_reduce_flags, check_guard, local_grads

_TORCH_GRAD_SCALER = torch.amp.GradScaler  # torch.amp.GradScaler may be rebound later


class GradScaler(ScalerSettings):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    Replaces ``torch.amp.GradScaler``, with the same constructor, methods, state dict, errors and
    results. Differences:

    * ``step`` searches for inf and NaN by reading the gradients, and never writes them.
    * ``step`` accepts float16 gradients if the optimizer is one of ``amp_ext.optim``.
    * A scale whose inverse is not finite (0, or 1e-39) counts as an overflow and warns once; torch
      would write NaN into the parameters.
    * ``update`` also accepts an int, or a tensor of one element and any shape.
    * If ``unscale_`` or a step is interrupted by an exception after it may have written gradients
      or parameters, both raise an error until ``update`` is called. That call needs no gradients to
      have been scanned.
    * The scale can be kept within limits, kept constant, or allowed to survive some overflows.
    * ``last_step_skipped``, ``stats`` and ``history`` report what happened without waiting for a
      GPU.

    Hysteresis means that the scale falls only after several overflows. torch has none: every
    overflow reduces the scale. NeMo resets its counter at every clean step, so that only
    consecutive overflows count. Here, as in Megatron-LM, only a growth of the scale resets it: with
    ``hysteresis=3`` the third overflow since the last growth reduces the scale, and so does each
    one after it.

    The logger "amp_ext" gets one INFO message when the first scale has settled. It gets a WARNING
    with the name of the first bad parameter when ``warn_after`` updates in a row were skipped.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """

    _takes_fp16 = False

    def scale(self, outputs: Any) -> Any:
        """Multiplies outputs by the scale.

        Args:
            outputs: A tensor, or an iterable of tensors, such as the loss.
        """
        if self._enabled and self._per_optimizer_states:  # empty in most loops
            self._on_loss_scaled()
        return super().scale(outputs)

    @_disable_dynamo
    def _on_loss_scaled(self) -> None:
        """Records which gradients are unscaled now; later gradients may carry the scale."""
        for state in self._per_optimizer_states.values():
            if "iteration" in state:
                state["iteration"].on_loss_scaled(state["stage"] is OptState.STEPPED)

    def _state_of(self, optimizer: Any) -> dict[str, Any]:
        """Returns the dict with the state of an optimizer since the last update.

        torch and other libraries look this dict up under ``id(optimizer)``. A wrapper and the
        optimizer inside share one dict. The id of an object that no longer exists may be reused;
        its dict is then moved to another key.
        """
        states, inside = self._per_optimizer_states, optimizer_inside(optimizer)
        for key in {id(optimizer), id(inside)}:
            iteration = states.get(key, {}).get("iteration")
            if iteration is not None and not iteration.is_of(inside):
                states[-id(iteration)] = states.pop(key)  # update() still counts it
        state = states.get(id(optimizer))
        if state is None or state == _refresh_per_optimizer_state():
            state = states[id(inside)]
        states[id(optimizer)] = states[id(inside)] = state
        return state

    def _start_iteration(self, operation: str, optimizer: Any, state: dict[str, Any]) -> Any:
        """Starts the iteration of an optimizer; returns the initial ``found_inf`` flag of its scan.

        Raises RuntimeError if its gradients no longer carry the scale. Adds ``state["iteration"]``,
        the data that the compiled module stores about the optimizer until the update.
        """
        inside = optimizer_inside(optimizer)
        return self._loss_scale.start_iteration(operation, vars(self), state, inside)

    @_disable_dynamo  # torch.compile breaks the graph here
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales the gradients of an optimizer in place, and checks them for inf and NaN.

        Args:
            optimizer: The optimizer. Call this at most once between two updates, before its step.

        Raises:
            AssertionError: If no loss was scaled.
            RuntimeError: If since the last update these gradients were unscaled, also with another
                optimizer, or the optimizer has stepped, or one of these calls was interrupted; or
                if a gradient is complex.
            ValueError: If a gradient is float16.
            TypeError: If ``optimizer`` is not an optimizer.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        check_has_groups("unscale_", optimizer)
        state = self._state_of(optimizer)
        if "iteration" in state:
            state["iteration"].check_needs_no_reset("unscale_")
        if state["stage"] is OptState.READY:
            self._start_iteration("unscale_", optimizer, state)
        # Calls torch's own class, because FSDP1's override would reduce the flags a second time.
        _TORCH_GRAD_SCALER.unscale_(self, optimizer)
        self._agree_over_group(state)
        state["iteration"].needs_reset = False  # an exception above leaves it True

    def _reduces_over(self) -> Any:
        """Returns the process group whose ranks skip steps together, or None."""
        return self.process_group

    def _agree_over_group(self, state: dict[str, Any]) -> dict[torch.device, Tensor]:
        """Reduces the flags of this scan over all ranks, including ranks without a gradient."""
        flags: dict[torch.device, Tensor] = state["found_inf_per_device"]
        group = self._reduces_over()
        if group is not None:
            scale, _ = self._check_scale_growth_tracker("unscale_")
            flags, differ = all_reduce_flags(flags, scale, group)
            state["found_inf_per_device"] = flags
            self._loss_scale.note_different_scales(state, flags, differ)
        return flags

    def flags_of_all_ranks(self, flags: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Returns the flags of a scan, reduced over all ranks. The scaler does not change.

        Args:
            flags: Maps each device that holds a gradient to one float32, which is not 0 if a
                gradient there is inf or NaN.
        """
        group = self._reduces_over()
        if group is None:
            return flags
        scale, _ = self._check_scale_growth_tracker("flags_of_all_ranks")
        return all_reduce_flags(flags, scale, group)[0]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients of an optimizer in place; returns ``found_inf`` by device."""
        state = self._state_of(optimizer)
        if "iteration" not in state:  # called directly, not through unscale_
            self._start_iteration("unscale_", optimizer, state)
        allow_fp16 = allow_fp16 or self._takes_fp16
        flags = self._scan(optimizer, state, found_inf, inv_scale, allow_fp16)
        if flags is None:
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return flags

    def _scan(
        self,
        optimizer: Any,
        state: dict[str, Any],
        found_inf: Tensor,
        inv_scale: Tensor | None,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor] | None:
        """Scans the gradients, and multiplies them by ``inv_scale`` if it is given.

        Returns ``found_inf`` for each device, or None if only torch's code can handle these
        gradients.
        """
        grads, sharded_over = local_grads(optimizer, "GradScaler")
        flags: dict[torch.device, Tensor] | None = self._loss_scale.scan(
            state["iteration"], grads, found_inf, inv_scale, allow_fp16
        )
        if flags is not None and sharded_over:
            flags, _, _ = sharded_over.all_reduce(found_inf, flags.values())
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Scans the gradients of an optimizer for inf and NaN without writing them."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states.get(id(optimizer)) or self._state_of(optimizer)
        found_inf = self._start_iteration("step", optimizer, state)
        flags: dict[torch.device, Tensor] | None = None
        unscaling = unscaling_optimizer(optimizer)
        if getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS:
            pass  # a subclass or patch checks them in its own way
        elif unscaling is None:
            flags = self._scan(optimizer, state, found_inf, None, allow_fp16=True)
        else:
            state["scan"] = unscaling.scan_gradients(found_inf, scale)
            flags = dict(state["scan"].found_infs)
        if flags is not None:
            state["found_inf_per_device"] = flags
            return flags if self._reduces_over() is None else self._agree_over_group(state)
        try:  # like torch, unscales by 1, which does not change the gradients
            super()._check_inf_per_device(optimizer)
        finally:
            state["iteration"].forget_unscaling()
        return self._agree_over_group(state)

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
            RuntimeError: If since the last update the optimizer has stepped, or a call was
                interrupted; if ``closure`` is given; if a gradient is complex; or if a gradient may
                carry another scale than the optimizer expects, because it appeared after
                ``unscale_``, was written or replaced after a later :meth:`scale`, or was unscaled
                with another optimizer.
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
        state = self._state_of(optimizer)
        if "iteration" in state:
            state["iteration"].check_needs_no_reset("step")
        if state["stage"] is OptState.UNSCALED:
            self._check_unscaled(optimizer, state)
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
            return self._step_with_scale(optimizer, unscaling, state, args, kwargs)
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:  # the optimizer may have stepped
            _invalidate(state)
            raise

    def _step_with_scale(
        self,
        optimizer: Any,
        unscaling: SupportsFusedUnscale | None,
        state: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Steps an optimizer that receives the scale and unscales inside its step."""
        if self._reduces_over() is not None:
            check_guard(unscaling)
        # The last step may have been interrupted before it removed the attributes.
        self._grad_scale_attributes.take_back()
        if unscaling is not None:
            unscaling.set_amp_context(None)
        preset = grad_scale = getattr(optimizer, "grad_scale", None)
        scale: Any = self._scale
        state.pop("scan", None)
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            grad_scale = scale.clone() if preset is None else scale * preset
        scan = state.get("scan")
        found_inf = sum_of_flags(state["found_inf_per_device"], scale.device)
        amp_context = AmpStepContext(grad_scale, found_inf, scan)
        try:
            if unscaling is None:
                try:
                    self._grad_scale_attributes.set_for(optimizer, amp_context)
                    amp_context.is_used = True  # how far a foreign step came is unknown
                    returned = optimizer.step(*args, **kwargs)
                finally:
                    self._grad_scale_attributes.take_back()
            else:
                try:
                    unscaling.set_amp_context(amp_context)
                    returned = optimizer.step(*args, **kwargs)
                finally:
                    unscaling.set_amp_context(None)
                if preset is not None:
                    with contextlib.suppress(AttributeError):  # the optimizer may have deleted it
                        del optimizer.grad_scale
                again = None if amp_context.scan is scan else amp_context.scan
                # Ranks have agreed on the first scan, so it stays. An empty second scan means that
                # a hook has removed all gradients.
                if again is not None and again.found_infs and self._reduces_over() is None:
                    state["found_inf_per_device"] = dict(again.found_infs)
            state["stage"] = OptState.STEPPED
        except BaseException:
            if amp_context.is_used:
                _invalidate(state)
            raise
        return returned

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

    def _check_unscaled(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Refuses gradients that appeared after ``unscale_``, because they may still be scaled."""
        if not state["found_inf_per_device"]:
            if any(param.grad is not None for param in params_of(optimizer)):
                raise AssertionError(NOTHING_WAS_SCANNED)
        elif "iteration" in state:
            state["iteration"].check_unscaled()

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
                ranks of ``process_group`` had different scales in the last update that the device
                has finished; in this case the iteration has ended.
            ValueError: If ``new_scale`` is negative, NaN or inf. A tensor on a GPU is not read.
            TypeError: If ``new_scale`` is not a number. After all errors except that of different
                scales the iteration is unchanged.
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
        messages = None
        if scale.device.type in DEVICE_TYPES:
            messages = self._update_from_scans(new_scale)
        if messages is None:
            # torch updates scales on devices without our kernels, and raises if nothing was
            # scanned.
            super().update(new_scale)
        else:
            self._report(*messages)
        if self._reduces_over() is not None:
            self._loss_scale.check_scales()

    def _update_from_scans(self, new_scale: float | Tensor | None) -> tuple[str, str, bool] | None:
        """Passes the flags of this iteration's scans to the kernel that updates the scale.

        This ends the iteration, so that another update does not count the same scans again. Returns
        the log messages; or None if nothing was scanned, in which case nothing has changed.
        """
        next_states: Any = defaultdict(_refresh_per_optimizer_state)
        messages: Any = self._loss_scale.update(vars(self), new_scale, next_states)
        scale: Any = self._scale
        if messages is not None and scale.is_cuda:
            self._mark_update(scale)
        return messages


# Kept to detect an overridden method, including one that was patched into the class.
_UNSCALE_GRADS = GradScaler._unscale_grads_


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
