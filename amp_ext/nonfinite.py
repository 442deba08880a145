"""Finds the tensors that hold inf or NaN."""

from __future__ import annotations

import logging
from collections import defaultdict

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.params import names_of_params, params_of

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
    if isinstance(source, torch.nn.Module):
        named = [*source.named_parameters(), *(source.named_buffers() if params else ())]
    elif hasattr(source, "param_groups"):
        named = list(zip(names_of_params(source), params_of(source), strict=True))
    else:
        raise TypeError(
            "find_nonfinite: source must be a torch.nn.Module or a torch.optim.Optimizer, got "
            f"{type(source).__name__}"
        )
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
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
        shown = [f"{name} ({count})" for name, count in list(counts.items())[:_NAMED_AT_MOST]]
        rest = len(counts) - len(shown)
        listed = ", ".join(shown) + (f" and {rest} more" if rest else "")
        _LOGGER.warning("check_for_overflow: inf or NaN in %s", listed)
    return bool(counts)
