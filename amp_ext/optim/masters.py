"""Masters of 16-bit parameters: beside them in float32, or split, with the parameter on top.

A split master has its lower part in the state, under a key that names its format: what a file or a
conversion of the model brings is read as what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.sharding import laid_out_as, local_tensor

__all__ = [
    "MASTER_KEYS",
    "key_of_master",
    "loaded_master",
    "made_master",
    "read_lower_part",
    "whole_master",
]

_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Of each lower part the bits, and the dtype of the parameters that it is of.
_LOWER_PARTS = {
    f"{name}_{short}": (bits, dtype)
    for name, bits in (("master_low", 16), ("master_low8", 8))
    for dtype, short in _FORMATS.items()
}

#: All keys under which a state may have a master.
MASTER_KEYS = ("master_param", *_LOWER_PARTS)


def key_of_master(master_weights: Any, dtype: torch.dtype) -> str | None:
    """Returns the key of the master that a group's option wants for parameters of a dtype.

    Args:
        master_weights: The option: a flag, "split" or "split8".
        dtype: Of the parameter.
    """
    if dtype not in _FORMATS or not master_weights:
        return None
    if master_weights in ("split", "split8"):
        name = "master_low" if master_weights == "split" else "master_low8"
        return f"{name}_{_FORMATS[dtype]}"
    return "master_param"


def _decoded_master(param: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """Returns the float32 master in a state, whatever its form, or None.

    None also for lower parts of float16 parameters that have become something else: their upper
    parts are gone.

    Args:
        param: The parameter, maybe converted since; a DTensor gives this rank's part.
        state: Of the parameter.
    """
    master = state.get("master_param")
    if master is not None:
        return local_tensor(master)
    upper = local_tensor(param.detach())
    for key, (_, dtype) in _LOWER_PARTS.items():
        low = state.get(key)
        # Every bfloat16 that a float16 can hold comes back from it.
        if low is not None and (dtype == upper.dtype or dtype == torch.bfloat16):
            return ops.join_master(upper.to(dtype), local_tensor(low).to(upper.device))
    return None


def made_master(param: Tensor, state: Mapping[str, Any], key: str) -> Tensor:
    """Returns a new master under a key: of that which a state has in any form, or of the parameter.

    Args:
        param: The parameter.
        state: Of the parameter.
        key: The key that is wanted.
    """
    decoded = _decoded_master(param, state)
    if key != "master_param":
        return _lower_part(param, decoded, key)
    if decoded is not None:
        upper = local_tensor(param.detach())
        # What is split rounds a tie away from zero. The next number rounds to its parameter.
        nearest = torch.nextafter(decoded, upper.float())
        decoded = torch.where(decoded.to(upper.dtype) == upper, decoded, nearest)
    return _in_float32(param, decoded)


def whole_master(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns the float32 master of a parameter: that which is kept, or one made of its parts.

    Args:
        param: The parameter, which stands for itself without a master.
        state: Of the parameter.
    """
    if not any(key in state for key in _LOWER_PARTS):
        kept: Tensor = state.get("master_param", param)
        return kept.detach()
    return _in_float32(param, _decoded_master(param, state))


def loaded_master(param: Tensor, masters: Mapping[str, Any], key: str) -> Tensor:
    """Returns the master that a parameter gets of those in a file: the same bytes, if it has them.

    A file with a float32 master beside a lower part was written by somebody who knows the former
    only: it is the newer one.

    Args:
        param: The parameter, which has been loaded.
        masters: Those of the file by their keys, laid out as the parameter is.
        key: The key that is wanted.
    """
    if key in masters and (key == "master_param" or "master_param" not in masters):
        return masters[key]
    return made_master(param, masters, key)


def read_lower_part(key: str, low: Any, param: Tensor, where: str) -> Tensor | None:
    """Returns a copy of what a file has under the key of a lower part, laid out as the parameter.

    None if torch's optimizers have cast it to the parameter's dtype and gone on without it.

    Raises:
        ValueError: If it is not of the dtype and the shape that the key says.
    """
    bits, _ = _LOWER_PARTS[key]
    dtype = torch.uint8 if bits == 16 else torch.int8
    shape = (*param.shape, 2) if bits == 16 else tuple(param.shape)
    if not isinstance(low, Tensor):
        raise ValueError(f"{where} must be a tensor, got {type(low).__name__}")
    if low.is_floating_point():
        return None
    if low.dtype != dtype or tuple(low.shape) != shape:
        raise ValueError(
            f"{where} must be {dtype} of shape {shape}, got {low.dtype} of {tuple(low.shape)}"
        )
    if low.layout != torch.strided or low.is_meta:
        raise ValueError(f"{where} must be dense and hold its elements, got {low.layout}")
    upper = local_tensor(param.detach())
    empty = torch.empty_like(upper, dtype=torch.int16 if bits == 16 else torch.int8)
    if bits == 16:
        empty = empty.unsqueeze(-1).view(torch.uint8)
    return _laid_out(param, empty).copy_(low)


def _in_float32(param: Tensor, values: Tensor | None) -> Tensor:
    """Returns a float32 copy of a parameter, or of other values for this rank's part of it."""
    copy = param.detach().to(torch.float32, copy=True)
    if values is not None:
        local_tensor(copy).copy_(values)
    return copy


def _lower_part(param: Tensor, master: Tensor | None, key: str) -> Tensor:
    """Returns the lower part for a parameter, laid out over the ranks as the parameter is.

    Args:
        param: The parameter, in the dtype that the key names.
        master: float32, of this rank's part, or None: the parameter itself.
        key: The key of the lower part.
    """
    bits, _ = _LOWER_PARTS[key]
    upper = local_tensor(param.detach())
    low = ops.split_master(upper, upper.float() if master is None else master, bits)
    return _laid_out(param, low)


def _laid_out(param: Tensor, low: Tensor) -> Tensor:
    """Returns a lower part of this rank as one that is laid out over the ranks as its parameter."""
    if low.dtype != torch.uint8:
        return laid_out_as(param, low)
    shape, strides = param.shape, param.stride()
    return laid_out_as(param, low, (*shape, 2), (*(2 * stride for stride in strides), 1))
