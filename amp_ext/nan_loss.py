"""Drops an iteration whose loss is inf or NaN."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from amp_ext.plain_numbers import is_number, plain

_LOGGER = logging.getLogger("amp_ext")


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
                first.fill_(torch.iinfo(torch.int64).max)  # the value that an update leaves
    scaler._per_optimizer_states.clear()
