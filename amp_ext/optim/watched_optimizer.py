"""What an optimizer tells of its steps: norms, verdicts of a guard, landings, inspections."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.amp_protocol import sum_of_flags
from amp_ext.nonfinite import names_of_params, params_of
from amp_ext.optim.amp_context import context_from_attributes, context_from_scaler
from amp_ext.optim.inspection import Inspection, combined
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.planned_optimizer import PlannedOptimizer

__all__ = ["WatchedOptimizer"]


class WatchedOptimizer(PlannedOptimizer):
    """An optimizer whose steps leave on the device what people and other programs watch."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        track_grad_norms: bool,
        norm_guard: NormGuard | None,
    ) -> None:
        """Checks the options and adds the parameters; the arguments are those of a subclass."""
        self.track_grad_norms = track_grad_norms
        super().__init__(params, defaults)
        self.norm_guard = norm_guard

    # All that is watched belongs to the plan, which a wrapper with a copy of the attributes shares.

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the unscaled gradients at the last step, one float32 on the parameters' device.

        Later steps write it anew: clone it to keep it. None without ``max_grad_norm``, unless norms
        are tracked or guarded.
        """
        return self._plan.compiled.grad_norm

    @property
    def grad_norms(self) -> Tensor | None:
        """Norms of the unscaled gradients of all parameters at the last step.

        [parameters] float32 in the order of the groups, on the device of the first, which later
        steps write anew: NaN where there was no gradient, inf where it was not finite. Of DTensors,
        those of the whole gradients. None unless they are tracked.
        """
        return self._plan.compiled.grad_norms

    @property
    def inspection(self) -> Inspection | None:
        """What the step did that :meth:`inspect_next` asked for; None before it."""
        return self._plan.inspection

    @property
    def track_grad_norms(self) -> bool:
        """Whether every step keeps the norm of each gradient, which costs a look of its own.

        A look of a scaler, or for ``max_grad_norm``, finds them beside what it looks for.

        Raises:
            TypeError: If what is set is no bool.
            RuntimeError: If it is set amid a step, by another thread.
        """
        return self._plan.compiled.tracks_grad_norms

    @track_grad_norms.setter
    def track_grad_norms(self, tracks: bool) -> None:
        if not isinstance(tracks, bool):
            raise TypeError(
                f"{type(self).__name__}: track_grad_norms must be a bool, got {tracks!r}"
            )
        self._plan.compiled.tracks_grad_norms = tracks

    @property
    def norm_guard(self) -> NormGuard | None:
        """The guard that judges the norm of the gradients at each step, or None.

        Raises:
            TypeError: If what is set is neither.
            ValueError: If it is the guard of another optimizer.
        """
        return self._plan.norm_guard

    @norm_guard.setter
    def norm_guard(self, guard: NormGuard | None) -> None:
        if guard is not None and not isinstance(guard, NormGuard):
            raise TypeError(
                f"{type(self).__name__}: norm_guard must be a NormGuard or None, got {guard!r}"
            )
        if guard is not None:
            guard.attach(self)  # or raises
            self.track_step_applied()
        last = self._plan.norm_guard
        self._plan.compiled.set_guard(None if guard is None else guard.statistics)
        self._plan.norm_guard = guard
        if last is not None and last is not guard:
            last.attach(None)

    def named_grad_norms(self) -> dict[str, float]:
        """Returns ``grad_norms`` by the names of the parameters. Waits for a GPU.

        A parameter has the name that the optimizer was given for it (``named_parameters()``), else
        where it stands: "group 0, param 3". Those without a gradient, and those that have left
        the groups since the step, are left out.

        Raises:
            RuntimeError: If no step has been taken since norms are tracked, or parameters have been
                forgotten since (``load_state_dict``, ``rebuild``).
        """
        stepped = self._plan.params
        grad_norms = self.grad_norms
        if grad_norms is None or len(grad_norms) != len(stepped):
            raise RuntimeError(
                f"{type(self).__name__}.named_grad_norms: grad_norms must be those of a step, got "
                "none: set optimizer.track_grad_norms = True before a step"
            )
        names = dict(zip(map(id, params_of(self)), names_of_params(self), strict=True))
        norms = zip(stepped, grad_norms.tolist(), strict=True)
        return {
            names[id(param)]: norm
            for param, norm in norms
            if id(param) in names and not math.isnan(norm)
        }

    def track_step_applied(self) -> None:
        """Lets every step from now on leave on the device whether it was taken.

        Steps of an optimizer that nobody follows write nothing for it.
        """
        self._plan.compiled.track_step_applied()

    @property
    def step_applied(self) -> Tensor | None:
        """1 if the last step was taken, 0 if it was skipped or no parameter had a gradient.

        One float32 on the device of the first parameter, which later steps write anew. None before
        the first step that was followed (:meth:`track_step_applied`).
        """
        return self._plan.compiled.step_applied

    def average_weights(self, operation: str, averages: ops.WeightAverages) -> None:
        """Lets averages of the weights do something with the parameters that there are now.

        Args:
            operation: "take_average" takes the last step into account, "list_average" lists the
                parameters, "restart_average" begins anew, and "swap_average" puts the averages into
                the parameters: until they are back nothing steps, saves or loads.
            averages: Of all parameters, as :class:`~amp_ext.optim.WeightAverage` keeps them.
        """
        self._ask_plan(operation, self._plan.compiled.average, operation, averages)

    def swap_back(self, averages: ops.WeightAverages) -> None:
        """Puts the parameters back, if these averages are in them."""
        self._plan.compiled.swap_back(averages)

    def inspect(self, scaler: torch.amp.GradScaler | None = None) -> Inspection:
        """Returns what the coming step would do to each parameter, and stores nothing.

        To be called between the backward pass and the step, also after ``unscale_`` and
        ``clip_grad_norm_``. It takes the very step with a copy of one parameter after another, with
        all options, and so tells exactly what the step would do if it came now. It takes as long as
        some ten steps, or more with small tensors, and the memory of one parameter with its states
        until it returns. If parameters are sharded, or the scaler or the guard has a process group,
        all ranks have to call it together; the numbers are those of whole parameters.

        Args:
            scaler: The gradient scaler that will step the optimizer, ours or torch's. Without it
                gradients are taken as they are, with the scale that they may carry.

        Raises:
            RuntimeError: If there is no gradient, or a step has taken those that are there, or the
                scaler has scaled nothing; or if a step would be refused, as :meth:`step` says.
            TypeError: If ``scaler`` is no scaler.
            ValueError: As of :meth:`step`.

        Example:
            >>> scaler.scale(loss).backward()
            >>> print(optimizer.inspect(scaler))
            >>> scaler.step(optimizer)
        """
        if scaler is None:
            context = context_from_attributes(self)
            return self._inspect(context.grad_scale, context.found_inf)
        context = context_from_scaler(scaler, self, f"{type(self).__name__}.inspect")
        found_inf, sum_of_squares = context.found_inf, None
        if found_inf is None and context.grad_scale is not None:
            scan = self._scan_without_recording(context.grad_scale)
            flags = dict(scan.found_infs)
            if hasattr(scaler, "flags_of_all_ranks"):
                flags = scaler.flags_of_all_ranks(flags)
            found_inf = sum_of_flags(flags, context.grad_scale.device)
            sum_of_squares = scan.sum_of_squares
        return self._inspect(context.grad_scale, found_inf, sum_of_squares)

    def inspect_next(self) -> None:
        """Lets the next step leave in ``inspection`` what it does, as :meth:`inspect` tells it.

        It may be called at any time, and needs to know of no scaler. A step that a scaler does not
        take, as after an overflow where gradients are unscaled before it, one that is refused, and
        one without gradients leave this to the next. If parameters are sharded, all ranks have to
        ask for it.
        """
        self._plan.inspects_next = True

    def _inspect(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | int | None,
        sum_of_squares: Tensor | None = None,
        is_in_step: bool = False,
    ) -> Inspection:
        """Returns what a step would do that is handed this."""
        plan = self._plan
        if not isinstance(found_inf, Tensor):  # nothing had a gradient when a scaler looked
            found_inf = None
        arguments = grad_scale, found_inf
        found = None
        if sum_of_squares is not None or self._ranks_of_guard() is None:
            found = self._ask_plan(
                "inspect", plan.compiled.inspect, *arguments, sum_of_squares, is_in_step
            )
        if not found:  # a norm over ranks is wanted, as in a step
            sum_of_squares = self._scan_without_recording(None).sum_of_squares
            found = self._ask_plan(
                "inspect", plan.compiled.inspect, *arguments, sum_of_squares, is_in_step
            )
        if plan.sharded_over:
            found.sums = plan.sharded_over.combine(plan.params, found.sums, combined)
        placed_params = [
            (group_index, index)
            for group_index, group in enumerate(self.param_groups)
            for index in range(len(group["params"]))
        ]
        return Inspection(found, dict(zip(placed_params, names_of_params(self), strict=True)))
