"""What an optimizer tells of its steps: norms of gradients, verdicts of a guard, landings."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from amp_ext.nonfinite import names_of_params
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.saved_optimizer import SavedOptimizer

__all__ = ["WatchedOptimizer"]


class WatchedOptimizer(SavedOptimizer):
    """An optimizer whose steps leave on the device what people and other programs watch."""

    _norm_guard: NormGuard | None = None

    #: Norm of the unscaled gradients at the last step, one float32 on the parameters' device, which
    #: later steps write anew: clone it to keep it. None without ``max_grad_norm``, unless norms are
    #: tracked or guarded.
    grad_norm: Tensor | None

    #: Lets every step keep the norm of each gradient, at the cost of a look where there was none.
    track_grad_norms: bool

    #: Norms of the unscaled gradients of all parameters at the last step, [parameters] float32 in
    #: the order of the groups, on the device of the first, which later steps write anew: NaN where
    #: there was no gradient, inf where it was not finite. Of DTensors, those of the whole
    #: gradients. None unless they are tracked.
    grad_norms: Tensor | None

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        track_grad_norms: bool,
        norm_guard: NormGuard | None,
    ) -> None:
        """Checks the options and adds the parameters; the arguments are those of a subclass."""
        # Of the instance: a wrapper made of this class shall not hide them.
        self.grad_norm = self.grad_norms = None
        if not isinstance(track_grad_norms, bool):
            raise TypeError(
                f"{type(self).__name__}: track_grad_norms must be a bool, got {track_grad_norms!r}"
            )
        self.track_grad_norms = track_grad_norms
        super().__init__(params, defaults)
        self.norm_guard = norm_guard

    @property
    def norm_guard(self) -> NormGuard | None:
        """The guard that judges the norm of the gradients at each step, or None.

        Raises:
            TypeError: If what is set is neither.
            ValueError: If it is the guard of another optimizer.
        """
        return self._norm_guard

    @norm_guard.setter
    def norm_guard(self, guard: NormGuard | None) -> None:
        if guard is not None and not isinstance(guard, NormGuard):
            raise TypeError(
                f"{type(self).__name__}: norm_guard must be a NormGuard or None, got {guard!r}"
            )
        if guard is not None:
            guard.attach(self)
            self.follow_landings()
        last, self._norm_guard = self._norm_guard, guard
        if last is not None and last is not guard:
            last.attach(None)
        self._plan.compiled.set_guard(None if guard is None else guard.statistics)

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
        if self.grad_norms is None or len(self.grad_norms) != len(stepped):
            raise RuntimeError(
                f"{type(self).__name__}.named_grad_norms: grad_norms must be those of a step, got "
                "none: set optimizer.track_grad_norms = True before a step"
            )
        params = (param for group in self.param_groups for param in group["params"])
        names = dict(zip(map(id, params), names_of_params(self), strict=True))
        norms = zip(stepped, self.grad_norms.tolist(), strict=True)
        return {
            names[id(param)]: norm
            for param, norm in norms
            if id(param) in names and not math.isnan(norm)
        }

    def follow_landings(self) -> None:
        """Lets every step from now on leave on the device whether it was taken.

        Steps of an optimizer that nobody follows write nothing for it.
        """
        self._plan.compiled.follow_landings()

    @property
    def has_landed(self) -> Tensor | None:
        """1 if the last step was taken, 0 if it was skipped or no parameter had a gradient.

        One float32 on the device of the first parameter, which later steps write anew. None before
        the first step that was followed (:meth:`follow_landings`).
        """
        return self._plan.compiled.has_landed
