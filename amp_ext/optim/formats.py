"""The number formats of states: masters and moments, and the conversions between them.

A float32 master has the key "master_param". Other formats have other keys, so that code that knows
only torch's keys can't mistake quantized values for moments:

* "master_low_bf16": residual of a split master; "low8" stands for residuals of 8 bits. The key
  names the dtype of the parameter, so that the master can be restored after the parameter was
  converted.
* "exp_avg_q8h": a first moment in 8 bits, as a ratio to the root of the second moment.
* "exp_avg_sq_q8s", "momentum_buffer_q8m": the root of a second moment, or a momentum, quantized in
  blocks of 32 elements. The exponents of the blocks have keys such as "exp_avg_sq_exp".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.optim.options import CODED_STATES

FP32_MASTER = "master_param"
# Maps the key of a residual to its bits and the dtype of the parameter.
_RESIDUALS = {
    "master_low_bf16": (16, torch.bfloat16),
    "master_low_fp16": (16, torch.float16),
    "master_low8_bf16": (8, torch.bfloat16),
    "master_low8_fp16": (8, torch.float16),
}
#: The keys of masters in all formats.
MASTER_KEYS = (FP32_MASTER, *_RESIDUALS)
#: Maps the dtype of a parameter to the keys of its residuals.
RESIDUAL_KEYS = {
    wanted: tuple(key for key, (_, dtype) in _RESIDUALS.items() if dtype == wanted)
    for wanted in (torch.float16, torch.bfloat16)
}
_BITS = {"split": 16, "split8": 8}
_BLOCK = 32  # elements with one exponent
_LEAST_ELEMENTS = 4096  # number of elements of a moment in blocks; fewer would save little memory

Tensors = dict[str, Tensor]


def is_16_bit(dtype: torch.dtype) -> bool:
    """Returns True for the dtypes of parameters that have masters."""
    return dtype in RESIDUAL_KEYS


# Masters.


def key_of_master(master_weights: bool | str, dtype: torch.dtype) -> str:
    """Returns the key of the master of parameters with a dtype; "" if they have none."""
    if not master_weights or not is_16_bit(dtype):
        return ""
    wanted = _BITS.get(str(master_weights)), dtype
    return next((key for key, part in _RESIDUALS.items() if part == wanted), FP32_MASTER)


def _decoded_master(param: Tensor, masters: Mapping[str, Tensor]) -> Tensor | None:
    """Returns a master in float32, joined if it is split.

    Returns None if there is none, or if converting a float16 parameter has lost the upper part of a
    split master. A bfloat16 parameter that was converted to another dtype can be converted back.
    """
    if FP32_MASTER in masters:
        return masters[FP32_MASTER]
    for key, (_, dtype) in _RESIDUALS.items():
        if key in masters and dtype in (param.dtype, torch.bfloat16):
            return ops.join_fp32(param.detach().to(dtype), masters[key].to(param.device))
    return None


def _in_float32(param: Tensor, values: Tensor | None) -> Tensor:
    """Returns values, or the parameter if they are None, as float32 in the parameter's layout."""
    copy = param.detach().to(torch.float32, copy=True)
    return copy if values is None else copy.copy_(values)


def convert_master(param: Tensor, masters: Mapping[str, Tensor], key: str) -> Tensor:
    """Returns a new master in the format of a key.

    Args:
        param: The parameter, from which the master is made if there is none.
        masters: Masters by key, in any format.
        key: The key of the wanted format.
    """
    decoded, upper = _decoded_master(param, masters), param.detach()
    if key != FP32_MASTER:
        bits, _ = _RESIDUALS[key]
        return ops.split_fp32(upper, upper.float() if decoded is None else decoded, bits)
    if decoded is not None:
        # Splitting rounds ties away from zero, but the parameter was rounded to even. Move such a
        # tie to the next float32 towards the parameter.
        nearest = torch.nextafter(decoded, upper.float())
        decoded = torch.where(decoded.to(upper.dtype) == upper, decoded, nearest)
    return _in_float32(param, decoded)


def fp32_master(param: Tensor, masters: Mapping[str, Tensor]) -> Tensor:
    """Returns the float32 master, a joined copy if it is split, or the parameter without one."""
    if len(masters) > (FP32_MASTER in masters):
        return _in_float32(param, _decoded_master(param, masters))
    return masters.get(FP32_MASTER, param)


def has_two_bytes(key: str) -> bool:
    """Returns True for a residual of 16 bits, stored as uint8 with a last dimension of 2."""
    return _RESIDUALS.get(key, (0, None))[0] == 16


def empty_residual(key: str, param: Tensor) -> Tensor:
    """Returns uninitialized memory for a residual, in the layout of the parameter."""
    if not has_two_bytes(key):
        return torch.empty_like(param, dtype=torch.int8)
    return torch.empty_like(param, dtype=torch.int16).unsqueeze(-1).view(torch.uint8)


# Moments.


class MomentFormat(NamedTuple):
    """The format in which one moment is stored.

    Attributes:
        name: The key of the moment in torch: "exp_avg".
        role: "first moment", "second moment", "maximum" or "other".
        dtype: Dtype of the stored elements.
        code: The quantized format, such as "q8h"; "" if the moment is not quantized.
    """

    name: str
    role: str
    dtype: torch.dtype
    code: str = ""

    @property
    def key(self) -> str:
        """The key of the elements."""
        return f"{self.name}_{self.code}" if self.code else self.name

    @property
    def exponents_key(self) -> str:
        """The key of the block exponents; "" if the format has none."""
        return f"{self.name}_exp" if self.code in ("q8s", "q8m") else ""

    @property
    def keys(self) -> list[str]:
        """The keys of the elements and of the exponents, if there are any."""
        return [self.key, self.exponents_key] if self.exponents_key else [self.key]

    def dtype_of(self, key: str) -> torch.dtype:
        """Returns the dtype of the tensor under one of the keys."""
        return torch.uint8 if key == self.exponents_key else self.dtype

    def sizes_of(self, key: str, param: Tensor) -> list[int]:
        """Returns the shape of the tensor under one of the keys, for a parameter or a shard."""
        return sizes_of_exponents(param) if key == self.exponents_key else list(param.shape)

    def empty(self, key: str, param: Tensor) -> Tensor:
        """Returns uninitialized memory for the tensor under one of the keys.

        A moment in blocks is contiguous, even if the parameter has become non-contiguous.
        """
        if self.exponents_key:
            sizes = self.sizes_of(key, param)
            return torch.empty(sizes, dtype=self.dtype_of(key), device=param.device)
        return torch.empty_like(param, dtype=self.dtype)


def _format(name: str, role: str, dtype: torch.dtype, code: str) -> MomentFormat:
    if code:
        dtype = torch.int8 if code == "q8h" else torch.uint8
    return MomentFormat(name, role, dtype, code)


def all_formats(name: str) -> list[MomentFormat]:
    """Returns the formats in which a moment may be stored: float32, then the quantized ones."""
    return [_format(name, "other", torch.float32, code) for code in ("", "q8h", "q8s", "q8m")]


def formats_with_codes(keys: Collection[Any], name: str) -> list[MomentFormat]:
    """Returns the quantized formats in which a file has a moment.

    None if the file also has it as a floating-point tensor, which a program without 8-bit support
    must have added later.
    """
    if name in keys:
        return []
    return [each for each in all_formats(name) if each.code and each.key in keys]


def has_moment(keys: Collection[Any], name: str) -> bool:
    """Returns True if a state has all keys of a moment in one of the formats."""
    return any(all(key in keys for key in each.keys) for each in all_formats(name))


def _elements_of_row(param: Tensor) -> int:
    return math.prod(param.shape[1:])


def sizes_of_exponents(param: Tensor) -> list[int]:
    """Returns the shape of the block exponents of a parameter's moment."""
    return [*param.shape[:1], _elements_of_row(param) // _BLOCK]


def fits_blocks(param: Tensor, shards_whole_rows: bool = True) -> bool:
    """Returns True if moments of a parameter can be quantized in blocks of 32 elements.

    Args:
        param: The unsharded parameter. It must be contiguous and have at least two dimensions, 4096
            elements, and rows of a multiple of 32 elements.
        shards_whole_rows: False if a dimension other than 0 is sharded, because a block lies in a
            row.
    """
    return (
        shards_whole_rows
        and param.numel() >= _LEAST_ELEMENTS
        and param.dim() >= 2
        and _elements_of_row(param) % _BLOCK == 0
        and param.is_contiguous()
    )


def _dequantized(moments: Mapping[str, Tensor], name: str, second: Tensor | None) -> Tensor | None:
    """Returns a moment as a floating-point tensor, float32 if it was quantized, or None.

    Ratios are relative to the root of the second moment ``second``.
    """
    for each in all_formats(name):
        elements = moments.get(each.key)
        if elements is None:
            continue
        if not each.code:
            return elements
        if each.code == "q8h":
            if second is not None:
                return ops.dequantize_ratios(elements, second.to(elements.device, torch.float32))
        elif each.exponents_key in moments:
            return ops.dequantize_blockwise(elements, moments[each.exponents_key], each.code)
    return None


def dequantized_moments(moments: Mapping[str, Tensor], buffers: Sequence[Any]) -> Tensors:
    """Returns moments as floating-point tensors, by name.

    Args:
        moments: Tensors by key, in any format.
        buffers: Objects with the ``name`` and the ``role`` of each moment.
    """
    second = None
    for each in buffers:
        if each.role == "second moment":
            second = _dequantized(moments, each.name, None)
    found = {
        each.name: second
        if each.role == "second moment"
        else _dequantized(moments, each.name, second)
        for each in buffers
    }
    return {name: number for name, number in found.items() if number is not None}


def _encoded(
    number: Tensor | None, form: MomentFormat, param: Tensor, second: Tensor | None
) -> Tensors:
    """Returns the tensors of a moment in a format, by key; a number of None stands for zeros."""
    if number is None:  # a block of zeros has the exponent 1
        made = {form.key: torch.zeros_like(param, dtype=form.dtype)}
        if form.exponents_key:
            sizes = sizes_of_exponents(param)
            made[form.exponents_key] = torch.ones(sizes, dtype=torch.uint8, device=param.device)
        return made
    if not form.code:
        moved = number.to(param.device, form.dtype)
        if moved.stride() != param.stride():
            moved = torch.empty_like(param, dtype=form.dtype).copy_(moved)
        return {form.key: moved}
    moment = torch.empty_like(param, dtype=torch.float32).copy_(number)
    if form.code == "q8h":
        assert second is not None
        return {form.key: ops.quantize_ratios(moment, second.float())}
    return dict(zip(form.keys, ops.quantize_blockwise(moment, form.code), strict=True))


def convert_moments(
    moments: Mapping[str, Tensor], formats: Sequence[MomentFormat], param: Tensor
) -> Tensors:
    """Returns moments in other formats. Missing ones become zeros.

    Args:
        moments: Tensors by key, in any format.
        formats: The wanted format of each moment.
        param: The parameter, or this rank's shard.

    Returns:
        Tensors by key; the given tensors, if all of them have the wanted formats already.
    """

    def is_kept(form: MomentFormat, key: str) -> bool:
        found = moments.get(key)
        wanted = form.dtype_of(key), param.device
        return found is not None and (found.dtype, found.device) == wanted

    if all(is_kept(form, key) for form in formats for key in form.keys):
        return {key: moments[key] for form in formats for key in form.keys}
    numbers = dequantized_moments(moments, formats)
    made: Tensors = {}
    second = None  # second moment after quantization; ratios are relative to its root
    for form in sorted(formats, key=lambda form: form.code == "q8h"):
        made |= _encoded(numbers.get(form.name), form, param, second)
        if form.role == "second moment":
            second = _dequantized(made, form.name, None)
    return made


# States.


@dataclass(frozen=True)
class StateSpec:
    """Describes the state that a parameter of a group needs, given the formula and the options.

    Attributes:
        optimizer: The name of the optimizer, for errors.
        buffers: Descriptions of all buffers of the formula.
        buffer_count: The number of ``buffers`` that the group uses.
        keeps_step: Whether states have a step count.
        needs_buffers: Whether a state that lacks a buffer is refused. If not, its next step counts
            as the first.
        needs_step: Whether a state without its step count is refused.
        master_weights: The option of the group.
        state_dtype: The option of the group, a dtype by its name.
    """

    optimizer: str
    buffers: tuple[ops.BufferDescription, ...]
    buffer_count: int
    keeps_step: bool
    needs_buffers: bool
    needs_step: bool
    master_weights: bool | str
    state_dtype: str | None

    @classmethod
    def of(cls, optimizer: str, description: Any, group: Mapping[str, Any]) -> StateSpec:
        """Returns the specification for a group with checked options.

        Args:
            optimizer: The name of the optimizer.
            description: The description of the optimizer.
            group: The options.
        """
        dtype = group["state_dtype"]
        dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        buffer_count, formula_counts, dithers = ops.state_needs(
            description.hyperparameters, {**group, "state_dtype": dtype}
        )
        needs_buffers = not description.counts_from_buffer
        return cls(
            optimizer=optimizer,
            buffers=description.buffers,
            buffer_count=buffer_count,
            keeps_step=formula_counts or dithers,
            needs_buffers=needs_buffers,
            needs_step=needs_buffers and formula_counts,
            master_weights=group["master_weights"],
            state_dtype=dtype,
        )

    @property
    def all_names(self) -> list[str]:
        """The keys of all buffers of the formula in torch."""
        return [each.name for each in self.buffers]

    @property
    def names(self) -> list[str]:
        """The keys of the buffers that the group uses in torch."""
        return self.all_names[: self.buffer_count]

    def is_key_of_moment(self, key: Any) -> bool:
        """Returns True if a moment is stored under a key, in some format."""
        return any(key in each.keys for name in self.all_names for each in all_formats(name))

    def is_key(self, key: Any) -> bool:
        """Returns True if the optimizer stores something under a key."""
        return key == "step" or key in MASTER_KEYS or self.is_key_of_moment(key)

    def formats(self, param: Tensor, shards_whole_rows: bool) -> list[MomentFormat]:
        """Returns the format of each buffer, including buffers that the group does not use.

        Args:
            param: The unsharded parameter, so that all ranks have the same formats.
            shards_whole_rows: See :func:`fits_blocks`.
        """
        is_coded = self.state_dtype in CODED_STATES and param.dtype != torch.float64
        codes = {"q8h"} if is_coded else set()
        if is_coded and fits_blocks(param, shards_whole_rows):
            codes |= {"q8m", "q8s"} if self.state_dtype == "8bit" else {"q8m"}
        dtype = torch.bfloat16 if is_coded else param.dtype
        if self.state_dtype in ("float32", "bfloat16") and param.dtype != torch.float64:
            dtype = getattr(torch, self.state_dtype)
        return [
            _format(each.name, each.role, dtype, each.code if each.code in codes else "")
            for each in self.buffers
        ]

    def master_key(self, param: Tensor) -> str:
        """Returns the key of the parameter's master; "" if it has no master."""
        return key_of_master(self.master_weights, param.dtype)

    def missing_from(self, keys: Collection[Any]) -> list[str]:
        """Returns the keys that a state requires but lacks."""
        names = self.names if self.needs_buffers else []
        missing = [name for name in names if not has_moment(keys, name)]
        lacks_step = self.needs_step and self.keeps_step and "step" not in keys
        return [*missing, "step"] if lacks_step else missing

    def layout_under(self, key: str, param: Tensor) -> tuple[list[int], list[int]]:
        """Returns shape and strides of the tensor under a key, for a parameter or a shard."""
        if key == "step":
            return [], []
        if key in (f"{name}_exp" for name in self.all_names):
            sizes = sizes_of_exponents(param)
            return sizes, [sizes[-1], 1][-len(sizes) :]
        sizes, strides = list(param.shape), list(param.stride())
        if has_two_bytes(key):
            return [*sizes, 2], [*(2 * stride for stride in strides), 1]
        return sizes, strides
