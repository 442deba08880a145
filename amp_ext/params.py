"""The parameters of an optimizer, and their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups of an optimizer.

    Args:
        optimizer: The optimizer, or a wrapper that delegates to it.
    """
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_params(group: dict[str, Any], where: str) -> None:
    """Checks that the parameters of a group can be read repeatedly, in the same order.

    Args:
        group: The group.
        where: Start of the error, such as "Adam: %s of group 1"; ``%s`` becomes "params".

    Raises:
        ValueError: If the group has no "params".
        TypeError: If "params" is an iterator, which can be read only once, or a set, whose order
            may differ in a resumed process.
    """
    if "params" not in group:
        raise ValueError(f"{where % 'params'} must be present, got {list(group)}")
    params = group["params"]
    if isinstance(params, (Iterator, set, frozenset)):
        raise TypeError(f"{where % 'params'} must be a list, got {type(params).__name__}")


def name_of_param(optimizer: torch.optim.Optimizer | None, index: int) -> str:
    """Returns the name of a parameter, or its position such as "group 0, param 3".

    Args:
        optimizer: The optimizer, or None if it no longer exists.
        index: Index in the list from :func:`params_of`. If out of range, the name is empty.
    """
    names = [] if optimizer is None else names_of_params(optimizer)
    return names[index] if index < len(names) else ""


def name_in_groups(optimizer: torch.optim.Optimizer, param: Tensor) -> str:
    """Returns the name of a parameter of an optimizer, see :func:`name_of_param`."""
    return name_of_param(optimizer, [*map(id, params_of(optimizer))].index(id(param)))


def names_of_params(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the name of each parameter, or its position, in the order of the groups."""
    groups = optimizer.param_groups
    uses = Counter(name for group in groups for name in group.get("param_names") or ())
    found = []
    for group_index, group in enumerate(groups):
        names = group.get("param_names")
        for index in range(len(group["params"])):
            name = f"group {group_index}, param {index}"
            if names:
                name = names[index] if uses[names[index]] == 1 else f"{name} ({names[index]})"
            found.append(name)
    return found
