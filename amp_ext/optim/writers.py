"""Whose state dict it is: keys by which the files of other optimizers are told."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from amp_ext.optim.fused_optimizer import FusedOptimizer

__all__ = ["options_since", "other_writer"]

# Keys of groups and of states that one optimizer has and others have not. The first that a file
# has names its writer.
_TOLD_BY = {
    "acc_delta": "torch.optim.Adadelta",
    "beta2_decay": "torch.optim.Adafactor",
    "initial_accumulator_value": "torch.optim.Adagrad",
    "exp_inf": "torch.optim.Adamax",
    "lambd": "torch.optim.ASGD",
    "tolerance_grad": "torch.optim.LBFGS",
    "ns_steps": "torch.optim.Muon",
    "momentum_decay": "torch.optim.NAdam",
    "mu_product": "torch.optim.NAdam",
    "centered": "torch.optim.RMSprop",
    "etas": "torch.optim.Rprop",
    "init_zero": "apex.optimizers.FusedNovoGrad",
    "grad_averaging": "apex.optimizers.FusedLAMB",
}

# Those that some of the others have as well, and the next ones: looked at last.
_TOLD_LAST_BY = {
    "amsgrad": "Adam",
    "exp_avg_sq": "Adam",
    "dampening": "SGD",
    "momentum_buffer": "SGD",
}

# RAdam, Adamax and SparseAdam have no option of their own in every release. One of these stands in
# the groups of all others that have betas: Adam's, FusedAdam's, that of transformers, and ours.
_NOT_NEAR_RADAM = {"amsgrad", "bias_correction", "correct_bias", "dampening", "master_weights"}

# A patch of torch's names may put our classes there later.
_OF_TORCH = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}


def other_writer(
    optimizer: FusedOptimizer, groups: Iterable[Mapping[str, Any]], states: Mapping[Any, Any]
) -> str | None:
    """Returns which other optimizer wrote a state dict, with what tells it; None if none is known.

    A key that the optimizer has as well tells nothing, nor does one of a class that it extends.

    Args:
        optimizer: Which is to load it.
        groups: ``param_groups`` of the state dict.
        states: ``state`` of the state dict.
    """
    groups = list(groups)
    keys = {key for mapping in (*groups, *_mappings(states)) for key in mapping}
    keys -= optimizer.defaults.keys()
    for group in optimizer.param_groups:
        keys -= set(optimizer.buffer_names(group))
    told_by = _first_of(_TOLD_BY, keys) or _near_radam(groups)
    if told_by is None:
        extended = {base.__name__ for base in type(optimizer).__mro__}
        told_by = _first_of(
            {key: name for key, name in _TOLD_LAST_BY.items() if name not in extended}, keys
        )
        if told_by is not None:
            ours = any("master_weights" in group for group in groups)
            told_by = f"{'amp_ext' if ours else 'torch'}.optim.{told_by}"
    return told_by


def _first_of(table: Mapping[str, str], keys: Set[Any]) -> str | None:
    return next((f"{name}: it has {key!r}" for key, name in table.items() if key in keys), None)


def _near_radam(groups: Iterable[Mapping[str, Any]]) -> str | None:
    for group in groups:
        if group.keys() >= {"betas", "eps"} and group.keys().isdisjoint(_NOT_NEAR_RADAM):
            name = "RAdam"
            if "weight_decay" not in group:
                name = "SparseAdam"
            elif "capturable" in group and "decoupled_weight_decay" not in group:
                name = "Adamax"
            return f"torch.optim.{name}: it has 'betas' without 'amsgrad' or 'bias_correction'"
    return None


def options_since(kind: type) -> dict[str, Any]:
    """Returns what torch's optimizers give to files that were written before they had an option.

    Those are the defaults of their constructors, which do as it was before.

    Args:
        kind: One of our classes; what counts is the class of torch that has its name, or that of
            the nearest class that it extends.
    """
    for base in kind.__mro__:
        if base.__name__ in _OF_TORCH:
            parameters = inspect.signature(_OF_TORCH[base.__name__]).parameters.values()
            return {
                each.name: each.default for each in parameters if each.default is not each.empty
            }
    return {}


def _mappings(states: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    return (state for state in states.values() if isinstance(state, Mapping))
