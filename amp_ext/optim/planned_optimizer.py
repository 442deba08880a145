"""How an optimizer asks its plan: for a step, and for looks at the gradients, over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_ext.amp_protocol import GradScan, to_device
from amp_ext.nonfinite import params_of
from amp_ext.optim.saved_optimizer import SavedOptimizer
from amp_ext.sharding import sum_over_ranks

__all__ = ["PlannedOptimizer"]


class PlannedOptimizer(SavedOptimizer):
    """An optimizer whose plan knows its parameters, gradients and states from step to step."""

    def rebuild(self) -> None:
        """Forgets all parameters and states until the next step, which looks them up again.

        A step notices by itself what was replaced; this frees at once what was, such as states that
        were moved to another device to make room. It is remembered which parameters were written
        since their masters were.
        """
        self._plan.forget()

    def _ask_plan(self, operation: str, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Asks the plan for something of the groups and states as they are.

        ``ask`` is a method of the compiled plan, which takes ours, this optimizer and the
        arguments. It returns None where options can't be read or parameters are to be listed anew.

        Raises:
            RuntimeError: If another thread has the plan, the last step failed amid its launches, or
                the params of a group are others when they are read again.
            TypeError, ValueError: If an option or the params of a group are not as they must be.
        """
        answer = ask(self._plan, self, *arguments)
        if answer is not None:
            return answer
        self._check_params(operation)
        self._check_groups()
        specs = [self.state_spec_of(group) for group in self.param_groups]
        self._plan.list_groups(self, specs, operation)
        answer = ask(self._plan, self, *arguments)
        if answer is None:
            raise RuntimeError(
                f"{type(self).__name__}.{operation}: params of each group must be a list, got "
                "other parameters when they were read again"
            )
        return answer

    def scan_gradients(self, found_inf: Tensor, grad_scale: Tensor | None = None) -> GradScan:
        """Looks for inf and NaN in all gradients, for a scaler.

        If parameters are sharded, all ranks have to call this together.

        Args:
            found_inf: One float32; copied, not written.
            grad_scale: One float32, or None. Without a finite inverse it counts as an overflow.

        Returns:
            What was found: for each device that holds a gradient a copy of ``found_inf``, set to 1
            if one there is inf or NaN; with shards, if one is on any rank.
        """
        return self._scan(found_inf, grad_scale)

    def _scan(self, found_inf: Tensor, grad_scale: Tensor | None) -> GradScan:
        """Looks for inf and NaN in all gradients."""
        scan = self._plan.compiled.scan
        found = self._ask_plan("scan_gradients", scan, found_inf, grad_scale)
        return self._found_by_all_ranks(found, found_inf, grad_scale)

    def _scan_without_recording(self, grad_scale: Tensor | None) -> GradScan:
        """Looks for inf and NaN in all gradients, and leaves no mark that a step would see."""
        found = self._ask_plan("inspect", self._plan.compiled.scan_without_recording, grad_scale)
        return self._found_by_all_ranks(found, None, grad_scale)

    def _found_by_all_ranks(
        self, found: list[Any], found_inf: Tensor | None, grad_scale: Tensor | None
    ) -> GradScan:
        """Returns what a look has found, over all ranks if they have parts of it."""
        plan = self._plan
        flags = {flag.device: flag for flag, *_ in found}
        first_nonfinites = {flag.device: first for flag, first, *_ in found}
        group = self._ranks_of_guard()
        if not plan.sharded_over and group is None:
            return GradScan(flags, first_nonfinites)
        if plan.sharded_over and group is not None:
            raise RuntimeError(
                f"{type(self).__name__}: norm_guard must have no process_group where parameters "
                "are sharded, which share their norm, got one"
            )
        sum_of_squares: Tensor | None = None
        squares_of_params: Tensor | None = None
        if not plan.sharded_over:
            device = self._first_device()
            sum_of_squares = torch.zeros((), dtype=torch.float64, device=device)
            for _, _, _, total, _ in found:
                sum_of_squares = sum_of_squares + to_device(total, device)
        else:
            if found_inf is None:
                found_inf = torch.zeros((), device=self._first_device())
            sums_squares = plan.compiled.wants_norm(self.param_groups[0]["max_grad_norm"])
            flags, sum_of_squares, squares_of_params = plan.sharded_over.all_reduce(
                found_inf,
                [flag for flag, *_ in found],
                [(partition, total) for _, _, partition, total, _ in found],
                sums_squares=sums_squares,
                squares_of_params=[
                    (partition, squares)
                    for _, _, partition, _, squares in found
                    if squares is not None
                ],
                params=len(plan.params) if plan.compiled.tracks_grad_norms else 0,
            )
            if not sums_squares:
                sum_of_squares = None
        if group is not None and sum_of_squares is not None:
            # Each rank's scale may be its own.
            square = 1.0 if grad_scale is None else grad_scale.to(sum_of_squares).square()
            sum_of_squares = sum_over_ranks(sum_of_squares / square, group) * square
        return GradScan(flags, first_nonfinites, sum_of_squares, squares_of_params)

    def _ranks_of_guard(self) -> Any:
        """Returns the process group over which a guard wants the squares summed, or None."""
        guard = self._plan.norm_guard
        return None if guard is None else guard.ranks()

    def _first_device(self) -> torch.device:
        """Returns the device of the first parameter, or the CPU on a rank that has none."""
        return next((param.device for param in params_of(self)), torch.device("cpu"))
