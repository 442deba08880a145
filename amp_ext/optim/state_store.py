"""The states of parameters in an optimizer's dicts, sharded over ranks like the parameters.

States are completed, converted and read from files in the formats that :mod:`amp_ext.optim.formats`
defines. Conversions take the local shards of DTensors, and DTensors are made of their results.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim import formats
from amp_ext.optim.formats import FP32_MASTER, MASTER_KEYS, MomentFormat, StateSpec, Tensors
from amp_ext.sharding import is_dtensor, is_flattened, is_over_rows, laid_out_as, local_tensor

States = dict[Any, dict[str, Any]]
_LARGEST_STEP = torch.finfo(torch.float32).max


class PlacedParam(NamedTuple):
    """A parameter, the specification of its state, and its position in the groups."""

    spec: StateSpec
    param: Tensor
    group_index: int
    index_in_group: int

    def __str__(self) -> str:
        """Returns the position for errors: "group 0, param 3"."""
        return f"group {self.group_index}, param {self.index_in_group}"

    @property
    def local(self) -> Tensor:
        """This rank's shard of the parameter, or the whole parameter, without autograd."""
        return local_tensor(self.param.detach())

    @property
    def formats(self) -> list[MomentFormat]:
        """The format of each moment of the parameter, the same on all ranks."""
        return self.spec.formats(self.param, is_over_rows(self.param))

    def check_is_stepped(self, operation: str) -> None:
        """Raises RuntimeError unless steps support the dtype and the device of the parameter."""
        param = self.param
        dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        if param.dtype not in dtypes or param.device.type not in ("cpu", "cuda"):
            raise RuntimeError(
                f"{self.spec.optimizer}.{operation}: param of {self} must be float32, float64, "
                f"float16 or bfloat16 on cpu or cuda, got {param.dtype} on {param.device}"
            )

    def parts(self, state: Mapping[Any, Any]) -> dict[str, Tensor]:
        """Returns this rank's shards of the tensors in a state that have keys of the optimizer.

        Raises:
            TypeError: If the value under such a key is not a tensor.
        """
        spec, parts = self.spec, {}
        for key, value in state.items():
            if value is None or not spec.is_key(key) or (key == "step" and not spec.keeps_step):
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{spec.optimizer}: {key} of {self} must be a tensor, got {value!r}"
                )
            parts[key] = local_tensor(value)
        return parts

    def laid_out(self, key: str, part: Tensor) -> Tensor:
        """Returns this rank's shard of a state's tensor; for DTensor parameters, as a DTensor."""
        if key == "step" or not is_dtensor(self.param):
            return part
        return laid_out_as(self.param, part, *self.spec.layout_under(key, self.param))


def check_flattened(spec: StateSpec, param: Tensor) -> None:
    """Checks that FSDP1 can save the state of a parameter, if FSDP1 has flattened it.

    Raises:
        ValueError: If the state holds moments in 8 bits or the residual of a split master.
    """
    if not is_flattened(param):
        return
    if any(each.code for each in spec.formats(param, True)):
        raise ValueError(
            f"{spec.optimizer}: state_dtype must be torch.float32, torch.bfloat16 or None "
            "for parameters that FullyShardedDataParallel flattens, got "
            f"{spec.state_dtype!r}. Use fully_shard for 8-bit moments."
        )
    if spec.master_key(param) not in ("", FP32_MASTER):
        raise ValueError(
            f"{spec.optimizer}: master_weights must be True or False for parameters that "
            f"FullyShardedDataParallel flattens, got {spec.master_weights!r}. Use fully_shard for "
            "split masters."
        )


# States that a step needs.


@outside_inference_mode()
def init_states(states: Mapping[Any, Any], placed_params: Iterable[PlacedParam]) -> States:
    """Completes the states of parameters: creates missing tensors and converts existing tensors.

    Args:
        states: The states of the optimizer; they do not change.
        placed_params: The parameters.

    Returns:
        A dict from parameters to new states, only for states that differ from the present ones.

    Raises:
        TypeError: If the value under one of the optimizer's keys is not a tensor.
        ValueError: If a required tensor of a state is missing.
    """
    made: States = {}
    for placed in placed_params:
        check_flattened(placed.spec, placed.param)
        before = states.get(placed.param, {})
        parts = placed.parts(before)
        complete = _complete_state(placed, parts)
        dropped = parts.keys() - complete.keys()
        state = {key: value for key, value in before.items() if key not in dropped}
        for key, part in complete.items():
            is_kept = part is parts.get(key)
            state[sys.intern(key)] = before[key] if is_kept else placed.laid_out(key, part)
        is_complete = isinstance(before, dict) and state.keys() == before.keys()
        if not is_complete or any(state[key] is not before[key] for key in state):
            made[placed.param] = state
    return made


def put_states(states: States, made: States) -> None:
    """Puts completed states into ``optimizer.state``.

    Existing dicts are updated in place, because users may hold references to them.

    Args:
        states: The states of the optimizer.
        made: From :func:`init_states`.
    """
    for param, state in made.items():
        there = states.get(param)
        if isinstance(there, dict):
            there.clear()
            there.update(state)
        else:
            states[param] = state


def _complete_state(placed: PlacedParam, parts: Tensors) -> Tensors:
    """Returns a state with all tensors that a step needs, in the wanted formats.

    Args:
        placed: The parameter.
        parts: This rank's shards of the tensors that exist. They are not written.

    Raises:
        ValueError: If only a part of a state exists: new moments of 0 would not fit an old step
            count. The buffer of an option may be missing, because a training loop may switch the
            option on.
    """
    spec, local = placed.spec, placed.local
    state = dict(parts)
    moments = {key: each for key, each in parts.items() if spec.is_key_of_moment(key)}
    if moments or (spec.keeps_step and "step" in state):
        optional = [each.name for each in spec.buffers if each.option is not None]
        for key in spec.missing_from(state):
            if key not in optional:
                raise ValueError(
                    f"{spec.optimizer}: {key} of {placed} must be present, got {list(state)}"
                )
    if spec.keeps_step:
        steps = None if "step" in state else 0.0
        if spec.buffers and not spec.needs_buffers:  # torch's SGD stores no step count
            if all(formats.has_moment(state, name) for name in spec.all_names):
                steps = steps if steps is None else 1.0
            elif spec.buffer_count > 0:
                steps = 0.0
        if steps is not None:
            state["step"] = torch.full((), steps, dtype=torch.float32, device=local.device)
        state["step"] = state["step"].to(local.device, torch.float32)
    master_key = spec.master_key(placed.param)
    if master_key:
        master = state.get(master_key)
        if master is None:
            state[master_key] = formats.convert_master(local, masters_in(state), master_key)
        else:  # a step checks the dtype of a residual
            dtype = torch.float32 if master_key == FP32_MASTER else master.dtype
            state[master_key] = master.to(local.device, dtype)
    for key in MASTER_KEYS:
        if key != master_key:
            state.pop(key, None)
    # Unused buffers are converted, too, because a training loop may change the group's options.
    wanted = [
        each
        for index, each in enumerate(placed.formats)
        if index < spec.buffer_count or formats.has_moment(state, each.name)
    ]
    converted = formats.convert_moments(moments, wanted, local)
    kept = {key: each for key, each in state.items() if key not in moments or key in converted}
    return kept | {key: converted[key] for each in wanted for key in each.keys}


# States in files.


@outside_inference_mode()
def loaded_state(placed: PlacedParam, saved: dict[str, Any], operation: str) -> dict[str, Any]:
    """Returns a copy of a parameter's state in a file, converted to the configured formats.

    Args:
        placed: The parameter, whose values have already been loaded.
        saved: The state of the parameter in the file.
        operation: Start of errors.

    Raises:
        ValueError: If the state does not fit the parameter, or a part of it is missing.
    """
    spec, param = placed.spec, placed.param
    if is_lazy(param):
        raise ValueError(
            f"{operation}: param of {placed} is a lazy parameter, which has no shape yet. Run the "
            "model once first."
        )
    check_flattened(spec, param)
    known = {key: value for key, value in saved.items() if spec.is_key(key) and value is not None}
    _check_saved(placed, known, list(saved), operation)
    parts = _parts_for(placed, known) if is_dtensor(param) else known
    loaded = _loaded_parts(placed, parts)
    others = {key: copy.deepcopy(value) for key, value in saved.items() if not spec.is_key(key)}
    return {sys.intern(key): placed.laid_out(key, part) for key, part in loaded.items()} | others


def _check_saved(
    placed: PlacedParam, saved: Mapping[str, Any], keys: list[Any], operation: str
) -> None:
    """Raises ValueError unless a state in a file fits its parameter.

    Args:
        placed: The parameter.
        saved: The entries that the optimizer knows.
        keys: All keys of the state, for errors.
        operation: Start of errors.
    """
    spec, param = placed.spec, placed.param

    def where(key: str) -> str:
        return f"{operation}: {key} of {placed}"

    for key in spec.missing_from(saved):
        raise ValueError(f"{where(key)} must be present, got {keys}")
    for key in MASTER_KEYS:
        value = saved.get(key)
        if value is None:
            continue
        if key == FP32_MASTER:
            if isinstance(value, Tensor) and value.dtype == torch.int16:
                raise ValueError(
                    f"{where(key)} must be floating-point, got torch.int16, as TransformerEngine's "
                    "FusedAdam writes with store_param_remainders=True. Delete 'master_param' from "
                    "the states, so that masters are made from the parameters"
                )
            _check_numbers(value, param, where(key))
        # torch's load may have cast a residual to the dtype of the parameter.
        elif not _tensor(value, where(key)).is_floating_point():
            has_two = formats.has_two_bytes(key)
            sizes = [*param.shape, 2] if has_two else list(param.shape)
            _check_is_saved_as(torch.uint8 if has_two else torch.int8, sizes, value, where(key))
    for name in spec.all_names:
        if name in saved:
            _check_numbers(saved[name], param, where(name))
        for form in formats.formats_with_codes(saved, name):
            for key in form.keys:
                if key not in saved:
                    raise ValueError(f"{where(key)} must be present, got {keys}")
                value = _tensor(saved[key], where(key))
                sizes = form.sizes_of(key, param)
                _check_is_saved_as(form.dtype_of(key), sizes, value, where(key))
    if "step" in saved:
        _check_step(saved["step"], where("step"))


def _tensor(value: Any, where: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} must be a tensor, got {type(value).__name__}")
    return value


def _check_numbers(value: Any, param: Tensor, where: str) -> None:
    tensor = _tensor(value, where)
    if tensor.shape != param.shape:
        raise ValueError(f"{where} must have shape {tuple(param.shape)}, got {tuple(tensor.shape)}")
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        raise ValueError(
            f"{where} must be dense and floating-point, got {tensor.layout}, {tensor.dtype}"
        )


def _check_is_saved_as(dtype: torch.dtype, sizes: list[int], saved: Tensor, where: str) -> None:
    if saved.dtype != dtype or list(saved.shape) != sizes:
        raise ValueError(
            f"{where} must be {dtype} of shape {tuple(sizes)}, got {saved.dtype} of "
            f"{tuple(saved.shape)}"
        )
    if saved.layout != torch.strided or saved.is_meta:
        raise ValueError(f"{where} must be dense and hold its elements, got {saved.layout}")


def _check_step(value: Any, where: str) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{where} must be one number, got shape {tuple(value.shape)}")
    number = _number(value)
    if not isinstance(number, (int, float)):
        raise ValueError(f"{where} must be one number, got {number!r}")
    if not 0 <= number <= _LARGEST_STEP:
        raise ValueError(f"{where} must be finite and at least 0, got {number!r}")


def _number(value: Any) -> Any:
    """Returns the number in a tensor or a numpy array of one element, or another value as it is."""
    if isinstance(value, Tensor):
        return value.detach().item()
    return value.item() if getattr(value, "size", None) == 1 and hasattr(value, "item") else value


def _loaded_parts(placed: PlacedParam, saved: Mapping[str, Any]) -> Tensors:
    """Returns copies of the checked entries of a file, in the configured formats."""
    spec, local = placed.spec, placed.local

    def copied(value: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(local, dtype=dtype).copy_(value)

    masters: Tensors = {}
    for key in MASTER_KEYS:
        if key not in saved:
            continue
        if key == FP32_MASTER:
            masters[key] = copied(saved[key], torch.float32)
        elif not saved[key].is_floating_point():
            masters[key] = formats.empty_residual(key, local).copy_(saved[key])
    moments: Tensors = {}
    for name in spec.all_names:
        for form in formats.formats_with_codes(saved, name):
            for key in form.keys:
                moments[key] = form.empty(key, local).copy_(saved[key])
    has_codes, configured = bool(moments), placed.formats
    for wanted in configured:
        if wanted.name in saved:
            # A second moment stays float32 until the ratios to its root are quantized.
            is_exact = not wanted.code and (not has_codes or wanted.dtype == torch.float64)
            dtype = wanted.dtype if is_exact else torch.float32
            moments[wanted.name] = copied(saved[wanted.name], dtype)
    # Unused moments are kept, too, because a training loop may change the group's options.
    present = [each for each in configured if formats.has_moment(moments, each.name)]
    converted = formats.convert_moments(moments, present, local)
    in_order = {key: converted[key] for each in present for key in each.keys}
    master_key = spec.master_key(placed.param)
    loaded: Tensors = {}
    for key, value in saved.items():
        if key == "step":
            steps = float(_number(value))
            loaded[key] = torch.full((), steps, dtype=torch.float32, device=local.device)
        elif key not in MASTER_KEYS:
            loaded |= in_order
        elif masters and master_key:
            # A float32 master is newer than a residual: a program without residuals added it.
            is_newest = master_key == FP32_MASTER or FP32_MASTER not in masters
            loaded[master_key] = (
                masters[master_key]
                if master_key in masters and is_newest
                else formats.convert_master(local, masters, master_key)
            )
    return loaded


def _parts_for(placed: PlacedParam, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this rank's shards of a DTensor's state, even if the file shards it differently."""
    from torch.distributed.tensor import Replicate

    spec, local = placed.spec, placed.local
    param: Any = placed.param
    parts = dict(saved)
    if not is_over_rows(param):  # dequantize, because a block of 32 elements may span ranks
        for name in spec.all_names:
            for form in formats.formats_with_codes(parts, name):
                if form.exponents_key:
                    codes, exponents = (_unsharded(parts.pop(key)) for key in form.keys)
                    pair = codes.to(local.device), exponents.to(local.device)
                    whole = ops.dequantize_blockwise(*pair, form.code)
                    mesh, everywhere = param.device_mesh, [Replicate()] * len(param.placements)
                    parts[name] = type(param.data).from_local(
                        whole, mesh, everywhere, run_check=False
                    )
    for key, value in parts.items():
        unsharded_sizes, _ = spec.layout_under(key, param)
        if key != "step" and isinstance(value, Tensor) and list(value.shape) == unsharded_sizes:
            sizes, _ = spec.layout_under(key, local)
            empty = torch.empty(sizes, dtype=value.dtype, device=local.device)
            parts[key] = local_tensor(placed.laid_out(key, empty).copy_(value))
    return parts


def _unsharded(tensor: Any) -> Tensor:
    unsharded: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return unsharded.contiguous()


def float32_state(placed: PlacedParam, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state with float32 values under the keys that torch uses."""
    spec, parts = placed.spec, placed.parts(state)
    moments = {key: each for key, each in parts.items() if spec.is_key_of_moment(key)}
    numbers = formats.dequantized_moments(moments, spec.buffers)
    found: Tensors = {}
    for name in spec.all_names:
        if name in numbers:
            is_wide = numbers[name].dtype == torch.float64
            dtype = torch.float64 if is_wide else torch.float32
            found[name] = numbers[name].to(dtype, copy=True)
    masters = masters_in(parts)
    if masters:
        found[FP32_MASTER] = formats.fp32_master(placed.local, masters).detach().clone()
    others = {
        key: copy.deepcopy(value)
        for key, value in state.items()
        if key == "step" or not spec.is_key(key)
    }
    return others | {key: placed.laid_out(key, part) for key, part in found.items()}


def masters_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the float32 master or the residual in a state, by its key."""
    return {key: state[key] for key in MASTER_KEYS if state.get(key) is not None}


def fp32_master(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns the float32 master of a parameter, or a joined copy if the master is split.

    Args:
        param: The parameter. If it has no master, the parameter itself is returned.
        state: State of the parameter.
    """
    masters = masters_in(state)
    part = local_tensor(param.detach())
    parts = {key: local_tensor(master) for key, master in masters.items()}
    made = formats.fp32_master(part, parts)
    if made is part:
        return param.detach()
    stored = [masters[key] for key in masters if made is parts[key]]
    return (stored[0] if stored else laid_out_as(param, made)).detach()
