"""State dicts in float32, for programs that do not know the formats of small states."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.masters import MASTER_KEYS, whole_master
from amp_ext.optim.moments import is_key_of, whole_moments

__all__ = ["float32_state_dict"]


@outside_inference_mode()
def float32_state_dict(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Returns the state dict of an optimizer with all its masters and moments as float32 numbers.

    It loads into torch's optimizer of the same name and into ours with any options, where what is
    narrow again is rounded to nearest. float64 states stay as they are. ``state_dict()`` has the
    small states themselves, and is what to resume from. The weights in float32 are in
    ``optimizer.master_params()``.

    Args:
        optimizer: One of :mod:`amp_ext.optim`.

    Returns:
        ``state`` and ``param_groups``, whose ``state_dtype`` is "float32" and whose
        ``master_weights`` are True where there are masters. All tensors are copies, since torch's
        ``load_state_dict`` makes none; DTensors stay DTensors.

    Raises:
        TypeError: If it is another optimizer.

    Example:
        >>> reference = torch.optim.AdamW(model.parameters())
        >>> reference.load_state_dict(amp_ext.optim.float32_state_dict(optimizer))
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            "float32_state_dict: optimizer must be one of amp_ext.optim, got "
            f"{type(optimizer).__name__}"
        )
    optimizer._check_params("state_dict")
    optimizer._check_groups()
    state_dict: dict[str, Any] = optimizer.state_dict()
    buffers = optimizer._description().buffers
    params: dict[Any, Tensor] = {}
    groups = []
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        params.update(zip(saved["params"], group["params"], strict=True))
        has_masters = bool(saved["master_weights"])
        groups.append({**saved, "state_dtype": "float32", "master_weights": has_masters})
    states = {
        key: _in_float32(state, buffers, params[key]) if key in params else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states, "param_groups": groups}


def _in_float32(
    state: dict[str, Any], buffers: tuple[tuple[str, str], ...], param: Tensor
) -> dict[str, Any]:
    """Returns a state with float32 numbers under the keys of torch."""
    names = [name for name, _ in buffers]
    found = {
        key: copy.deepcopy(value)
        for key, value in state.items()
        if key not in MASTER_KEYS and not is_key_of(key, names)
    }
    for name, moment in whole_moments(state, buffers, param).items():
        dtype = torch.float64 if moment.dtype == torch.float64 else torch.float32
        found[name] = moment.to(dtype, copy=True)
    if any(state.get(key) is not None for key in MASTER_KEYS):
        found["master_param"] = whole_master(param, state).clone()
    return found
