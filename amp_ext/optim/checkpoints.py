"""Checks state dicts that an optimizer loads, and converts states to the configured formats."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.formats import MASTER_KEYS, is_16_bit
from amp_ext.optim.options import (
    CONFIGURED_OPTIONS,
    NAMES_OF_OPTIONS,
    REFUSED_FLAGS,
    OptimizerDescription,
    names_of_all_buffers,
    with_plain_options,
)
from amp_ext.optim.state_store import PlacedParam, float32_state, loaded_state
from amp_ext.params import check_params, params_of
from amp_ext.saved_dicts import first_keys, missing_entry
from amp_ext.sharding import is_flat, is_flattened

if TYPE_CHECKING:
    from amp_ext.optim.fused_optimizer import FusedOptimizer

Options = dict[str, Any]


_LAYOUT = ("state", "param_groups")
# Keys that every group may have: the parameters, a step count, and entries that schedulers write.
_OF_EVERY_GROUP = (
    "params", "param_names", "step", "initial_lr", "max_lr", "min_lr", "base_momentum", "swa_lr",
    "max_momentum", "initial_weight_decay",
)  # fmt: skip
# Flags in files of other packages whose value a load must check.
_SAVED_FLAGS = (
    *REFUSED_FLAGS, "bias_correction", "correct_bias", "fixed_decay", "weight_decouple",
)  # fmt: skip
# Parts that DDP, torch.compile, FSDP and checkpoint_wrapper insert into names of parameters.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@outside_inference_mode()
def _in_one_dtype(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with its 16-bit tensors converted to float32, which loses nothing."""
    return {
        name: value.float()
        if isinstance(value, Tensor) and value.dim() and is_16_bit(value.dtype)
        else value
        for name, value in state.items()
    }


def saved_state_dict(
    optimizer: FusedOptimizer, state_dict_of_torch: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Returns the state dict of an optimizer that the caller has already checked.

    Args:
        optimizer: The optimizer to save.
        state_dict_of_torch: The method ``torch.optim.Optimizer.state_dict`` of this optimizer.

    Raises:
        ValueError: If a state belongs to no group.
    """
    try:
        state_dict = state_dict_of_torch()
    except KeyError:
        # torch has no key for a state of a parameter that is in no group.
        registered = set(map(id, params_of(optimizer)))
        for param in optimizer.state:
            if isinstance(param, Tensor) and id(param) not in registered:
                raise ValueError(
                    f"{type(optimizer).__name__}.state_dict: a parameter of shape "
                    f"{tuple(param.shape)} has a state but is in no group. Put the parameter back "
                    "into a group, or delete its state with del optimizer.state[param]."
                ) from None
        raise
    for group in state_dict["param_groups"]:
        group.update(with_plain_options(optimizer.description_of(group), group))
    for key, param in enumerate(params_of(optimizer)):
        if is_flattened(param) and not is_flat(param) and key in state_dict["state"]:
            state_dict["state"][key] = _in_one_dtype(state_dict["state"][key])
    return state_dict


@outside_inference_mode()
def float32_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state dict of an optimizer with all its masters and moments as float32 numbers.

    The dict loads into torch's optimizer of the same name, and into our optimizers with any
    options. float64 states stay float64. To resume a run, save ``state_dict()`` instead: it keeps
    the bits of low-precision states. ``optimizer.master_params()`` returns the weights in float32.

    Args:
        optimizer: One of :mod:`amp_ext.optim`.

    Returns:
        A dict with ``state`` and ``param_groups``. In each group ``state_dtype`` is "float32", and
        ``master_weights`` is True unless the group has no masters. All tensors are copies; DTensors
        stay DTensors.

    Raises:
        TypeError: If ``optimizer`` is not one of :mod:`amp_ext.optim`.

    Example:
        >>> reference = torch.optim.AdamW(model.parameters())
        >>> reference.load_state_dict(amp_ext.optim.float32_state_dict(optimizer))
    """
    from amp_ext.optim.fused_optimizer import FusedOptimizer

    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            "float32_state_dict: optimizer must be one of amp_ext.optim, got "
            f"{type(optimizer).__name__}"
        )
    optimizer._check_params("state_dict")
    optimizer._check_groups()
    state_dict: dict[str, Any] = optimizer.state_dict()
    states = dict(state_dict["state"])
    groups = []
    for group_index, (saved, group) in enumerate(
        zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ):
        has_masters = bool(saved["master_weights"])
        groups.append({**saved, "state_dtype": "float32", "master_weights": has_masters})
        spec = optimizer.state_spec_of(group)
        for index, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            if key in states:
                placed = PlacedParam(spec, optimizer._stored_beside(param), group_index, index)
                states[key] = float32_state(placed, states[key])
    return {**state_dict, "state": states, "param_groups": groups}


@outside_inference_mode()
def read_state_dict(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the groups and states that an optimizer has after a load, but stores nothing in it.

    Args:
        optimizer: The optimizer that loads.
        state_dict: A dict from its ``state_dict()``, or one of the same layout from other code.

    Returns:
        A dict with ``param_groups`` and ``state`` for the optimizer to use. States are keyed by
        parameter, and have the dtypes, device and memory layout that the optimizer needs.

    Raises:
        KeyError: If the dict is not the state dict of an optimizer.
        ValueError: If the dict is from another class, does not match the groups, or a part is
            missing or does not fit.
    """
    operation, own_groups = operation_of(optimizer), optimizer.param_groups
    _check_layout(operation, state_dict)
    state_dict = _with_empty_groups(own_groups, state_dict)
    state_dict = _without_unused_moments(optimizer, state_dict)
    _check_saved_groups(optimizer, state_dict)
    saved_groups, saved_states = _with_own_steps(state_dict)
    saved_groups = _in_order_of_names(operation, own_groups, saved_groups)
    groups = _loaded_groups(optimizer, saved_groups)
    for index, group in enumerate(groups):
        optimizer.check_options(group, f"{operation}: %s of param_groups[{index}]")
    states = _copied_states(optimizer, saved_groups, saved_states, groups)
    return {"state": defaultdict(dict, states), "param_groups": groups}


def keys_in_order(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> list[Any]:
    """Returns the key of each parameter's state in a file, in the order of the optimizer.

    Args:
        optimizer: The optimizer that loads.
        state_dict: A dict as for :func:`read_state_dict`, which raises the same errors.
    """
    operation = operation_of(optimizer)
    _check_layout(operation, state_dict)
    groups = _in_order_of_names(operation, optimizer.param_groups, state_dict["param_groups"])
    return [key for group in groups for key in group["params"]]


def operation_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of an optimizer's load method for errors: "AdamW.load_state_dict"."""
    return f"{type(optimizer).__name__}.load_state_dict"


def _check_layout(operation: str, state_dict: Mapping[str, Any]) -> None:
    """Checks that a state dict has "state" and "param_groups", both of the right type."""
    for name in _LAYOUT:
        if name not in state_dict:
            raise KeyError(missing_entry(operation, name, state_dict))
    states, groups = state_dict["state"], state_dict["param_groups"]
    _check_type(states, Mapping, f"{operation}: state must be a dict")
    _check_type(groups, (list, tuple), f"{operation}: param_groups must be a list")
    for index, group in enumerate(groups):
        where = f"{operation}: param_groups[{index}]"
        _check_type(group, Mapping, f"{where} must be a dict")
        if "params" not in group:
            raise ValueError(f"{where} must have ['params'], got {list(group)}")
        _check_type(group["params"], (list, tuple), f"{where}['params'] must be a list")
        for key in group["params"]:
            _check_type(key, Hashable, f"{where}['params'] must have keys of state")
            state = states.get(key, {})
            _check_type(state, (Mapping, type(None)), f"{operation}: state[{key!r}] must be a dict")


def _with_empty_groups(own: Sequence[Options], state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state dict in which groups without options have those of the optimizer.

    torch's ``set_optimizer_state_dict`` drops the options of groups without parameters.
    """
    groups = list(state_dict["param_groups"])
    for index, group in enumerate(own[: len(groups)]):
        if groups[index] == {"params": []}:
            groups[index] = {**group, "params": []}
    return {**state_dict, "param_groups": groups}


def _without_unused_moments(
    optimizer: FusedOptimizer, state_dict: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Removes moments that belong to other classes of optimizers, if all of their elements are 0.

    For example, DeepSpeedCPULion writes an unused ``exp_avg_sq`` of zeros.
    """
    of_others = names_of_all_buffers()
    of_others -= {buffer.name for each in _descriptions(optimizer) for buffer in each.buffers}
    states = dict(state_dict["state"])
    for key, state in states.items():
        if isinstance(state, Mapping):
            states[key] = {
                name: value
                for name, value in state.items()
                if name not in of_others or not isinstance(value, Tensor) or value.any()
            }
    return {**state_dict, "state": states}


def _check_saved_groups(optimizer: FusedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks that a state dict has all required options, and nothing that would change steps."""
    operation, name = operation_of(optimizer), type(optimizer).__name__
    users_may_add = True
    for index, group in enumerate(state_dict["param_groups"]):
        where = f"{operation}: param_groups[{index}]"
        described = optimizer.description_of(group)
        own = optimizer.param_groups[index : index + 1]  # none if the numbers of groups differ
        if own and optimizer.description_of(own[0]) is not described:
            raise ValueError(
                f"{operation}: algorithm of param_groups[{index}] must be {own[0]['algorithm']!r}, "
                f"as in the optimizer, got {group.get('algorithm', 'muon')!r}"
            )
        options = described.options
        required = [each.name for each in options if each.on_load == "required"]
        flags = [o.name for o in options if not o.is_read and o.on_load == "off if missing"]
        is_adam = any(each.name == "amsgrad" for each in options)
        missing = [each for each in required if each not in group]
        # Files of RAdam, Adamax and others lack 'amsgrad'. Those of FusedAdam and of transformers'
        # AdamW have 'bias_correction' or 'correct_bias' instead.
        if is_adam and not {"amsgrad", "bias_correction", "correct_bias"} & group.keys():
            missing.append("amsgrad")
        if missing:
            raise ValueError(f"{where} must have {missing}, got {list(group)}")
        # Groups that amp_ext or torch since 2.4 wrote may have entries of users.
        has_flags = bool(flags) and all(flag in group for flag in flags)
        users_may_add_here = "master_weights" in group or has_flags
        users_may_add = users_may_add and users_may_add_here
        unknown = _unknown_among(optimizer, group, users_may_add_here)
        if unknown:
            raise ValueError(
                f"{where} must have only options of {name}, got {unknown}. Delete them from the "
                "file if they don't change a step, or add the same keys to the optimizer's groups"
            )
        _check_flags(optimizer, group, index)
    states = [state for state in state_dict["state"].values() if isinstance(state, Mapping)]
    unknown = _unknown_among(optimizer, [key for state in states for key in state], users_may_add)
    if unknown:
        raise ValueError(
            f"{operation}: state must have only entries of {name}, got {unknown}. Delete them from "
            "the file if they don't change a step"
        )


def _descriptions(optimizer: FusedOptimizer) -> list[OptimizerDescription]:
    """Returns the descriptions of the formulas that the optimizer's groups have."""
    of_groups = map(optimizer.description_of, optimizer.param_groups)
    return [*dict.fromkeys((optimizer.description, *of_groups))]


def _unknown_among(
    optimizer: FusedOptimizer, keys: Iterable[Any], users_may_add: bool
) -> list[str]:
    """Returns the keys that the optimizer does not know and that may change what a step does."""
    known = {
        *_OF_EVERY_GROUP,
        *_SAVED_FLAGS,
        *MASTER_KEYS,
        *optimizer.defaults,
        *(key for group in optimizer.param_groups for key in group),
        *(option.name for each in _descriptions(optimizer) for option in each.options),
        *(buffer.name for each in _descriptions(optimizer) for buffer in each.buffers),
    }
    of_others = {*NAMES_OF_OPTIONS, *names_of_all_buffers()}
    texts = dict.fromkeys(key for key in keys if isinstance(key, str) and key not in known)
    return [key for key in texts if not users_may_add or key in of_others]


def _check_flags(optimizer: FusedOptimizer, group: Options, index: int) -> None:
    own = optimizer.param_groups
    for name in sorted(group.keys() & {*_SAVED_FLAGS}):
        is_wanted = name in ("bias_correction", "correct_bias")
        why = ""
        if name == "fixed_decay":
            why = ": the weight decay of a step is multiplied by lr"
        elif name == "weight_decouple":
            is_wanted = index < len(own) and bool(own[index]["decoupled_weight_decay"])
            why = ". Set decoupled_weight_decay of the optimizer to the value in the file"
        elif not is_wanted:
            why = (
                ". Set it to False in the state dict, or use an optimizer of torch.optim for "
                f"{name} steps"
            )
        if bool(group[name]) != is_wanted:
            place = f"{operation_of(optimizer)}: {name} of param_groups[{index}"
            wanted = "] must be True, got " if is_wanted else "] must be False, got "
            raise ValueError(f"{place}{wanted}{group[name]}{why}")


def _with_own_steps(state_dict: Mapping[str, Any]) -> tuple[list[Options], dict[Any, Any]]:
    """Copies the step count of a group, if it has one, into the states of its parameters.

    FusedAdam of apex and TransformerEngine counts the steps of a whole group.
    """
    groups, states = [], dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        kept = dict(group)
        if kept.pop("bias_correction", False) and "step" in kept:
            step = kept.pop("step")
            for key in group["params"]:
                if states.get(key):
                    states[key] = {"step": step, **states[key]}
        groups.append(kept)
    return groups, states


def _in_order_of_names(
    operation: str, groups: Sequence[Options], saved_groups: Sequence[Options]
) -> list[Options]:
    """Returns the groups of a file, with their state keys in the order of our parameters.

    Parameters are matched by name if the file and the optimizer have the same names, otherwise by
    position. Keys that are names, or that FullyShardedDataParallel flattened, stay in place: the
    code that wrote them has already matched the names.
    """
    for index, group in enumerate(groups):
        check_params(group, f"{operation}: %s of group {index}")
    own_lengths, saved_lengths = (
        [len(group["params"]) for group in each] for each in (groups, saved_groups)
    )
    if len(own_lengths) != len(saved_lengths):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if own_lengths != saved_lengths:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )
    in_order = [dict(group) for group in saved_groups]
    own = [_names_in(group) for group in groups]
    saved = [_names_in(group) for group in saved_groups]
    for group, loaded in zip(groups, in_order, strict=True):
        has_names = any(isinstance(key, str) for key in loaded["params"])
        if has_names or any(map(is_flattened, group["params"])):
            loaded.pop("param_names", None)
            saved = [[] for _ in saved]
    indices = _indices_by_name([*chain(*own)], [*chain(*saved)])
    group_of = [group for group, names in enumerate(saved) for _ in names]
    places = [(group, name) for group, names in enumerate(own) for name in names]
    for (place, name), index in zip(places, indices, strict=False):
        if group_of[index] != place:
            raise ValueError(
                f"{operation}: param_names of param_groups[{place}] must have {name!r}, got it in "
                f"param_groups[{group_of[index]}]"
            )
    for loaded, names, saved_names in zip(in_order, own, saved, strict=True):
        indices = _indices_by_name(names, saved_names)
        if indices:
            loaded["params"] = [loaded["params"][index] for index in indices]
    return in_order


def _indices_by_name(own: Sequence[str], saved: Sequence[str]) -> list[int]:
    """Returns the index in ``saved`` of each name, or an empty list if the names differ.

    Compares full names first, because a module may be named like a wrapper ("module").
    """
    for names, others in ((own, saved), (without_wrappers(own), without_wrappers(saved))):
        places = {name: index for index, name in enumerate(others)}
        if len(places) == len(others) == len(names) and places.keys() == set(names):
            return [places[name] for name in names]
    return []


def without_wrappers(names: Iterable[str]) -> list[str]:
    """Returns names of parameters without the parts that wrappers such as DDP insert."""
    return [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]


def _names_in(group: Options) -> list[str]:
    """Returns the names of a group's parameters, or an empty list if a parameter has no name."""
    names = group.get("param_names")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return []
    return list(names) if len(names) == len(group["params"]) else []


def _loaded_groups(optimizer: FusedOptimizer, saved_groups: Sequence[Options]) -> list[Options]:
    """Returns the groups of a file, with the optimizer's parameters and all options filled in.

    A missing option of torch gets the value that torch assumes. Other missing options keep the
    values that the optimizer was constructed with.
    """
    pairs = list(zip(optimizer.param_groups, saved_groups, strict=True))
    groups: list[Options] = copy.deepcopy(
        [
            {name: group[name] for name in optimizer.defaults if name in group}
            | {
                each.name: None if each.type == "unused flag or none" else False
                for each in optimizer.description_of(group).options
                if each.on_load == "off if missing"
            }
            | saved
            | {name: group[name] for name in CONFIGURED_OPTIONS if name in group}
            | {**optimizer._fixed_options, "params": None}
            for group, saved in pairs
        ]
    )
    for loaded, (group, _) in zip(groups, pairs, strict=True):
        loaded["params"] = group["params"]
        if "param_names" in group:
            loaded["param_names"] = group["param_names"]
    return groups


def _copied_states(
    optimizer: FusedOptimizer,
    saved_groups: Sequence[Options],
    saved_states: Mapping[Any, Any],
    groups: Sequence[Options],
) -> dict[Any, Any]:
    """Checks the states of a file, and returns copies in the formats that the groups ask for."""
    operation = operation_of(optimizer)
    states: dict[Any, Any] = {}
    param_keys = set()
    for group_index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        spec = optimizer.state_spec_of(group)
        for index, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            param_keys.add(key)
            if saved_states.get(key):
                placed = PlacedParam(spec, optimizer._stored_beside(param), group_index, index)
                states[param] = loaded_state(placed, saved_states[key], operation)
    others = {key: value for key, value in saved_states.items() if key not in param_keys}
    if others and len(others) == len(saved_states):
        raise ValueError(
            f"{operation}: state must have the keys in params of param_groups, got "
            f"{first_keys(others)}"
        )
    return {**states, **copy.deepcopy(others)}


def _check_type(value: Any, wanted_type: type | tuple[type, ...], wanted: str) -> None:
    if not isinstance(value, wanted_type):
        raise ValueError(f"{wanted}, got {type(value).__name__}")
