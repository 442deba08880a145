"""Averages of weights that a test sets itself: the steps of the optimizer change none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_ext import ops
from amp_ext.optim import SGD, WeightAverage

MASTERS = {0: False, 8: "split8", 16: "split"}


class SetWeights:
    """Weights, the optimizer that holds them, and their average."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        decay: float | str = 0.999,
        low_bits: int = 0,
        **options: Any,
    ) -> None:
        """Makes parameters of copies of the weights; the first average is a copy of them."""
        self.params = [Parameter(weight.clone()) for weight in weights]
        self.optimizer = SGD(self.params, lr=0.0, master_weights=MASTERS[low_bits])
        self.low_bits = low_bits
        self.average = WeightAverage(self.optimizer, decay, **options)

    def load(self, averages: Sequence[Tensor], count: int) -> None:
        """Sets the averages, and how many were taken."""
        state = {"averages": [*averages], "steps": count, "n_averaged": count}
        self.average.load_state_dict(state)

    def set_masters(self, masters: Sequence[Tensor]) -> None:
        """Sets the residuals of split masters."""
        self.optimizer.init_state()
        for param, master in zip(self.params, masters, strict=True):
            (residual,) = (
                value
                for key, value in self.optimizer.state[param].items()
                if key.startswith("master")
            )
            residual.copy_(ops.split_fp32(param.detach(), master, self.low_bits))

    def take(self, weights: Sequence[Tensor] = ()) -> list[Tensor]:
        """Takes a step with these weights, or with the present ones; returns the averages."""
        with torch.no_grad():
            for param, weight in zip(self.params, weights, strict=False):
                param.copy_(weight)
        for param in self.params:
            param.grad = torch.zeros_like(param)
        self.optimizer.step()
        return self.average.averages
