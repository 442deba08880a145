"""What an optimizer keeps for its steps, and the steps that Python must prepare.

Usual steps go straight to ``compiled``, the other half of :class:`Stepper`. Scans of all gradients
start here, because the ranks of sharded parameters share what they found.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_ext import ops
from amp_ext.amp_protocol import ScanResult, to_device
from amp_ext.optim.formats import fits_blocks
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import CODED_STATES
from amp_ext.optim.state_store import PlacedParam, init_states, put_states
from amp_ext.params import params_of
from amp_ext.sharding import (
    ShardedOver,
    any_dtensors,
    global_offset,
    is_dtensor,
    is_over_rows,
    local_grad,
    local_tensor,
    sum_over_ranks,
)

if TYPE_CHECKING:
    from amp_ext.optim.fused_optimizer import FusedOptimizer

__all__ = ["Stepper"]

# The results of a scan for one device and partition: the flag, the index of the first nonfinite
# gradient, the index of the partition, and the sum of squares or None.
Found = tuple[Tensor, Tensor, int, "Tensor | None"]


class LocalShards(NamedTuple):
    """This rank's shards of the parameters, gradients and states of an optimizer.

    A hook of released gradients steps one parameter, so it takes the shard of this one alone.

    Attributes:
        sharded_over: The process groups over which parameters are sharded.
        groups: The groups, with shards in place of DTensors.
        shards: What a step needs to know of each parameter.
        params: The parameters, by their shards.
    """

    sharded_over: ShardedOver
    groups: list[dict[str, Any]]
    shards: list[ops.Shard]
    params: dict[Tensor, Tensor]

    @classmethod
    def of(cls, optimizer: FusedOptimizer, chosen: Sequence[Tensor] | None = None) -> LocalShards:
        """Takes the shards of parameters and gradients.

        Args:
            optimizer: The optimizer.
            chosen: The parameters, or None for all. The others stay as they are in the groups.

        Raises:
            TypeError: If the gradient of a DTensor is not a DTensor.
            ValueError: If a DTensor is neither sharded nor replicated.
        """
        name = type(optimizer).__name__
        found = cls(ShardedOver(), [], [], {})
        ids = None if chosen is None else {*map(id, chosen)}
        of_other = ops.Shard(0, 0, False, False, None, 0, 0)
        for group_index, group in enumerate(optimizer.param_groups):
            locals_of_group = []
            is_coded = group["state_dtype"] in CODED_STATES
            for index, param in enumerate(group["params"]):
                if ids is not None and id(param) not in ids:
                    locals_of_group.append(param)
                    found.shards.append(of_other)
                    continue
                where = f"{name}: param of group {group_index}, param {index}"
                is_shard = is_dtensor(param)
                local, grad = local_tensor(param), local_grad(param, where)
                locals_of_group.append(local)
                found.params[local] = param
                found.shards.append(
                    ops.Shard(
                        partition=found.sharded_over.add(param, where),
                        global_offset=global_offset(param) if is_shard else 0,
                        is_dtensor=is_shard,
                        has_blocks=is_coded and fits_blocks(param, is_over_rows(param)),
                        grad=grad,
                        version=param._version if is_shard else 0,
                        grad_version=param.grad._version if is_shard and grad is not None else 0,
                    )
                )
            found.groups.append({**group, "params": locals_of_group})
        return found

    def states_in(self, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the states of the shards, with shards in place of DTensors."""
        return {
            local: {key: local_tensor(value) for key, value in states[param].items()}
            if isinstance(states[param], dict)
            else states[param]
            for local, param in self.params.items()
            if param in states
        }


class Stepper:
    """The step of one optimizer, and what belongs to the optimizer but not to a group.

    ``compiled`` is the other half, ``csrc/python/stepper.h``, which takes usual steps and scans.

    The optimizer refers to this object, but this object does not refer to the optimizer, so that no
    reference cycle keeps them alive. A wrapper that copies the attributes of an optimizer, such as
    Lightning's, shares it.
    """

    def __init__(self, optimizer: str, hyperparameters: str) -> None:
        """Starts without any step.

        Args:
            optimizer: The name of the optimizer, for errors.
            hyperparameters: The name of its formula in the compiled module.
        """
        self.name = optimizer
        self.compiled: ops.CompiledStepper = ops.CompiledStepper(optimizer, hyperparameters)
        #: The scan for the next step of a scaler.
        self.last_scan: ScanResult | None = None
        #: The guard of the optimizer, and earlier ones, which captured CUDA graphs still use.
        self.norm_guard: NormGuard | None = None
        self.earlier_guards: list[NormGuard] = []
        #: Whether each step computes the norm of every single gradient. The norms of the last step,
        #: one float32 for each parameter, or None; and these parameters.
        self.tracks_grad_norms = False
        self.grad_norms: Tensor | None = None
        self.normed_params: list[Tensor] = []
        #: The averages that follow the steps, and whether one of them is in the parameters now.
        self.weight_averages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.averages_are_in = False

    # Steps.

    def take_slowly(
        self,
        optimizer: FusedOptimizer,
        params: Sequence[Tensor] | None,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        max_norm: Tensor | None,
        is_of_scaler: bool,
    ) -> int:
        """Steps parameters where Python must first check options, or complete or localize states.

        The first step of each optimizer is such a step, because it has no states yet.

        Args:
            optimizer: The optimizer.
            params: The parameters, or None for all.
            grad_scale: See :meth:`FusedOptimizer.take_step`, also for the other arguments.
            found_inf: See there.
            sum_of_squares: See there.
            max_norm: See there.
            is_of_scaler: See there.

        Returns:
            The number of parameters that had a gradient.

        Raises:
            RuntimeError: If the params of a group are not the same when read twice.
            TypeError, ValueError: If an option, the params of a group or a state are invalid.
        """
        self.check_groups(optimizer, "step")
        local = LocalShards.of(optimizer, params)
        clips = params is None and local.groups and local.groups[0]["max_grad_norm"] is not None
        if clips and local.sharded_over and sum_of_squares is None:
            sum_of_squares = self.scan_all(optimizer, None, grad_scale).sum_of_squares
        chosen = None if params is None else [local_tensor(param) for param in params]

        def step(states: Mapping[Any, Any], trusts_states: bool) -> Any:
            return self.compiled.step(
                local.states_in(states),
                local.groups,
                grad_scale,
                found_inf,
                sum_of_squares,
                max_norm,
                is_of_scaler,
                chosen,
                local.shards,
                trusts_states,
            )

        answer = step(optimizer.state, False)
        if answer == []:
            self._refuse_params("step")
        if isinstance(answer, list):  # the places of parameters whose states are not complete
            placed = [
                PlacedParam(
                    optimizer.state_spec_of(group), [*group["params"]][index], number, index
                )
                for number, index in answer
                for group in [optimizer.param_groups[number]]
            ]
            made = init_states(optimizer.state, placed)
            try:
                answer = step({**optimizer.state, **made}, True)
            except BaseException:
                if self.compiled.progress:
                    put_states(optimizer.state, made)
                raise
            put_states(optimizer.state, made)
        stepped = local.params.values()
        increment_version([p for p in stepped if is_dtensor(p) and p.grad is not None])
        return int(answer)

    def check_groups(self, optimizer: FusedOptimizer, operation: str) -> None:
        """Checks the parameters and the options of all groups, which the compiled step refused."""
        optimizer._check_params(operation)
        optimizer._check_groups()

    def _refuse_params(self, operation: str) -> NoReturn:
        raise RuntimeError(
            f"{self.name}.{operation}: params of a group gave other parameters when they were read "
            "again. Store the params of each group in a list."
        )

    # Scans.

    def scan_slowly(
        self,
        optimizer: FusedOptimizer,
        params: Sequence[Tensor] | None,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        sums_squares: bool,
    ) -> tuple[list[Found], ShardedOver]:
        """Scans gradients where Python must first check options or take local shards.

        Returns:
            What was found for each device and partition, and the process groups over which the
            parameters are sharded.
        """
        self.check_groups(optimizer, "scan_gradients")
        local = LocalShards.of(optimizer, params)
        chosen = None if params is None else [local_tensor(param) for param in params]
        inputs = found_inf, grad_scale, sums_squares, local.shards
        found = self.compiled.scan(local.groups, chosen, *inputs)
        if found is None:
            self._refuse_params("scan_gradients")
        return found, local.sharded_over

    def scan_all(
        self,
        optimizer: FusedOptimizer,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        sums_squares: bool = False,
    ) -> ScanResult:
        """Scans all gradients, and combines the result over the ranks of shards and of a guard.

        Args:
            optimizer: The optimizer.
            found_inf: The flag before the scan; None stands for 0.
            grad_scale: The scale that the gradients carry, or None.
            sums_squares: Returns the sum of squares even if there is no guard.
        """
        sums_squares |= self.norm_guard is not None
        inputs = None, found_inf, grad_scale, sums_squares
        found, sharded_over = self.compiled.scan(optimizer.param_groups, *inputs), None
        if found is None:
            found, sharded_over = self.scan_slowly(optimizer, *inputs)
        flags = {flag.device: flag for flag, *_ in found}
        first_nonfinites = {flag.device: first for flag, first, *_ in found}
        if not sharded_over and not sums_squares:
            return ScanResult(flags, first_nonfinites)
        group = self.ranks_of_guard()
        if sharded_over and group is not None:
            raise RuntimeError(
                f"{self.name}: norm_guard has a process_group, but the norm of sharded "
                "parameters is already shared. Set norm_guard.process_group = None."
            )
        sum_of_squares: Tensor | None = None
        device = optimizer._first_device()
        if not sharded_over:
            totals = [to_device(total, device) for *_, total in found if total is not None]
            if group is not None and not totals:  # the other ranks may have gradients
                totals = [torch.zeros((), dtype=torch.float64, device=device)]
            sum_of_squares = functools.reduce(torch.add, totals) if totals else None
        else:
            sums_squares |= optimizer.param_groups[0]["max_grad_norm"] is not None
            flags, sum_of_squares = sharded_over.all_reduce(
                torch.zeros((), device=device) if found_inf is None else found_inf,
                [flag for flag, *_ in found],
                [(partition, total) for *_, partition, total in found if total is not None],
                sums_squares=sums_squares,
            )
            if not sums_squares:
                sum_of_squares = None
        if group is not None and sum_of_squares is not None:
            # Ranks may have different loss scales. So each rank unscales its squares before the
            # sum, and multiplies the result by the square of its own scale.
            square = 1.0 if grad_scale is None else grad_scale.to(sum_of_squares).square()
            sum_of_squares = sum_over_ranks(sum_of_squares / square, group) * square
        return ScanResult(flags, first_nonfinites, sum_of_squares)

    def forget_scan(self) -> None:
        """Forgets the last scan, so that no later step uses it."""
        self.last_scan = None
        self.compiled.forget_scan()

    def grads_were_written(self, optimizer: FusedOptimizer) -> bool:
        """Returns True if a gradient was written or replaced since the last scan."""
        groups, shards = self._groups_of(optimizer)
        return self.compiled.gradients_were_written(groups, shards)

    def check_grads(self, optimizer: FusedOptimizer, is_of_scaler: bool) -> None:
        """Checks the gradients as a step does, for one that steps copies of the parameters."""
        groups, shards = self._groups_of(optimizer)
        self.compiled.check_grads(groups, is_of_scaler, shards)

    def mark_scaled(self, optimizer: FusedOptimizer) -> None:
        """Remembers that the gradients still carry the loss scale, as a step does."""
        groups, shards = self._groups_of(optimizer)
        self.compiled.mark_scaled(groups, shards)

    @staticmethod
    def _groups_of(optimizer: FusedOptimizer) -> tuple[list[dict[str, Any]], list[ops.Shard]]:
        """Returns the groups with local shards, and what the compiled step must know of these."""
        if not any_dtensors(params_of(optimizer)):
            return optimizer.param_groups, []
        local = LocalShards.of(optimizer)
        return local.groups, local.shards

    def ranks_of_guard(self) -> Any:
        """Returns the process group over which the guard sums the squares, or None."""
        return None if self.norm_guard is None else self.norm_guard.ranks()

    def norm_spans_ranks(self, optimizer: FusedOptimizer) -> bool:
        """Returns True if no rank alone knows the norm that a step uses."""
        if self.ranks_of_guard() is not None:
            return True
        params = params_of(optimizer)
        return any_dtensors(params) and bool(LocalShards.of(optimizer).sharded_over)
