"""The states of parameters made whole: what they lack is made, what does not fit is converted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.kept import Kept
from amp_ext.optim.masters import made_master
from amp_ext.optim.moments import made_moments

__all__ = ["Place", "make_states"]


class Place(NamedTuple):
    """A parameter, what it keeps, and where it is listed."""

    kept: Kept
    param: Tensor
    group_index: int
    index_in_group: int

    def __str__(self) -> str:
        """Returns where it is listed, as errors say it."""
        return f"group {self.group_index}, param {self.index_in_group}"


@outside_inference_mode()
def make_states(states: dict[Any, Any], places: Iterable[Place]) -> bool:
    """Makes the states of parameters whole: all of them, or none if one can't be made.

    Args:
        states: Of the optimizer.
        places: The parameters.

    Returns:
        Whether something had to be made.

    Raises:
        TypeError: If a part of a state is no tensor.
        ValueError: If a part of a state is missing.
    """
    made = {}
    for place in places:
        before = states.get(place.param, {})
        state = _whole_state(place, before)
        is_whole = isinstance(before, dict) and state.keys() == before.keys()
        if not is_whole or any(state[key] is not before[key] for key in state):
            made[place.param] = state
    states.update(made)  # at once
    return bool(made)


def _whole_state(place: Place, before: Any) -> dict[str, Any]:
    """Returns the state of a parameter as the options want it, its dtype and device being so.

    What the state lacks is made, and what the parameter was converted under, as by
    ``model.double()``, is converted; nothing is written.
    """
    kept, param = place.kept, place.param
    state: dict[str, Any] = dict(before)
    names = list(kept.roles)
    moments = [key for key in state if ops.is_key_of_moment(key, names)]
    own = [*moments, "step"] if kept.keeps_step else moments
    if any(state.get(name) is not None for name in own):
        _check_nothing_is_missing(place, state)
    # Also buffers that the group keeps only with other options, to which a loop may change.
    formats = [
        form
        for form in kept.formats(param)
        if form.name in kept.names or ops.has_moment(state, form.name)
    ]
    wanted = {}
    if kept.keeps_step:
        wanted["step"] = torch.float32
        steps = kept.steps_behind(state)
        if steps is not None:
            state["step"] = torch.full((), steps, dtype=torch.float32, device=param.device)
    key = kept.master_key(param)
    if key == "master_param":
        wanted["master_param"] = torch.float32
    for name in (*moments, *wanted, *ops.MASTER_KEYS):
        if state.get(name) is not None and not isinstance(state[name], Tensor):
            raise TypeError(f"{kept.kind}: {name} of {place} must be a tensor, got {state[name]!r}")
    if key is not None and state.get(key) is None:
        state[key] = made_master(param, state, key)
    elif key is not None and state[key].device != param.device:
        state[key] = state[key].to(param.device)
    for other in ops.MASTER_KEYS:
        if other != key:
            state.pop(other, None)
    for name, dtype in wanted.items():
        if state[name].dtype != dtype or state[name].device != param.device:
            state[name] = state[name].to(param.device, dtype)
    made = made_moments(state, formats, param)
    for name in moments:
        if name not in made:
            del state[name]
    return state | made


def _check_nothing_is_missing(place: Place, state: dict[str, Any]) -> None:
    """Refuses what is left of a state: new moments beside a late counter belong to no step.

    AMSGrad's maximum may be missing, as it does where a loop switches AMSGrad on.
    """
    for name in place.kept.missing_from(state):
        if place.kept.roles.get(name) != "maximum":
            raise ValueError(
                f"{place.kept.kind}: {name} of {place} must be there, got {list(state)}"
            )
