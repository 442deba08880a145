"""Measures the errors of updates: optimizers get the same gradients as a reference in float64.

The gradients don't depend on the parameters, so errors don't influence later gradients, and a run
of a few seconds suffices. `tests/programs/test_update_errors.py` checks bounds of the errors.

    PYTHONPATH=. python benchmarks/update_errors.py  # errors of our optimizers with bf16 states
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from gradient_streams import STREAMS, gradients
from torch import Tensor

from amp_ext import optim
from amp_ext.optim.fused_optimizer import FusedOptimizer

BETAS = (0.9, 0.999)
# The first updates are excluded, because their bias correction is large.
FIRST_STEPS = 10


@dataclasses.dataclass
class Errors:
    """The errors of a scheme relative to float64.

    Attributes:
        update: RMS of the updates' errors, divided by the RMS of exact updates.
        largest: The largest error of an update of one element, divided by the learning rate.
        way: Norm of the error of the total change (the sum of all updates), relative to the total
            change.
        bias: Mean over the elements of the error of ln sqrt(v) after the last step, where v is the
            second moment. NaN without second moments.
    """

    update: float
    largest: float
    way: float
    bias: float = math.nan


def shadow_run(
    gradients: Tensor, exact: OptimizerScheme, schemes: dict[str, OptimizerScheme]
) -> dict[str, Errors]:
    """Feeds ``gradients``, [steps, rows, columns], to all schemes and compares with ``exact``."""
    found = {name: Errors(0.0, 0.0, 0.0) for name in schemes}
    strayed = dict.fromkeys(schemes, torch.zeros(gradients.shape[1:]).double())
    exact_squares, way = 0.0, torch.zeros(gradients.shape[1:]).double()
    for index, grad in enumerate(gradients):
        wanted = exact.step(grad)
        updates = {name: scheme.step(grad) for name, scheme in schemes.items()}
        if index < FIRST_STEPS:
            continue
        exact_squares += wanted.square().sum().item()
        way = way + wanted
        for name, errors in found.items():
            difference = updates[name].double() - wanted
            errors.update += difference.square().sum().item()
            errors.largest = max(errors.largest, difference.abs().max().item())
            strayed[name] = strayed[name] + difference
    for name, errors in found.items():
        errors.update = math.sqrt(errors.update / exact_squares)
        errors.way = (strayed[name].norm() / way.norm()).item()
        moment = schemes[name].second_moment
        if moment is not None:
            both = (moment > 0) & (exact.second_moment > 0)
            error = (moment[both] / exact.second_moment[both]).log() / 2
            errors.bias = error.mean().item()
    return found


class Lion64(torch.optim.Optimizer):
    """Lion in float64, which torch does not have."""

    def __init__(self, params: list[Tensor], lr: float = 1.0, beta2: float = 0.99) -> None:
        super().__init__(params, {"lr": lr, "beta2": beta2})
        self.exp_avg = torch.zeros_like(params[0])

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        (param,) = group["params"]
        update = self.exp_avg * BETAS[0] + param.grad * (1 - BETAS[0])
        param -= group["lr"] * update.sign()
        self.exp_avg.lerp_(param.grad, 1 - group["beta2"])


class OptimizerScheme:
    """A scheme that steps an optimizer of torch.optim or amp_ext.optim.

    lr is 1 and the parameter is reset to 0 before each step, so it becomes the negative update.

    Args:
        optimizer: The class of the optimizer.
        shape: The shape of the gradients.
        dtype: The dtype of the parameter and, unless an option says otherwise, of the states.
        options: Keyword arguments of the optimizer, without lr.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        shape: torch.Size,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.param = torch.zeros(shape, dtype=dtype, requires_grad=True)
        self.optimizer = optimizer([self.param], lr=1.0, **options)

    def step(self, grad: Tensor) -> Tensor:
        with torch.no_grad():
            self.param.zero_()
        self.param.grad = grad.to(self.param.dtype, copy=True)
        self.optimizer.step()
        return -self.param.detach()

    @property
    def second_moment(self) -> Tensor | None:
        """Stored second moment, dequantized to float64; with amsgrad, the largest so far."""
        state = self.optimizer.state[self.param]
        if isinstance(self.optimizer, FusedOptimizer):
            state = optim.float32_state_dict(self.optimizer)["state"][0]
        moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        return None if moment is None else moment.double()


exact = functools.partial(OptimizerScheme, dtype=torch.float64)
exact_adamw = functools.partial(exact, torch.optim.AdamW, weight_decay=0.0)
exact_sgd = functools.partial(exact, torch.optim.SGD)
exact_lion = functools.partial(exact, Lion64)

ADAMW = {"weight_decay": 0.0}
#: Maps a title to our optimizer, the exact one, and the options of both.
ROWS: dict[str, tuple[Any, Callable[..., OptimizerScheme], dict[str, Any]]] = {
    "AdamW 0.999": (optim.AdamW, exact_adamw, ADAMW | {"betas": BETAS}),
    "AdamW 0.95": (optim.AdamW, exact_adamw, ADAMW | {"betas": (0.9, 0.95)}),
    "amsgrad": (optim.AdamW, exact_adamw, ADAMW | {"amsgrad": True}),
    "SGD 0.99": (optim.SGD, exact_sgd, {"momentum": 0.99}),
    "Lion 0.99": (optim.Lion, exact_lion, {}),
}


def print_errors_of_optimizers() -> None:
    """Prints the errors of our optimizers with bfloat16 states, for both ways of rounding."""
    for name in STREAMS:
        stream = gradients(name)
        shape = stream.shape[1:]
        for title, (kind, make_exact, options) in ROWS.items():
            make = functools.partial(
                OptimizerScheme, kind, shape, state_dtype=torch.bfloat16, **options
            )
            schemes = {rounding: make(rounding=rounding) for rounding in ("dither", "nearest")}
            found = shadow_run(stream, make_exact(shape, **options), schemes)
            for rounding, errors in found.items():
                bias = "" if math.isnan(errors.bias) else f"  ln sqrt(v) {errors.bias:+.4f}"
                print(
                    f"{title + ', ' + name:26} {rounding:8} update {errors.update:7.2%}  "
                    f"largest {errors.largest:5.2f}  way {errors.way:7.2%}{bias}"
                )


if __name__ == "__main__":
    print_errors_of_optimizers()
