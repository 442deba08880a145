"""The states of parameters in an optimizer's dicts, sharded over ranks like the parameters.

The compiled module decides which states a parameter has and how a file is read, and it only sees
this rank's tensors. The functions here take the local shards of DTensors before a call, and make
DTensors of the results.

A float32 master has the key "master_param". Other formats have other keys, so that code that knows
only torch's keys can't mistake quantized values for moments:

* "master_low_bf16": residual of a split master.
* "exp_avg_q8h": a first moment in 8 bits, as a ratio to the root of the second moment.
* "exp_avg_sq_q8s", "momentum_buffer_q8m": the root of a second moment, or a momentum, quantized in
  blocks of 32 elements. The exponents of the blocks have keys such as "exp_avg_sq_exp".
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
    "float32_state",
    "fp32_master",
    "init_states",
    "loaded_state",
    "masters_in",
]


States = dict[Any, dict[str, Any]]
Local = tuple["ops.StateSpec", "ops.ParamRef", dict[str, Tensor]]


class PlacedParam(NamedTuple):
    """A parameter, the specification of its state, and its position in the groups."""

    spec: ops.StateSpec
    param: Tensor
    group_index: int
    index_in_group: int

    def __str__(self) -> str:
        """Returns the position for errors: "group 0, param 3"."""
        return f"group {self.group_index}, param {self.index_in_group}"

    def reference(self) -> ops.ParamRef:
        """Returns the reference to the parameter that the compiled module takes."""
        param = self.param
        return ops.ParamRef(
            param,
            local_tensor(param.detach()),
            self.group_index,
            self.index_in_group,
            is_over_rows(param),
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


def check_flattened(spec: ops.StateSpec, param: Tensor) -> None:
    """Checks that FSDP1 can save the state of a parameter, if FSDP1 has flattened it.

    Raises:
        ValueError: If the state holds moments in 8 bits or the residual of a split master.
    """
    if not is_flattened(param):
        return
    reference = PlacedParam(spec, param, 0, 0).reference()
    if spec.has_codes(reference):
        raise ValueError(
            f"{spec.optimizer}: state_dtype must be torch.float32, torch.bfloat16 or None "
            "for parameters that FullyShardedDataParallel flattens, got "
            f"{spec.state_dtype!r}. Use fully_shard for 8-bit moments."
        )
    if spec.master_key(reference) not in ("", "master_param"):
        raise ValueError(
            f"{spec.optimizer}: master_weights must be True or False for parameters that "
            f"FullyShardedDataParallel flattens, got {spec.master_weights!r}. Use fully_shard for "
            "split masters."
        )


@outside_inference_mode()
def init_states(
    states: Mapping[Any, Any], placed_params: Iterable[PlacedParam]
) -> tuple[States, list[Local]]:
    """Completes the states of parameters: creates missing tensors and converts existing tensors.

    Args:
        states: The states of the optimizer; they do not change.
        placed_params: The parameters.

    Returns:
        A dict from parameters to new states, only for states that differ from the present ones; and
        the specification, reference and local state of each parameter.

    Raises:
        TypeError: If the value under one of the optimizer's keys is not a tensor.
        ValueError: If a required tensor of a state is missing.
    """
    made: States = {}
    local: list[Local] = []
    for placed in placed_params:
        check_flattened(placed.spec, placed.param)
        before = states.get(placed.param, {})
        parts, reference = placed.parts(before), placed.reference()
        complete = placed.spec.complete_state(reference, parts)
        dropped = parts.keys() - complete.keys()
        state = {key: value for key, value in before.items() if key not in dropped}
        for key, part in complete.items():
            state[key] = before[key] if part is parts.get(key) else placed.laid_out(key, part)
        is_complete = isinstance(before, dict) and state.keys() == before.keys()
        if not is_complete or any(state[key] is not before[key] for key in state):
            made[placed.param] = state
        local.append((placed.spec, reference, complete))
    return made, local


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
    reference = placed.reference()
    check_flattened(spec, param)
    spec.check_saved_state(reference, saved, operation)
    state = {key: copy.deepcopy(value) for key, value in saved.items() if not spec.is_key(key)}
    parts = _parts_for(placed, saved) if is_dtensor(param) else saved
    loaded = spec.loaded_state(reference, parts)
    return {key: placed.laid_out(key, part) for key, part in loaded.items()} | state


def _parts_for(placed: PlacedParam, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this rank's shards of a DTensor's state, even if the file shards it differently."""
    spec, param = placed.spec, placed.param
    local = local_tensor(param.detach())
    parts = {key: value for key, value in saved.items() if spec.is_key(key)}
    if not is_over_rows(param):  # dequantize, because a block of 32 elements may span ranks
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
    """Turns a tensor that every rank holds into a replicated DTensor on a parameter's mesh."""
    from torch.distributed.tensor import Replicate

    everywhere = [Replicate()] * len(param.placements)
    kind: Any = type(param.data)
    laid_out: Tensor = kind.from_local(unsharded, param.device_mesh, everywhere, run_check=False)
    return laid_out


def float32_state(placed: PlacedParam, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state with float32 values under the keys that torch uses."""
    spec = placed.spec
    parts = spec.float32_state(placed.reference(), placed.parts(state))
    found = {
        key: copy.deepcopy(value)
        for key, value in state.items()
        if key == "step" or not spec.is_key(key)
    }
    return found | {key: placed.laid_out(key, part) for key, part in parts.items()}


def masters_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the float32 master or the residual in a state, by its key."""
    return {key: state[key] for key in ops.MASTER_KEYS if state.get(key) is not None}


def fp32_master(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Returns the float32 master of a parameter, or a joined copy if the master is split.

    Args:
        param: The parameter. If it has no master, the parameter itself is returned.
        state: State of the parameter.
    """
    masters = masters_in(state)
    part = local_tensor(param.detach())
    parts = {key: local_tensor(master) for key, master in masters.items()}
    made = ops.fp32_master(part, parts)
    if made is part:
        return param.detach()
    stored = [masters[key] for key in masters if made is parts[key]]
    return (stored[0] if stored else laid_out_as(param, made)).detach()
