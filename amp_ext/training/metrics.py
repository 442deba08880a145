"""The metrics of a training step, which stay on the device until they are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Metrics of one ``train_step``.

    Every tensor has one element on its device, and later steps do not change it. ``float()``,
    ``bool()``, ``.item()`` and printing wait for the GPU at each call; :meth:`to_dict` reads all
    metrics with one wait. Nothing else waits. After a batch that only accumulates gradients, the
    last three metrics are None.

    Attributes:
        loss: Loss of the batch as the loss function returned it, neither scaled nor divided.
        loss_scale: Loss scale of this batch; 1 without a scaler.
        grad_norm: Norm of the unscaled gradients before clipping; None if it is not measured
            (without ``max_grad_norm`` and a guard).
        skipped: Bool, true if the step was skipped by the scaler, because of inf or NaN, or by the
            optimizer's ``norm_guard``; always false without both.
        n_averaged: Number of weight averages taken so far; None without an average.
    """

    loss: Tensor
    loss_scale: Tensor
    grad_norm: Tensor | None = None
    skipped: Tensor | None = None
    n_averaged: Tensor | None = None

    def to_dict(self) -> dict[str, float | bool | None]:
        """Returns all metrics as Python numbers; waits for the GPU once."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        device = self.loss.device
        numbers = torch.stack([value.to(device, torch.float64) for value in tensors.values()])
        found = zip(tensors, numbers.tolist(), strict=True)
        kinds = {"skipped": bool, "n_averaged": int}
        read = {name: kinds.get(name, float)(number) for name, number in found}
        return dict.fromkeys(vars(self)) | read
