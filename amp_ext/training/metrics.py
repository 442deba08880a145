"""Figures of a training step, which stay on the device until they are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Figures of one ``train_step``.

    Every tensor is one number on its device and keeps its value in later steps. ``float()``,
    ``bool()``, ``.item()`` and printing wait until the GPU has come that far, each for itself;
    :meth:`to_dict` reads all with one wait. Nothing else waits.

    Attributes:
        loss: Loss of the batch, as the loss function gave it: neither scaled nor divided.
        loss_scale: Loss scale of this batch; 1 without a scaler.
        grad_norm: Norm of the unscaled gradients before clipping. None where nobody measures it
            (without ``max_grad_norm`` and a guard) or no optimizer step was due.
        skipped: Whether the step was skipped since gradients were inf or NaN, or by the optimizer's
            ``norm_guard``, a bool; always false without both. None where no optimizer step was due
            (gradient accumulation).
        n_averaged: How many averages of the weights were taken, after this step; None without an
            average, or where no optimizer step was due.
    """

    loss: Tensor
    loss_scale: Tensor
    grad_norm: Tensor | None = None
    skipped: Tensor | None = None
    n_averaged: Tensor | None = None

    def to_dict(self) -> dict[str, float | bool | None]:
        """Returns all figures as Python numbers; waits for the GPU once."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        device = self.loss.device
        numbers = torch.stack([value.to(device, torch.float64) for value in tensors.values()])
        figures: dict[str, float | bool | None] = dict.fromkeys(vars(self))
        figures.update(zip(tensors, numbers.tolist(), strict=True))
        if self.skipped is not None:
            figures["skipped"] = bool(figures["skipped"])
        if self.n_averaged is not None:
            figures["n_averaged"] = int(figures["n_averaged"] or 0)
        return figures
