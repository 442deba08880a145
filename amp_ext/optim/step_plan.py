"""What an optimizer keeps from step to step: the compiled plan of its parameters and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_ext import ops
from amp_ext.optim.options import CODED_STATES
from amp_ext.optim.state_store import Local, Place, States, made_states
from amp_ext.sharding import ShardedOver, first_element, is_dtensor, local_grad, local_tensor

__all__ = ["StepPlan"]


class StepPlan:
    """The compiled plan of an optimizer's groups and states as they were when it was made.

    It belongs to one optimizer, which makes another one when this is not current any more. It does
    not refer to the optimizer, which refers to it: both go as soon as nobody needs them.

    Between operations nothing in C++ refers to a parameter or a gradient, so that
    ``torch.utils.swap_tensors`` takes them: each operation takes the parameters that the groups
    list then, and lets go of them.
    """

    def __init__(
        self,
        kind: str,
        groups: Sequence[dict[str, Any]],
        kept: Sequence[ops.Kept],
        deciding_options: list[tuple[Any, ...]],
        rounded_params: Any,
        scaled_grads: Any,
    ) -> None:
        """Compiles the parameters of all groups; states come with the gradients.

        Args:
            kind: The name of the optimizer.
            groups: Whose parameters.
            kept: What each group keeps.
            deciding_options: For each group what decides that.
            rounded_params: Of the plan before this one, or None.
            scaled_grads: Likewise.

        Raises:
            TypeError: If a parameter is no tensor.
            ValueError: If a DTensor is neither sharded nor replicated.
        """
        self._compiled = ops.Plan(kind, max((each.names for each in kept), key=len))
        #: How far the last step has come, if it failed; outlives the plan in the optimizer.
        self.progress = self._compiled.progress
        #: The ranks that have the other parts of these parameters; false if there are none.
        self.sharded_over = ShardedOver()
        self._places: list[Place] = []  # as in the plan
        self._dtensors: list[tuple[int, Tensor, str]] = []  # row, parameter, name in errors
        for group_index, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                name = f"{kind}: param of group {group_index}, param {index}"
                if not isinstance(param, Tensor):
                    raise TypeError(f"{name} must be a tensor, got {type(param).__name__}")
                if is_dtensor(param):
                    partition = self.sharded_over.add(param, name)
                    row = self._compiled.add_sharded_param(group_index, index, param, partition)
                    self._compiled.set_first_element(row, first_element(param))
                    self._dtensors.append((row, param, name))
                else:
                    self._compiled.add_param(group_index, index, param)
                self._places.append(Place(kept[group_index], param, group_index, index))
        #: The first parameter of all, None if there is none. Its device may change.
        self.first_param = self._places[0].param if self._places else None
        if rounded_params is not None:
            self._compiled.set_rounded_params(rounded_params)
        if scaled_grads is not None:
            self._compiled.set_scaled_grads(scaled_grads)
        self._deciding_options = deciding_options
        self._states = ops.KeptStates()
        self._state_keys: set[str] = set()
        # Of parameters with states in codes, whether they were contiguous, and so may have blocks.
        self._were_contiguous: dict[int, tuple[Tensor, bool]] = {}

    def take_params(
        self,
        states: dict[Any, Any],
        groups: Sequence[dict[str, Any]],
        deciding_options: list[tuple[Any, ...]],
    ) -> bool:
        """Takes the parameters, if an optimizer still has these and their states.

        Args:
            states: Of the optimizer.
            groups: Likewise.
            deciding_options: For each group what decides what it keeps.
        """
        return (
            self._states.are_in(states)
            and self._deciding_options == deciding_options
            and all(param.is_contiguous() == was for param, was in self._were_contiguous.values())
            and self._compiled.take_params([group["params"] for group in groups])
        )

    def rounded_params(self) -> Any:
        """Returns what the next plan needs to know of the parameters: which masters are theirs."""
        return self._compiled.rounded_params()

    def scaled_grads(self) -> Any:
        """Returns what it needs to know of gradients: which ones carry the scale of a step."""
        return self._compiled.scaled_grads()

    def let_go(self) -> None:
        """Drops what refers to parameters and gradients."""
        self._compiled.let_go()

    def with_shards(self) -> Any:
        """Takes the part that this rank has of every DTensor; returns the compiled plan."""
        for row, param, name in self._dtensors:
            self._compiled.set_shard(row, local_tensor(param), local_grad(param, name))
        return self._compiled

    # What the compiled plan asks for within a step.

    def make_states(self, states: dict[Any, Any], indices: list[int]) -> tuple[States, list[Local]]:
        """Makes the states of parameters whole, and keeps none yet.

        Args:
            states: Of the optimizer.
            indices: Of the parameters in the plan.

        Returns:
            As :func:`~amp_ext.optim.state_store.made_states`.
        """
        places = [self._places[index] for index in indices]
        made, local = made_states(states, places)
        for index, place, (_, _, parts) in zip(indices, places, local, strict=True):
            if place.kept.state_dtype in CODED_STATES:
                self._were_contiguous[index] = (place.param, place.param.is_contiguous())
            self._state_keys.update(parts)
        return made, local

    def keep_states(self, states: dict[Any, Any], made: dict[Any, Any]) -> None:
        """Puts states into those of the optimizer, at once, and remembers what a step works on.

        Args:
            states: Of the optimizer.
            made: Those to put there.
        """
        states.update(made)
        self._states.keep(states, self._state_keys)
