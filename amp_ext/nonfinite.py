"""Finds the tensors that hold inf or NaN, and drops iterations with a bad loss."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.plain_numbers import is_number, plain

__all__ = ["check_for_overflow", "find_nonfinite", "handle_nan_loss"]

_LOGGER = logging.getLogger("amp_ext")
_NAMED_AT_MOST = 5


@torch.no_grad()
def find_nonfinite(
    source: torch.nn.Module | torch.optim.Optimizer, *, params: bool = False
) -> dict[str, int]:
    """Counts the infs and NaNs of each gradient, in one launch for each device and dtype.

    Returns the counts on the host, so this waits for a GPU.

    Args:
        source: A model or an optimizer. Without unique names, as from ``named_parameters()``, a
            parameter of an optimizer is called by position: "group 0, param 3", or with its
            ambiguous name "group 0, param 3 (weight)".
        params: If true, checks parameters and buffers instead of gradients. (An optimizer has no
            buffers.)

    Returns:
        A dict from the name of each tensor with inf or NaN to its number of bad elements, in the
        order of the source.

    Raises:
        TypeError: If ``source`` is neither a model nor an optimizer.

    Example::

        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step_skipped(optimizer, wait=True):
            print(amp_ext.find_nonfinite(model))  # {"head.weight": 12}
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in _named_tensors(source, params):
        scanned = tensor if params else tensor.grad
        if scanned is None:
            continue
        if scanned.is_sparse:
            scanned = scanned.coalesce()
        if scanned.layout is not torch.strided:
            scanned = scanned.values()
        if hasattr(scanned, "to_local"):
            scanned = scanned.to_local()
        if scanned.is_complex():
            scanned = torch.view_as_real(scanned.resolve_conj())
        if scanned.is_floating_point():
            scanned = scanned.detach()
            tensors[name] = scanned.float() if scanned.itemsize == 1 else scanned
    by_device: dict[torch.device, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        by_device[tensor.device].append(name)
    counts: dict[str, int] = {}
    for names in by_device.values():
        found = ops.count_nonfinite([tensors[name] for name in names])
        counts.update(zip(names, found.tolist(), strict=True))
    return {name: counts[name] for name in tensors if counts[name]}


def check_for_overflow(model: torch.nn.Module) -> bool:
    """Returns True if a gradient of a model holds inf or NaN, and logs a warning with the names.

    Waits for a GPU. The logger is "amp_ext".

    Args:
        model: A model after its backward pass.
    """
    counts = find_nonfinite(model)
    if counts:
        _LOGGER.warning("check_for_overflow: inf or NaN in %s", _listed(counts))
    return bool(counts)


def handle_nan_loss(
    loss: Tensor | float,
    *optimizers: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> bool:
    """Returns True if a loss is inf or NaN, and in that case drops the iteration.

    Sets the gradients of the optimizers to None, including gradients accumulated in earlier passes,
    and makes the scaler forget everything since its last update. The scale stays, because it did
    not cause the bad loss. Call this before or after the backward pass::

        if amp_ext.handle_nan_loss(loss, optimizer, scaler=scaler):
            continue

    Without this call, a scaler would skip the step too, but halve the scale. Reading the loss waits
    for a GPU. The logger is "amp_ext".

    Args:
        loss: The loss, one number, before it is scaled. A tensor of several elements counts as bad
            if one of them is.
        optimizers: The optimizers that this iteration would have stepped.
        scaler: The scaler of these optimizers, or None.

    Raises:
        TypeError: If ``loss`` is neither a tensor nor a number, or a scaler is passed as an
            optimizer.
    """
    loss = plain(loss)
    if not (isinstance(loss, Tensor) or is_number(loss)):
        raise TypeError(
            f"handle_nan_loss: loss must be a tensor or a number, got {type(loss).__name__}"
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.amp.GradScaler):
            raise TypeError(
                "handle_nan_loss: optimizers must be torch.optim.Optimizer objects, got "
                f"{type(optimizer).__name__}. Pass the scaler as scaler=."
            )
    if isinstance(loss, Tensor):
        values = loss.detach()
    else:
        values = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    if bool(values.isfinite().all()):
        return False
    what = "NaN" if bool(values.isnan().any()) else "inf"
    _LOGGER.warning("handle_nan_loss: the loss is %s; this iteration is dropped", what)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    if scaler is not None and scaler.is_enabled():
        drop_iteration(scaler)
    return True


def drop_iteration(scaler: torch.amp.GradScaler) -> None:
    """Makes a scaler forget all scans since its last update.

    Args:
        scaler: A scaler of amp_ext or torch.
    """
    for state in scaler._per_optimizer_states.values():
        if "scan" in state:
            for first in state["scan"].first_nonfinites.values():
                first.fill_(torch.iinfo(torch.int64).max)  # as an update does
    scaler._per_optimizer_states.clear()


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


def names_of_params(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the name of each parameter, or its position, in the order of the groups."""
    return [name for name, _ in _named_tensors(optimizer, params=True)]


def _named_tensors(
    source: torch.nn.Module | torch.optim.Optimizer, params: bool
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(source, torch.nn.Module):
        yield from source.named_parameters()
        if params:
            yield from source.named_buffers()
    elif hasattr(source, "param_groups"):
        groups = source.param_groups
        uses = Counter(name for group in groups for name in group.get("param_names") or ())
        for group_index, group in enumerate(groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                name = f"group {group_index}, param {index}"
                if names:
                    name = names[index] if uses[names[index]] == 1 else f"{name} ({names[index]})"
                yield name, param
    else:
        raise TypeError(
            "find_nonfinite: source must be a torch.nn.Module or a torch.optim.Optimizer, got "
            f"{type(source).__name__}"
        )


def _listed(counts: dict[str, int]) -> str:
    shown = [f"{name} ({count})" for name, count in list(counts.items())[:_NAMED_AT_MOST]]
    rest = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
