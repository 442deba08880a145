"""Moments as an optimizer keeps them, laid out over the ranks as their parameters are.

Each rank keeps its part of them as the compiled module does: in a dtype, or in codes of 8 bits.

A code stands under a key of its own, which names its format: "exp_avg_q8h" is a first moment as the
ratio to the root of the second, "exp_avg_sq_q8s" the root of a second moment and
"momentum_buffer_q8m" a momentum, both in blocks of 32 elements with an exponent each, under
"exp_avg_sq_exp". So who knows the names of torch alone does not take codes for moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.sharding import is_dtensor, is_over_rows, laid_out_as, local_tensor

__all__ = [
    "BLOCK",
    "CODED_STATES",
    "copied_moments",
    "formats_of",
    "has_blocks",
    "made_moments",
    "whole_moments",
]

#: The options of ``state_dtype`` that name no dtype.
CODED_STATES = ("8bit-bf16", "8bit")

#: How many elements of a row have an exponent together, known without the compiled module.
BLOCK = 32


def formats_of(
    state_dtype: str | None, buffers: Sequence[tuple[str, str]], param: Tensor
) -> list[ops.MomentFormat]:
    """Returns how the moments of a parameter are kept, which is the same on every rank.

    Args:
        state_dtype: The option of the group, as it is stored.
        buffers: Name and role of each moment, as the compiled module describes them.
        param: The parameter.
    """
    return ops.formats_of(state_dtype, buffers, param, _has_whole_rows(param))


def has_blocks(param: Tensor) -> bool:
    """Returns whether moments of a parameter may be kept in blocks of 32 elements."""
    return ops.has_blocks(param, _has_whole_rows(param))


def _has_whole_rows(param: Tensor) -> bool:
    """Returns whether every rank has whole rows of a parameter, or all of it."""
    return not is_dtensor(param) or is_over_rows(param)


def whole_moments(
    state: Mapping[str, Any], buffers: Sequence[tuple[str, str]], param: Tensor
) -> dict[str, Tensor]:
    """Returns the moments of a state as numbers, float32 where they are codes.

    Args:
        state: Of a parameter.
        buffers: Name and role of each moment.
        param: The parameter, as which decoded ones are laid out.
    """
    names = [name for name, _ in buffers]
    numbers = ops.whole_moments(_parts_of(state, names), buffers)
    return {
        name: laid_out_as(param, numbers[name]) if state.get(name) is None else state[name]
        for name in names
        if name in numbers
    }


def _parts_of(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Returns this rank's parts of the moments with these names, by their keys."""
    return {
        key: local_tensor(value)
        for key, value in state.items()
        if value is not None and ops.is_key_of_moment(key, names)
    }


def made_moments(
    state: Mapping[str, Any], formats: Sequence[ops.MomentFormat], param: Tensor
) -> dict[str, Tensor]:
    """Returns the moments of a parameter in these formats: those of a state, or zeros.

    What the state has in the format that is wanted is taken as it is.

    Args:
        state: Of the parameter, in any formats, maybe with some moments or none.
        formats: Of all moments that are wanted.
        param: The parameter, whose device and layout they get.
    """
    parts = _parts_of(state, [form.name for form in formats])
    made = ops.made_moments(parts, formats, local_tensor(param.detach()))
    return {
        key: state[key] if made[key] is parts.get(key) else _laid_out(form, key, param, made[key])
        for form in formats
        for key in form.keys
    }


def _laid_out(form: ops.MomentFormat, key: str, param: Tensor, part: Tensor) -> Tensor:
    """Returns this rank's part of what stands under a key as one that is laid out over the ranks.

    Exponents are so over the rows of their parameter.
    """
    if key != form.exponents_key:
        return laid_out_as(param, part)
    blocks = part.shape[-1]
    return laid_out_as(param, part, (*param.shape[:1], blocks), (blocks, 1))


def copied_moments(
    saved: Mapping[str, Any], names: Iterable[str], param: Tensor, where: str
) -> dict[str, Tensor]:
    """Returns copies of the moments that a file has in codes, laid out as the parameter is.

    They are codes as in the file, or numbers where a rank has no whole blocks of its part.

    Args:
        saved: The state of the parameter in a file.
        names: Of the moments.
        param: The parameter.
        where: What messages say, with ``%s`` for the key.

    Raises:
        ValueError: If one is not of the dtype and the shape that the key says, or lacks exponents.
    """
    copies: dict[str, Tensor] = {}
    local = local_tensor(param.detach())
    for form in (form for name in names for form in ops.saved_codes(saved, name)):
        for key in form.keys:
            value = saved.get(key)
            if value is None:
                raise ValueError(f"{where % key} must be there, got {list(saved)}")
            if not isinstance(value, Tensor):
                raise ValueError(f"{where % key} must be a tensor, got {type(value).__name__}")
            ops.check_code(value, form, key, param, where % key)
        if form.exponents_key is None or _has_whole_rows(param):
            for key in form.keys:
                empty = _laid_out(form, key, param, ops.empty_code(form, key, local))
                copies[key] = empty.copy_(saved[key])
        else:  # the parts of the ranks cut blocks
            copies[form.name] = _decoded_whole(form, saved, param)
    return copies


def _decoded_whole(form: ops.MomentFormat, saved: Mapping[str, Any], param: Any) -> Tensor:
    """Returns a moment in blocks as numbers, over ranks that have other parts than rows."""
    from torch.distributed.tensor import Replicate

    local = local_tensor(param.detach())
    codes, exponents = (
        (value.full_tensor() if is_dtensor(value) else value).to(local.device)
        for value in (saved[key] for key in form.keys)
    )
    whole = ops.decode_groups(codes.contiguous(), exponents, str(form.code))
    everywhere = [Replicate()] * len(param.placements)
    numbers = type(param.data).from_local(whole, param.device_mesh, everywhere, run_check=False)
    return laid_out_as(param, torch.empty_like(local, dtype=torch.float32)).copy_(numbers)
