"""The plan of an optimizer, which passes states and local shards of DTensors to the C++ plan."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.amp_protocol import GradScan, to_device
from amp_ext.optim.formats import StateSpec
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.state_store import PlacedParam, States, StepTensors, init_states
from amp_ext.sharding import (
    ShardedOver,
    global_offset,
    is_dtensor,
    local_grad,
    local_tensor,
    sum_over_ranks,
)

__all__ = ["StepPlan", "place_params"]


Row = tuple[int, int, Tensor, "int | None", int]


def place_params(
    name: str, optimizer: Any, specs: Sequence[StateSpec]
) -> tuple[ShardedOver, list[PlacedParam], list[Row]]:
    """Lists the parameters of all groups, for the compiled module to register.

    Args:
        name: The name of the optimizer, for errors.
        optimizer: The optimizer.
        specs: The specification of the states, for each group.

    Returns:
        The process groups over which parameters are sharded, the parameters, and for each of them
        its group, its index there, the parameter, its partition, and the offset of its shard.

    Raises:
        TypeError: If a parameter is not a tensor.
        ValueError: If a DTensor is neither sharded nor replicated.
    """
    sharded_over, placed_params, rows = ShardedOver(), [], []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            placed = PlacedParam(specs[group_index], param, group_index, index)
            where = f"{name}: param of {placed}"
            if not isinstance(param, Tensor):
                raise TypeError(f"{where} must be a tensor, got {type(param).__name__}")
            partition, first = None, 0
            if is_dtensor(param):
                partition, first = sharded_over.add(param, where), global_offset(param)
            rows.append((group_index, index, param, partition, first))
            placed_params.append(placed)
    return sharded_over, placed_params, rows


class StepPlan:
    """Stores what an optimizer knows about its parameters, gradients and states between steps.

    The optimizer refers to the plan, but the plan does not refer to the optimizer, so that no
    reference cycle keeps them alive.

    Between operations nothing in C++ refers to a parameter or a gradient, because
    ``torch.utils.swap_tensors`` refuses tensors with further references. Each operation takes the
    parameters that are in the groups at that time, and releases them at its end.
    """

    def __init__(self, optimizer: str, description: Any, failure: str = "") -> None:
        """Starts without parameters.

        Args:
            optimizer: The name of the optimizer.
            description: The optimizer's description in the compiled module.
            failure: The failure of the last step, if this plan belongs to a copy of an optimizer
                whose step has failed; otherwise "".
        """
        #: The compiled plan.
        self.compiled: ops.Plan = ops.Plan(optimizer, description, None, failure)
        #: Answers of the compiled plan, looked up once, because every step compares with them.
        self.must_register = ops.PlanAnswer.REGISTER_PARAMS
        self.needs_global_norm = ops.PlanAnswer.NEEDS_GLOBAL_NORM
        #: The guard of the optimizer, and earlier ones, which captured CUDA graphs still use.
        self.norm_guard: NormGuard | None = None
        self.earlier_guards: list[NormGuard] = []
        #: Whether each step computes the norm of every single gradient, and the norms of the last
        #: step, one float32 for each of :attr:`params`, or None.
        self.tracks_grad_norms = False
        self.grad_norms: Tensor | None = None
        #: The averages that follow the steps, and whether one of them is in the parameters now.
        self.weight_averages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.averages_are_in = False
        self._name, self._description = optimizer, description
        self._set(ShardedOver(), [], [])

    def reset(self, failure: str | None = None) -> None:
        """Forgets everything that earlier steps have left, because states are being loaded.

        Args:
            failure: The failure of the last step, after which the optimizer refuses to step; "" if
                no step has failed. None keeps the failure that is stored now.
        """
        failure = self.compiled.failure if failure is None else failure
        self.compiled = ops.Plan(self._name, self._description, self.compiled, failure)
        self.grad_norms = None
        self._set(ShardedOver(), [], [])

    def _set(
        self,
        sharded_over: ShardedOver,
        placed_params: list[PlacedParam],
        dtensors: list[tuple[int, Tensor, str]],
    ) -> None:
        #: The process groups over which parameters are sharded; false if no parameter is sharded.
        self.sharded_over = sharded_over
        self._placed_params = placed_params  # in the order of the compiled plan
        self._dtensors = dtensors  # tuples: index in the plan, parameter, name in errors

    def forget(self) -> None:
        """Drops all parameters and states, and the norms of their gradients."""
        self.compiled.forget()
        self.grad_norms = None
        self._set(ShardedOver(), [], [])

    def register_params(self, optimizer: Any, specs: Sequence[StateSpec], operation: str) -> None:
        """Registers the parameters of all groups. A step adds states for parameters with gradients.

        Args:
            optimizer: The optimizer of the plan.
            specs: The specification of the states, for each group.
            operation: Name of the operation, for errors.

        Raises:
            TypeError: If a parameter is not a tensor.
            ValueError: If a DTensor is neither sharded nor replicated.
        """
        self.forget()  # first, so that an interrupt leaves an empty plan, not half of a plan
        sharded_over, placed_params, rows = place_params(self._name, optimizer, specs)
        dtensors = [
            (index, placed.param, f"{self._name}: param of {placed}")
            for index, placed in enumerate(placed_params)
            if is_dtensor(placed.param)
        ]
        self._set(sharded_over, placed_params, dtensors)
        self.compiled.register_params(optimizer, operation, rows)

    @property
    def params(self) -> list[Tensor]:
        """The registered parameters."""
        return [placed.param for placed in self._placed_params]

    def ranks_of_guard(self) -> Any:
        """Returns the process group over which the guard sums the squares, or None."""
        return None if self.norm_guard is None else self.norm_guard.ranks()

    def norm_spans_ranks(self) -> bool:
        """Returns True if no rank alone knows the norm that a step uses."""
        return bool(self.sharded_over) or self.ranks_of_guard() is not None

    def over_all_ranks(
        self, optimizer: Any, found: list[Any], found_inf: Tensor | None, grad_scale: Tensor | None
    ) -> GradScan:
        """Returns the result of a scan, combined over the ranks that share parameters or a guard.

        Args:
            optimizer: The optimizer of the plan.
            found: A tuple for each device and partition: the flag, the index of the first nonfinite
                gradient, the index of the partition, and the sum of squares or None.
            found_inf: The flag before the scan; None stands for 0.
            grad_scale: The scale that the gradients carry, or None.
        """
        flags = {flag.device: flag for flag, *_ in found}
        first_nonfinites = {flag.device: first for flag, first, *_ in found}
        if not self.sharded_over and self.norm_guard is None:
            return GradScan(flags, first_nonfinites)
        group = self.ranks_of_guard()
        if self.sharded_over and group is not None:
            raise RuntimeError(
                f"{self._name}: norm_guard has a process_group, but the norm of sharded "
                "parameters is already shared. Set norm_guard.process_group = None."
            )
        sum_of_squares: Tensor | None = None
        device = optimizer._first_device()
        if not self.sharded_over:
            totals = [to_device(total, device) for _, _, _, total in found]
            if group is not None and not totals:  # the other ranks may have gradients
                totals = [torch.zeros((), dtype=torch.float64, device=device)]
            sum_of_squares = functools.reduce(torch.add, totals) if totals else None
        else:
            max_grad_norm = optimizer.param_groups[0]["max_grad_norm"]
            sums_squares = max_grad_norm is not None or self.norm_guard is not None
            flags, sum_of_squares = self.sharded_over.all_reduce(
                torch.zeros((), device=device) if found_inf is None else found_inf,
                [flag for flag, *_ in found],
                [(partition, total) for _, _, partition, total in found],
                sums_squares=sums_squares,
            )
            if not sums_squares:
                sum_of_squares = None
        if group is not None and sum_of_squares is not None:
            # Ranks may have different loss scales. So each rank unscales its squares before the
            # sum, and multiplies the result by the square of its own scale.
            square = 1.0 if grad_scale is None else grad_scale.to(sum_of_squares).square()
            sum_of_squares = sum_over_ranks(sum_of_squares / square, group) * square
        return GradScan(flags, first_nonfinites, sum_of_squares)

    # The compiled plan calls the methods below.

    def shards(self) -> list[tuple[int, Tensor, Tensor | None]]:
        """Returns the index in the plan, the local shard and the local gradient of each DTensor."""
        return [
            (index, local_tensor(param), local_grad(param, name))
            for index, param, name in self._dtensors
        ]

    def make_states(
        self, states: dict[Any, Any], indices: list[int]
    ) -> tuple[States, list[StepTensors]]:
        """Initializes missing states of parameters, but does not store them in the optimizer.

        Args:
            states: The states of the optimizer.
            indices: Indices of parameters in the plan.

        Returns:
            The result of :func:`~amp_ext.optim.state_store.init_states`.
        """
        return init_states(states, [self._placed_params[index] for index in indices])
