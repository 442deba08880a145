"""The gradient scaler: torch's, with kernels that look once and only read."""

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

_TORCH_GRAD_SCALER = torch.amp.GradScaler  # whatever that name will stand for later


class GradScaler(ScalerSettings):
    """Scales the loss so that float16 gradients neither vanish nor overflow.

    Takes the place of ``torch.amp.GradScaler``: the same constructor, methods, state dict, errors
    and results. What differs:

    * The search for inf and NaN in ``step`` reads gradients and never writes them.
    * float16 gradients are welcome in ``step`` with an optimizer of ``amp_ext.optim``.
    * A scale that has no finite inverse (0, or 1e-39) counts as an overflow and warns once; torch
      would write NaN into the parameters.
    * ``update`` also takes an int, or a tensor of one element and any shape.
    * After an exception that came when ``unscale_`` or a step may have written, the iteration is
      spent: both are refused until ``update``, which needs no look then.
    * The scale can be kept within limits, held still, or made to endure some overflows.
    * ``last_step_skipped``, ``stats`` and ``history`` tell what happened, without
      waiting for a GPU.

    Three rules of hysteresis are in use. torch has none: every overflow backs off. NeMo refills it
    at every clean step, so that only overflows in a row count. Here, as in Megatron-LM, only a
    growth refills it: with ``hysteresis=3`` the third overflow since the last growth backs off, and
    each one after it does too.

    The logger "amp_ext" gets one line at level INFO when the first scale has settled, and a WARNING
    with the name of the first bad parameter when ``warn_after`` updates in a row were skipped.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """

    _takes_fp16 = False

    def scale(self, outputs: Any) -> Any:
        """Multiplies outputs by the scale.

        Args:
            outputs: A tensor, or an iterable of tensors.
        """
        if self._enabled and self._per_optimizer_states:  # not so in most loops
            self._on_loss_scaled()
        return super().scale(outputs)

    @_disable_dynamo
    def _on_loss_scaled(self) -> None:
        """Notes which gradients are unscaled: those that are made later may carry the scale."""
        for state in self._per_optimizer_states.values():
            if "iteration" in state:
                state["iteration"].on_loss_scaled(state["stage"] is OptState.STEPPED)

    def _state_of(self, optimizer: Any) -> dict[str, Any]:
        """Returns what is known of an optimizer since the last update.

        torch and clients look the dict up by ``id(optimizer)``. A wrapper and the optimizer inside
        share one dict; an id may be that of an object that is gone.
        """
        states, inside = self._per_optimizer_states, optimizer_inside(optimizer)
        for key in {id(optimizer), id(inside)}:
            iteration = states.get(key, {}).get("iteration")
            if iteration is not None and not iteration.is_of(inside):
                states[-id(iteration)] = states.pop(key)  # for the update to count
        state = states.get(id(optimizer))
        if state is None or state == _refresh_per_optimizer_state():
            state = states[id(inside)]
        states[id(optimizer)] = states[id(inside)] = state
        return state

    def _start_iteration(self, operation: str, optimizer: Any, state: dict[str, Any]) -> Any:
        """Refuses gradients that don't carry the scale; returns the flag that a look starts from.

        From here on the state has the iteration that the compiled module keeps of the optimizer.
        """
        inside = optimizer_inside(optimizer)
        return self._loss_scale.start_iteration(operation, vars(self), state, inside)

    @_disable_dynamo  # a compiled program steps around it
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales an optimizer's gradients in place and looks for inf and NaN among them.

        Args:
            optimizer: Whose gradients; once between two updates, before its step.

        Raises:
            AssertionError: If nothing was scaled.
            RuntimeError: If they were unscaled, also with another optimizer, or the optimizer
                stepped, since the last update, or the iteration is spent, or one is complex.
            ValueError: If a gradient is float16.
            TypeError: If it is no optimizer.
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
        # The method of torch's own class: that of FSDP1 would reduce the flags a second time.
        _TORCH_GRAD_SCALER.unscale_(self, optimizer)
        self._agree_over_group(state)
        state["iteration"].needs_reset = False  # until here it was

    def _reduces_over(self) -> Any:
        """Returns the process group whose ranks skip together, or None."""
        return self.process_group

    def _agree_over_group(self, state: dict[str, Any]) -> dict[torch.device, Tensor]:
        """Makes what this look found known to all ranks; those without a gradient take part."""
        flags: dict[torch.device, Tensor] = state["found_inf_per_device"]
        group = self._reduces_over()
        if group is not None:
            scale, _ = self._check_scale_growth_tracker("unscale_")
            flags, differ = all_reduce_flags(flags, scale, group)
            state["found_inf_per_device"] = flags
            self._loss_scale.note_different_scales(state, flags, differ)
        return flags

    def flags_of_all_ranks(self, flags: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Returns the flags of a look as all ranks have them together; the scaler is as before.

        Args:
            flags: By device that holds a gradient, one float32: not 0 if one is inf or NaN.
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
        """Unscales an optimizer's gradients in place; returns a found_inf for each device."""
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
        """Looks at gradients, and unscales them by ``inv_scale`` if it is given.

        Returns None if torch has to do it.
        """
        grads, sharded_over = local_grads(optimizer, "GradScaler")
        flags: dict[torch.device, Tensor] | None = self._loss_scale.scan(
            state["iteration"], grads, found_inf, inv_scale, allow_fp16
        )
        if flags is not None and sharded_over:
            flags, _, _ = sharded_over.all_reduce(found_inf, flags.values())
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        """Looks for inf and NaN in an optimizer's gradients, which it does not write."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._per_optimizer_states.get(id(optimizer)) or self._state_of(optimizer)
        found_inf = self._start_iteration("step", optimizer, state)
        flags: dict[torch.device, Tensor] | None = None
        unscaling = unscaling_optimizer(optimizer)
        if getattr(self._unscale_grads_, "__func__", None) is not _UNSCALE_GRADS:
            pass  # someone's own way of looking
        elif unscaling is None:
            flags = self._scan(optimizer, state, found_inf, None, allow_fp16=True)
        else:
            state["scan"] = unscaling.scan_gradients(found_inf, scale)
            flags = dict(state["scan"].found_infs)
        if flags is not None:
            state["found_inf_per_device"] = flags
            return flags if self._reduces_over() is None else self._agree_over_group(state)
        try:  # as torch: unscales by 1, which leaves gradients what they are
            super()._check_inf_per_device(optimizer)
        finally:
            state["iteration"].forget_unscaling()
        return self._agree_over_group(state)

    @_disable_dynamo  # a compiled program steps around it
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer whose gradients are finite, and skips the step otherwise.

        Looks at the gradients first, unless :meth:`unscale_` has. An optimizer that unscales inside
        its step gets the scale for this one step, also behind an object that delegates to it.

        Args:
            optimizer: Whose step; once between two updates.
            args: For ``optimizer.step``.
            kwargs: Likewise; without ``closure``.

        Returns:
            What ``optimizer.step`` returned; None if it was not called.

        Raises:
            AssertionError: If nothing was scaled, or the optimizer had no gradient to look at.
            RuntimeError: If it has stepped since the last update, the iteration is spent,
                ``closure`` is given, a gradient is complex, or may not be as the optimizer expects
                it: it came after ``unscale_``, or was written or replaced after a later
                :meth:`scale`, and may still be scaled; or it was unscaled with another optimizer.
            TypeError: If it is no optimizer, or an object that hides the one that the scale is for.
        """
        if not self._enabled or "closure" in kwargs or self._scale is None:
            return super().step(optimizer, *args, **kwargs)  # passes through, or raises
        keeps_scale = takes_scale(optimizer)
        if not keeps_scale:
            check_has_groups("step", optimizer)
        elif args and callable(args[0]):
            raise RuntimeError(NO_CLOSURE)  # gradients of a closure lack the scale
        state = self._state_of(optimizer)
        if "iteration" in state:
            state["iteration"].check_needs_no_reset("step")
        if state["stage"] is OptState.UNSCALED:
            self._check_unscaled(optimizer, state)
        if state["stage"] is OptState.STEPPED:
            return super().step(optimizer, *args, **kwargs)  # raises
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
        except BaseException:  # it may have stepped
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
        """Steps an optimizer that is told the scale, and unscales inside its step."""
        if self._reduces_over() is not None:
            check_guard(unscaling)
        # An interrupt may have come before the last step's end.
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
                    amp_context.is_used = True  # nobody sees how far a step of others comes
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
                    with contextlib.suppress(AttributeError):  # the optimizer has deleted it
                        del optimizer.grad_scale
                again = None if amp_context.scan is scan else amp_context.scan
                # Ranks agreed on the first look, and a hook may have taken all gradients away.
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
        """Steps an optimizer of torch's older way, unless an overflow was found."""
        try:
            returned = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
            optimizer_state["stage"] = OptState.STEPPED  # at once: a second step must not come
        except BaseException:  # nobody sees how far it came
            _invalidate(optimizer_state)
            raise
        return returned

    def _check_unscaled(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Refuses gradients that ``unscale_`` has not seen: they may still be scaled."""
        if not state["found_inf_per_device"]:
            if any(param.grad is not None for param in params_of(optimizer)):
                raise AssertionError(NOTHING_WAS_SCANNED)
        elif "iteration" in state:
            state["iteration"].check_unscaled()

    @_disable_dynamo  # a compiled program steps around it
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale after the steps of an iteration, without a look from the host.

        Args:
            new_scale: Sets the scale instead of letting it follow the overflows: a number, or a
                tensor of one element.

        Raises:
            AssertionError: If nothing was scaled, or no step or ``unscale_`` looked at gradients
                and no iteration is spent, or a tensor is not one that torch takes.
            RuntimeError: If a number is finite but does not fit float32. Or if ranks of
                ``process_group`` had different scales, as of the last update that the device has
                finished: the iteration has ended then.
            ValueError: If ``new_scale`` is negative, NaN or inf. A tensor on a GPU is not read.
            TypeError: If ``new_scale`` is no number. After all of these but the error of different
                scales the iteration is as it was.
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
                super().update(new_scale)  # raises, before anything is changed
            new_scale = new_scale.reshape(())
            if new_scale.is_cpu:
                checked("GradScaler.update", "new_scale", new_scale)
        elif new_scale is not None:
            new_scale = float(checked("GradScaler.update", "new_scale", new_scale))
        messages = None
        if scale.device.type in DEVICE_TYPES:
            messages = self._update_from_scans(new_scale)
        if messages is None:
            super().update(
                new_scale
            )  # of a device that only torch knows; or nothing looked: raises
        else:
            self._report(*messages)
        if self._reduces_over() is not None:
            self._loss_scale.check_scales()

    def _update_from_scans(self, new_scale: float | Tensor | None) -> tuple[str, str, bool] | None:
        """Takes the flags of this iteration's looks to the kernel that updates the scale.

        The iteration ends with it, so that no second update counts these looks again. Returns what
        there is to report; None if nothing was looked at, and nothing has been done.
        """
        next_states: Any = defaultdict(_refresh_per_optimizer_state)
        messages: Any = self._loss_scale.update(vars(self), new_scale, next_states)
        scale: Any = self._scale
        if messages is not None and scale.is_cuda:
            self._mark_update(scale)
        return messages


# To recognise an overridden method, also one that was patched into the class.
_UNSCALE_GRADS = GradScaler._unscale_grads_


@functools.lru_cache(maxsize=32)  # a signature takes 9 µs
def _takes_scaler(step: Any) -> bool:
    """Returns whether a ``step`` asks for the scaler itself, as torch's older way is."""
    return "grad_scaler" in inspect.signature(step).parameters


def _invalidate(state: dict[str, Any]) -> None:
    """Lets only an update go on from an exception in a step that may have written."""
    if "iteration" in state:
        state["iteration"].needs_reset = True
    else:  # a client made the state
        state["stage"] = OptState.STEPPED
