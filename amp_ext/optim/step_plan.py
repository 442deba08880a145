"""The plan of an optimizer, with what the compiled one asks for: the states and the DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_ext import ops
from amp_ext.optim.inspection import Inspection
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.state_store import Local, PlacedParam, States, existing_master, init_states
from amp_ext.sharding import ShardedOver, global_offset, is_dtensor, local_grad, local_tensor

__all__ = ["StepPlan"]


class StepPlan:
    """What an optimizer knows of its parameters, gradients and states from step to step.

    It does not refer to the optimizer, which refers to it: both go as soon as nobody needs them.

    Between operations nothing in C++ refers to a parameter or a gradient, so that
    ``torch.utils.swap_tensors`` takes them: each operation takes the parameters that the groups
    list then, and lets go of them.
    """

    def __init__(self, kind: str, description: Any, failure: str = "") -> None:
        """Starts without parameters.

        Args:
            kind: The name of the optimizer.
            description: Of it, in the compiled module.
            failure: How the last step failed of the optimizer of which it is a copy.
        """
        #: The compiled plan.
        self.compiled: ops.Plan = ops.Plan(kind, description, None, failure)
        #: The guard of the optimizer, which the compiled plan knows, too.
        self.norm_guard: NormGuard | None = None
        #: Whether the next step is to be inspected, and the last one that was.
        self.inspects_next = False
        self.inspection: Inspection | None = None
        self._kind, self._description = kind, description
        self._set(ShardedOver(), [], [])

    def begin_anew(self, failure: str | None = None) -> None:
        """Forgets all that steps have left, before or after states are loaded.

        Args:
            failure: How the last step failed; None: as it has. "" lets the optimizer step again.
        """
        failure = self.compiled.failure if failure is None else failure
        self.compiled = ops.Plan(self._kind, self._description, self.compiled, failure)
        self.inspection = None
        self._set(ShardedOver(), [], [])

    def _set(
        self,
        sharded_over: ShardedOver,
        placed_params: list[PlacedParam],
        dtensors: list[tuple[int, Tensor, str]],
    ) -> None:
        #: The ranks that have the other parts of these parameters; false if there are none.
        self.sharded_over = sharded_over
        self._places = placed_params  # as in the compiled plan
        self._dtensors = dtensors  # row, parameter, name in errors

    def forget(self) -> None:
        """Drops all parameters and states."""
        self.compiled.forget()
        self._set(ShardedOver(), [], [])

    def list_groups(self, optimizer: Any, specs: Sequence[ops.StateSpec], operation: str) -> None:
        """Lists the parameters of all groups; states come with the gradients.

        Args:
            optimizer: Whose groups.
            specs: What the parameters of each group keep.
            operation: For which, for errors.

        Raises:
            TypeError: If a parameter is no tensor.
            ValueError: If a DTensor is neither sharded nor replicated.
        """
        self.forget()  # first: an interrupt may come
        sharded_over, placed_params, dtensors = ShardedOver(), [], []
        rows: list[tuple[int, int, Tensor, int | None, int]] = []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                name = f"{self._kind}: param of group {group_index}, param {index}"
                if not isinstance(param, Tensor):
                    raise TypeError(f"{name} must be a tensor, got {type(param).__name__}")
                partition, first = None, 0
                if is_dtensor(param):
                    partition, first = sharded_over.add(param, name), global_offset(param)
                    dtensors.append((len(rows), param, name))
                rows.append((group_index, index, param, partition, first))
                placed_params.append(PlacedParam(specs[group_index], param, group_index, index))
        self._set(sharded_over, placed_params, dtensors)
        self.compiled.register_params(optimizer, operation, rows)

    @property
    def params(self) -> list[Tensor]:
        """The parameters that are listed."""
        return [placed.param for placed in self._places]

    # What the compiled plan asks for.

    def shards(self) -> list[tuple[int, Tensor, Tensor | None]]:
        """Returns the part that this rank has of every DTensor, and of its gradient."""
        return [
            (row, local_tensor(param), local_grad(param, name))
            for row, param, name in self._dtensors
        ]

    def masters_of(self, states: dict[Any, Any], indices: list[int]) -> dict[int, Tensor]:
        """Returns this rank's parts of the masters that an optimizer has, which stay as they are.

        Args:
            states: Of the optimizer.
            indices: Of the parameters in the plan.
        """
        masters: dict[int, Tensor] = {}
        for index in indices:
            param = self._places[index].param
            master = existing_master(param, states[param]) if param in states else None
            if master is not None:
                masters[index] = master
        return masters

    def make_states(self, states: dict[Any, Any], indices: list[int]) -> tuple[States, list[Local]]:
        """Makes the states of parameters whole, and keeps none yet.

        Args:
            states: Of the optimizer.
            indices: Of the parameters in the plan.

        Returns:
            As :func:`~amp_ext.optim.state_store.init_states`.
        """
        return init_states(states, [self._places[index] for index in indices])
