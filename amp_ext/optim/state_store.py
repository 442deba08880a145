"""The states of parameters in the dicts of an optimizer, laid out over ranks as the parameters are.

What a parameter keeps, and what a file has of it, is decided by the compiled module, of tensors of
this rank: here the parts of a DTensor are taken before, and made DTensors again after.

A master in full stands under "master_param". The lower part of a split one, and a moment in codes
of 8 bits, stand under keys of their own, which name their formats: "master_low_bf16",
"exp_avg_q8h" for a first moment as the ratio to the root of the second, "exp_avg_sq_q8s" for the
root of a second moment and "momentum_buffer_q8m" for a momentum, both in blocks of 32 elements with
an exponent each, under "exp_avg_sq_exp". So who knows the names of torch alone does not take codes
for moments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.sharding import is_dtensor, is_flattened, is_over_rows, laid_out_as, local_tensor

__all__ = [
    "Local",
    "PlacedParam",
    "States",
    "check_flattened",
    "existing_master",
    "float32_state",
    "fp32_master",
    "init_states",
    "loaded_state",
]


States = dict[Any, dict[str, Any]]
Local = tuple["ops.StateSpec", "ops.ParamRef", dict[str, Tensor]]


class PlacedParam(NamedTuple):
    """A parameter, what it keeps, and where it is listed."""

    spec: ops.StateSpec
    param: Tensor
    group_index: int
    index_in_group: int

    def __str__(self) -> str:
        """Returns where it is listed, as errors say it."""
        return f"group {self.group_index}, param {self.index_in_group}"

    def registered(self) -> ops.ParamRef:
        """Returns the parameter as the compiled module knows it."""
        param = self.param
        return ops.ParamRef(
            param,
            local_tensor(param.detach()),
            self.group_index,
            self.index_in_group,
            is_over_rows(param),
        )

    def parts(self, state: Mapping[Any, Any]) -> dict[str, Tensor]:
        """Returns this rank's parts of what the optimizer has in a state of the parameter.

        Raises:
            TypeError: If one is no tensor.
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
        """Returns this rank's part of what stands under a key as one laid out over the ranks."""
        if key == "step" or not is_dtensor(self.param):
            return part
        return laid_out_as(self.param, part, *self.spec.layout_under(key, self.param))


def check_flattened(spec: ops.StateSpec, param: Tensor) -> None:
    """Checks that FSDP1 can save what a parameter keeps, if it is one of those that it flattens.

    Raises:
        ValueError: If it keeps codes or the lower part of a master.
    """
    if not is_flattened(param):
        return
    registered = PlacedParam(spec, param, 0, 0).registered()
    if spec.has_codes(registered):
        raise ValueError(
            f"{spec.optimizer}: state_dtype must be torch.float32, torch.bfloat16 or None "
            "for parameters that FullyShardedDataParallel flattens, which can't save codes, "
            f"got {spec.state_dtype!r}; fully_shard can"
        )
    if spec.master_key(registered) not in ("", "master_param"):
        raise ValueError(
            f"{spec.optimizer}: master_weights must be True or False for parameters that "
            "FullyShardedDataParallel flattens, which can't save the lower parts of masters, got "
            f"{spec.master_weights!r}; fully_shard can"
        )


@outside_inference_mode()
def init_states(
    states: Mapping[Any, Any], placed_params: Iterable[PlacedParam]
) -> tuple[States, list[Local]]:
    """Makes the states of parameters whole, for the optimizer to keep.

    Args:
        states: Of the optimizer.
        placed_params: The parameters.

    Returns:
        The states that are others than before, by their parameters; and for each place this rank's
        parts of its state.

    Raises:
        TypeError: If a part of a state is no tensor.
        ValueError: If a part of a state is missing.
    """
    made: States = {}
    local: list[Local] = []
    for placed in placed_params:
        check_flattened(placed.spec, placed.param)
        before = states.get(placed.param, {})
        parts, registered = placed.parts(before), placed.registered()
        complete = placed.spec.complete_state(registered, parts)
        dropped = parts.keys() - complete.keys()
        state = {key: value for key, value in before.items() if key not in dropped}
        for key, part in complete.items():
            state[key] = before[key] if part is parts.get(key) else placed.laid_out(key, part)
        is_complete = isinstance(before, dict) and state.keys() == before.keys()
        if not is_complete or any(state[key] is not before[key] for key in state):
            made[placed.param] = state
        local.append((placed.spec, registered, complete))
    return made, local


@outside_inference_mode()
def loaded_state(placed: PlacedParam, saved: dict[str, Any], operation: str) -> dict[str, Any]:
    """Returns the state of a parameter that a file has, copied as the options want it.

    Args:
        placed: The parameter, which has been loaded.
        saved: Its state in the file.
        operation: What messages begin with.

    Raises:
        ValueError: If it does not fit the parameter, or a part of it is missing.
    """
    spec, param = placed.spec, placed.param
    if is_lazy(param):
        raise ValueError(
            f"{operation}: param of {placed} must have a shape, got a lazy parameter: run the "
            "model once first"
        )
    registered = placed.registered()
    check_flattened(spec, param)
    spec.check_saved_state(registered, saved, operation)
    state = {key: copy.deepcopy(value) for key, value in saved.items() if not spec.is_key(key)}
    parts = _parts_for(placed, saved) if is_dtensor(param) else saved
    loaded = spec.loaded_state(registered, parts)
    return {key: placed.laid_out(key, part) for key, part in loaded.items()} | state


def _parts_for(placed: PlacedParam, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this rank's parts of what a file has for a DTensor, however it was sharded there."""
    spec, param = placed.spec, placed.param
    local = local_tensor(param.detach())
    parts = {key: value for key, value in saved.items() if spec.is_key(key)}
    if not is_over_rows(param):  # the parts of the ranks cut blocks
        for name, code, keys in spec.blocks_in(parts):
            codes, exponents = (_unsharded(parts.pop(key)).to(local.device) for key in keys)
            parts[name] = _over_all_ranks(param, ops.dequantize_blockwise(codes, exponents, code))
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


def _over_all_ranks(param: Any, unsharded: Tensor) -> Tensor:
    """Returns a tensor that all ranks have as a DTensor on the mesh of a parameter."""
    from torch.distributed.tensor import Replicate

    everywhere = [Replicate()] * len(param.placements)
    kind: Any = type(param.data)
    laid_out: Tensor = kind.from_local(unsharded, param.device_mesh, everywhere, run_check=False)
    return laid_out


def float32_state(placed: PlacedParam, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state with float32 numbers under the keys of torch."""
    spec = placed.spec
    parts = spec.float32_state(placed.registered(), placed.parts(state))
    found = {
        key: copy.deepcopy(value)
        for key, value in state.items()
        if key == "step" or not spec.is_key(key)
    }
    return found | {key: placed.laid_out(key, part) for key, part in parts.items()}


def existing_master(param: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """Returns this rank's part of a master as it is kept, or in float32; None if there is none.

    Args:
        param: The parameter.
        state: Of the parameter.
    """
    parts = {key: local_tensor(master) for key, master in _masters_in(state).items()}
    return ops.existing_master(local_tensor(param.detach()), parts)


def _masters_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: state[key] for key in ops.MASTER_KEYS if state.get(key) is not None}


def fp32_master(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns the float32 master of a parameter: that which is kept, or one made of its parts.

    Args:
        param: The parameter, which stands for itself without a master.
        state: Of the parameter.
    """
    masters = _masters_in(state)
    part = local_tensor(param.detach())
    parts = {key: local_tensor(master) for key, master in masters.items()}
    made = ops.fp32_master(part, parts)
    if made is part:
        return param.detach()
    spec = [masters[key] for key in masters if made is parts[key]]
    return (spec[0] if spec else laid_out_as(param, made)).detach()
