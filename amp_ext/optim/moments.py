"""Moments as an optimizer keeps them: in a dtype, or in codes of 8 bits.

A code stands under a key of its own, which names its format: "exp_avg_q8h" is a first moment as the
ratio to the root of the second, "exp_avg_sq_q8s" the root of a second moment and
"momentum_buffer_q8m" a momentum, both in groups of 32 elements with an exponent each, under
"exp_avg_sq_exp". So who knows the names of torch alone does not take codes for moments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.sharding import is_dtensor, is_over_rows, laid_out_as, local_tensor

__all__ = [
    "CODED_STATES",
    "GROUP",
    "Format",
    "copied_moments",
    "formats_of",
    "has_groups",
    "has_moment",
    "is_key_of",
    "made_moments",
    "whole_moments",
]

#: The options of ``state_dtype`` that name no dtype.
CODED_STATES = ("8bit-bf16", "8bit")

#: How many elements of a row have an exponent together.
GROUP = 32
# Of smaller tensors groups save nothing that counts.
_LEAST_ELEMENTS = 4096

# Of each code the dtype of its elements.
_CODES = {"q8h": torch.int8, "q8s": torch.uint8, "q8m": torch.uint8}


@dataclasses.dataclass(frozen=True)
class Format:
    """How one moment is kept.

    Attributes:
        name: Its key in torch.
        dtype: Of its elements.
        code: What these are, "q8h", "q8s" or "q8m"; None: numbers.
    """

    name: str
    dtype: torch.dtype
    code: str | None = None

    @property
    def key(self) -> str:
        """The key of the elements."""
        return self.name if self.code is None else f"{self.name}_{self.code}"

    @property
    def exponents_key(self) -> str | None:
        """The key of the exponents of groups; None where there are none."""
        return f"{self.name}_exp" if self.code in ("q8s", "q8m") else None

    @property
    def keys(self) -> tuple[str, ...]:
        """All its keys."""
        return (self.key,) if self.exponents_key is None else (self.key, self.exponents_key)

    def shape_of(self, key: str, param: Tensor) -> tuple[int, ...]:
        """Returns the shape of what stands under one of the keys."""
        shape = tuple(param.shape)
        if key != self.exponents_key:
            return shape
        return (*shape[:1], math.prod(shape[1:]) // GROUP)  # of a scalar, too, which has no rows

    def dtype_of(self, key: str) -> torch.dtype:
        """Returns the dtype of what stands under one of the keys."""
        return torch.uint8 if key == self.exponents_key else self.dtype


def formats_of(
    state_dtype: str | None, buffers: Iterable[tuple[str, str]], param: Tensor
) -> tuple[Format, ...]:
    """Returns how the moments of a parameter are kept.

    By the shape of the whole parameter, never by that of a rank's part: every rank has the same.

    Args:
        state_dtype: The option of the group, as it is stored.
        buffers: Name and role of each moment, as the compiled module describes them.
        param: The parameter.
    """
    buffers = tuple(buffers)
    if param.dtype == torch.float64 or state_dtype is None:
        return tuple(Format(name, param.dtype) for name, _ in buffers)
    if state_dtype not in CODED_STATES:
        dtype = torch.float32 if state_dtype == "float32" else torch.bfloat16
        return tuple(Format(name, dtype) for name, _ in buffers)
    has_second = any(role == "second moment" for _, role in buffers)

    def code(role: str) -> str | None:
        if role == "first moment" and has_second:
            return "q8h"
        if not has_groups(param):
            return None
        if role == "first moment":
            return "q8m"
        return "q8s" if role == "second moment" and state_dtype == "8bit" else None

    found = []
    for name, role in buffers:
        name_of_code = code(role)
        found.append(Format(name, _CODES.get(name_of_code or "", torch.bfloat16), name_of_code))
    return tuple(found)


def has_groups(param: Tensor) -> bool:
    """Returns whether moments of a parameter may be kept in groups of 32 elements.

    They lie within the rows of dimension 0, so that a part of it has whole ones: it must be the
    only one that is sharded. And the parameter must be contiguous: its groups are those of memory,
    and codes that another layout, or a file that knows no strides, puts in another order would be
    measured by the exponents of others.
    """
    shape = tuple(param.shape)
    if param.numel() < _LEAST_ELEMENTS or len(shape) < 2 or math.prod(shape[1:]) % GROUP:
        return False
    return param.is_contiguous() and _has_rows(param)


def _has_rows(param: Tensor) -> bool:
    """Returns whether every rank has whole rows of a parameter, or all of it."""
    return not is_dtensor(param) or is_over_rows(param)


def _all_formats(name: str) -> tuple[Format, ...]:
    return (
        Format(name, torch.float32),
        *(Format(name, dtype, code) for code, dtype in _CODES.items()),
    )


def has_moment(state: Mapping[str, Any], name: str) -> bool:
    """Returns whether a state has a moment in any format."""
    return any(all(state.get(key) is not None for key in form.keys) for form in _all_formats(name))


def is_key_of(key: str, names: Iterable[str]) -> bool:
    """Returns whether a key is one of those of moments with these names."""
    return any(key in form.keys for name in names for form in _all_formats(name))


def whole_moments(
    state: Mapping[str, Any], buffers: Iterable[tuple[str, str]], param: Tensor
) -> dict[str, Tensor]:
    """Returns the moments of a state as numbers, float32 where they are codes.

    Args:
        state: Of a parameter.
        buffers: Name and role of each moment.
        param: The parameter, as which decoded ones are laid out.
    """
    buffers = tuple(buffers)
    local = {name: _local_moment(state, name) for name, role in buffers if role != "first moment"}
    second = next((local[name] for name, role in buffers if role == "second moment"), None)
    for name, role in buffers:
        if role == "first moment":
            local[name] = _local_moment(state, name, second)
    whole = {}
    for name, moment in local.items():
        if moment is not None:
            given = state.get(name)
            whole[name] = given if given is not None else laid_out_as(param, moment)
    return {name: whole[name] for name, _ in buffers if name in whole}


def _local_moment(
    state: Mapping[str, Any], name: str, second: Tensor | None = None
) -> Tensor | None:
    """Returns this rank's part of a moment as numbers, or None."""
    for form in _all_formats(name):
        tensors = [state.get(key) for key in form.keys]
        if any(tensor is None for tensor in tensors):
            continue
        local = [local_tensor(tensor) for tensor in tensors]
        if form.code is None:
            return local[0]
        if form.code != "q8h":
            return ops.decode_groups(local[0], local[1], form.code)
        if second is not None:
            return ops.decode_ratios(local[0], second.to(local[0].device, torch.float32))
    return None


def made_moments(
    state: Mapping[str, Any], formats: Iterable[Format], param: Tensor, roles: Mapping[str, str]
) -> dict[str, Tensor]:
    """Returns the moments of a parameter in these formats: those of a state, or zeros.

    What the state has in the format that is wanted is taken as it is.

    Args:
        state: Of the parameter, in any formats, maybe with some moments or none.
        formats: Of all moments that are wanted.
        param: The parameter, whose device and layout they get.
        roles: Of all moments by name.
    """
    formats = tuple(formats)
    if all(_is_kept(state, form, param) for form in formats):
        return {key: state[key] for form in formats for key in form.keys}
    numbers = whole_moments(state, roles.items(), param)
    made: dict[str, Tensor] = {}
    second = None
    # A ratio is to the second moment as it is stored.
    for form in sorted(formats, key=lambda form: form.code == "q8h"):
        made |= _encoded(numbers.get(form.name), form, param, second)
        if roles[form.name] == "second moment":
            second = _local_moment(made, form.name)
    return {key: made[key] for form in formats for key in form.keys}


def _is_kept(state: Mapping[str, Any], form: Format, param: Tensor) -> bool:
    """Returns whether a state has a moment in a format on the device of its parameter."""
    return all(
        isinstance(state.get(key), Tensor)
        and state[key].dtype == form.dtype_of(key)
        and state[key].device == param.device
        for key in form.keys
    )


def _encoded(
    number: Tensor | None, form: Format, param: Tensor, second: Tensor | None
) -> dict[str, Tensor]:
    """Returns a moment in a format, by its keys; without a number, one of zeros."""
    if form.code is None:
        if number is None:
            return {form.key: torch.zeros_like(param, dtype=form.dtype)}
        moved = number.to(param.device, form.dtype)
        if moved.stride() != param.stride():
            moved = torch.empty_like(param, dtype=form.dtype).copy_(moved)
        return {form.key: moved}
    local = local_tensor(param.detach())
    if number is None:
        return _zeros(form, param, local)
    moment = torch.empty_like(local, dtype=torch.float32).copy_(local_tensor(number))
    if form.code == "q8h":
        assert second is not None
        return {form.key: laid_out_as(param, ops.encode_ratios(moment, second.float()))}
    codes, exponents = ops.encode_groups(moment, form.code)
    return _laid_out(form, param, codes, exponents)


# The exponent of a group of zeros.
_OF_ZEROS = 1


def _zeros(form: Format, param: Tensor, local: Tensor) -> dict[str, Tensor]:
    """Returns the codes of zeros, made where the parameter is."""
    codes = torch.zeros_like(local, dtype=form.dtype)
    if form.exponents_key is None:
        return {form.key: laid_out_as(param, codes)}
    groups = form.shape_of(form.exponents_key, param)[1]
    exponents = codes.new_full((local.shape[0], groups), _OF_ZEROS)
    return _laid_out(form, param, codes, exponents)


def _laid_out(form: Format, param: Tensor, codes: Tensor, exponents: Tensor) -> dict[str, Tensor]:
    """Returns what this rank has of groups as its parameter is laid out over the ranks."""
    key = str(form.exponents_key)
    shape = form.shape_of(key, param)
    return {
        form.key: laid_out_as(param, codes),
        key: laid_out_as(param, exponents, shape, (shape[1], 1)),
    }


def copied_moments(
    saved: Mapping[str, Any], formats: Iterable[Format], param: Tensor, where: str
) -> dict[str, Tensor]:
    """Returns copies of the moments that a file has in codes, laid out as the parameter is.

    They are codes as in the file, or numbers where a rank has no whole groups of its part.

    Args:
        saved: The state of the parameter in a file.
        formats: Of all moments; by their names.
        param: The parameter.
        where: What messages say, with ``%s`` for the key.

    Raises:
        ValueError: If one is not of the dtype and the shape that the key says, or lacks exponents.
    """
    copies: dict[str, Tensor] = {}
    for form in formats:
        for kept in _all_formats(form.name)[1:]:
            given = {key: saved[key] for key in kept.keys if saved.get(key) is not None}
            if kept.key not in given:
                continue
            for key in kept.keys:
                if key not in given:
                    raise ValueError(f"{where % key} must be there, got {list(saved)}")
                _check_code(given[key], kept, key, param, where % key)
            if kept.exponents_key is None or _has_rows(param):
                copies |= {key: _copy_of(given[key], kept, key, param) for key in kept.keys}
            else:  # the parts of the ranks cut groups
                copies[kept.name] = _decoded_whole(kept, given, param)
    return copies


def _check_code(value: Any, form: Format, key: str, param: Tensor, where: str) -> None:
    dtype, shape = form.dtype_of(key), form.shape_of(key, param)
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} must be a tensor, got {type(value).__name__}")
    if value.dtype != dtype or tuple(value.shape) != shape:
        raise ValueError(
            f"{where} must be {dtype} of shape {shape}, got {value.dtype} of {tuple(value.shape)}"
        )
    if value.layout != torch.strided or value.is_meta:
        raise ValueError(f"{where} must be dense and hold its elements, got {value.layout}")


def _decoded_whole(form: Format, given: Mapping[str, Any], param: Any) -> Tensor:
    """Returns a moment in groups as numbers, over ranks that have other parts than rows."""
    from torch.distributed.tensor import Replicate

    local = local_tensor(param.detach())
    codes, exponents = (
        (value.full_tensor() if is_dtensor(value) else value).to(local.device)
        for value in (given[key] for key in form.keys)
    )
    whole = ops.decode_groups(codes.contiguous(), exponents, str(form.code))
    everywhere = [Replicate()] * len(param.placements)
    numbers = type(param.data).from_local(whole, param.device_mesh, everywhere, run_check=False)
    return laid_out_as(param, torch.empty_like(local, dtype=torch.float32)).copy_(numbers)


def _copy_of(value: Tensor, form: Format, key: str, param: Tensor) -> Tensor:
    dtype, shape = form.dtype_of(key), form.shape_of(key, param)
    local = local_tensor(param.detach())
    if key == form.exponents_key:
        empty = local.new_empty((*local.shape[:1], shape[-1]), dtype=dtype)
        return laid_out_as(param, empty, shape, (shape[-1], 1)).copy_(value)
    # Contiguous, as groups are, also for a parameter that has none any more.
    layout = torch.contiguous_format if form.exponents_key else torch.preserve_format
    empty = torch.empty_like(local, dtype=dtype, memory_format=layout)
    return laid_out_as(param, empty).copy_(value)
