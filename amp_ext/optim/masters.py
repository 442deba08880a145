"""Masters of 16-bit parameters, laid out over the ranks as their parameters are.

Each rank makes its part of them as the compiled module does: in float32, or split, with the lower
part in the state, under a key that names its format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.sharding import laid_out_as, local_tensor

__all__ = ["loaded_master", "made_master", "read_lower_part", "whole_master"]


def made_master(param: Tensor, state: Mapping[str, Any], key: str) -> Tensor:
    """Returns a new master under a key: of that which a state has in any form, or of the parameter.

    Args:
        param: The parameter, maybe converted since.
        state: Of the parameter.
        key: The key that is wanted.
    """
    return _of_parts(ops.made_master, param, state, key)


def whole_master(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns the float32 master of a parameter: that which is kept, or one made of its parts.

    Args:
        param: The parameter, which stands for itself without a master.
        state: Of the parameter.
    """
    return _of_parts(ops.whole_master, param, state).detach()


def loaded_master(param: Tensor, masters: Mapping[str, Any], key: str) -> Tensor:
    """Returns the master that a parameter gets of those in a file: the same bytes, if it has them.

    Args:
        param: The parameter, which has been loaded.
        masters: Those of the file by their keys, laid out as the parameter is.
        key: The key that is wanted.
    """
    return _of_parts(ops.loaded_master, param, masters, key)


def read_lower_part(key: str, low: Any, param: Tensor, where: str) -> Tensor | None:
    """Returns a copy of what a file has under the key of a lower part, laid out as the parameter.

    None if torch's optimizers have cast it to the parameter's dtype and gone on without it.

    Raises:
        ValueError: If it is not of the dtype and the shape that the key says.
    """
    if not isinstance(low, Tensor):
        raise ValueError(f"{where} must be a tensor, got {type(low).__name__}")
    if not ops.is_lower_part(key, low, param, where):
        return None
    return _laid_out(param, ops.empty_lower_part(key, local_tensor(param.detach()))).copy_(low)


def _of_parts(
    function: Callable[..., Tensor], param: Tensor, state: Mapping[str, Any], *key: str
) -> Tensor:
    """Returns what a function makes of this rank's parts, or the whole of that which it takes."""
    part = local_tensor(param.detach())
    masters = {name: state[name] for name in ops.MASTER_KEYS if state.get(name) is not None}
    parts = {name: local_tensor(master) for name, master in masters.items()}
    made = function(part, parts, *key)
    if made is part:
        return param
    kept = [masters[name] for name in masters if made is parts[name]]
    return kept[0] if kept else _laid_out(param, made)


def _laid_out(param: Tensor, master: Tensor) -> Tensor:
    """Returns this rank's part of a master as one that is laid out over the ranks."""
    if master.dtype != torch.uint8:
        return laid_out_as(param, master)
    shape, strides = param.shape, param.stride()  # and two bytes of each lower part
    return laid_out_as(param, master, (*shape, 2), (*(2 * stride for stride in strides), 1))
