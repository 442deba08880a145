"""Measures the errors of updates: optimizers get the same gradients as a reference in float64.

The gradients don't depend on the parameters, so errors don't influence later gradients, and a run
of a few seconds suffices. `tests/programs/test_update_errors.py` checks bounds of the errors.

    PYTHONPATH=. python benchmarks/update_errors.py  # errors of our optimizers with bf16 states
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from gradient_streams import STREAMS, gradients
from torch import Tensor

from amp_ext import optim
from amp_ext.optim.fused_optimizer import FusedOptimizer

BETAS = (0.9, 0.999)
# The first updates are excluded, because their bias correction is large.
FIRST_STEPS = 10


class Scheme(Protocol):
    """An optimizer that returns its updates instead of applying them.

    ``second_moment`` is the stored second moment as float64, or None if the optimizer has none.
    """

    second_moment: Tensor | None

    def step(self, grad: Tensor) -> Tensor:
        """Takes one gradient and returns the update, divided by the learning rate."""


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
        spread: Standard deviation of the same error.
    """

    update: float
    largest: float
    way: float
    bias: float = math.nan
    spread: float = math.nan


def shadow_run(gradients: Tensor, exact: Scheme, schemes: dict[str, Scheme]) -> dict[str, Errors]:
    """Feeds ``gradients``, [steps, rows, columns], to all schemes and compares with ``exact``."""
    squares = dict.fromkeys(schemes, 0.0)
    largest = dict.fromkeys(schemes, 0.0)
    strayed = dict.fromkeys(schemes, torch.zeros(gradients.shape[1:]).double())
    exact_squares, way = 0.0, torch.zeros(gradients.shape[1:]).double()
    for index, grad in enumerate(gradients):
        wanted = exact.step(grad)
        updates = {name: scheme.step(grad) for name, scheme in schemes.items()}
        if index < FIRST_STEPS:
            continue
        exact_squares += wanted.square().sum().item()
        way = way + wanted
        for name, update in updates.items():
            difference = update.double() - wanted
            squares[name] += difference.square().sum().item()
            largest[name] = max(largest[name], difference.abs().max().item())
            strayed[name] = strayed[name] + difference
    return {
        name: Errors(
            math.sqrt(squares[name] / exact_squares),
            largest[name],
            (strayed[name].norm() / way.norm()).item(),
            *error_of_root(scheme.second_moment, exact.second_moment),
        )
        for name, scheme in schemes.items()
    }


def error_of_root(moment: Tensor | None, exact: Tensor | None) -> list[float]:
    """Returns mean and standard deviation of ln sqrt(moment / exact) over positive elements."""
    if moment is None or exact is None:
        return []
    both = (moment > 0) & (exact > 0)
    error = (moment.double()[both] / exact[both]).log() / 2
    return [error.mean().item(), error.std().item()]


class Lion64:
    """Lion in float64, which torch does not have."""

    second_moment = None

    def __init__(self, shape: torch.Size, beta2: float = 0.99) -> None:
        self.exp_avg, self.beta2 = torch.zeros(shape).double(), beta2

    def step(self, grad: Tensor) -> Tensor:
        update = (self.exp_avg * BETAS[0] + grad * (1 - BETAS[0])).sign()
        self.exp_avg = self.exp_avg * self.beta2 + grad * (1 - self.beta2)
        return update


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


def exact_adamw(shape: torch.Size, **options: Any) -> Scheme:
    """Returns torch's AdamW in float64, without weight decay."""
    return OptimizerScheme(torch.optim.AdamW, shape, torch.float64, weight_decay=0.0, **options)


def exact_sgd(shape: torch.Size, momentum: float) -> Scheme:
    """Returns torch's SGD in float64."""
    return OptimizerScheme(torch.optim.SGD, shape, torch.float64, momentum=momentum)


def print_errors_of_optimizers() -> None:
    """Prints the errors of our optimizers with bfloat16 states, for both ways of rounding."""

    def run(name: str, kind: Any, exact: Scheme, stream: Tensor, **options: Any) -> None:
        options["state_dtype"] = torch.bfloat16
        schemes: dict[str, Scheme] = {
            rounding: OptimizerScheme(kind, stream.shape[1:], rounding=rounding, **options)
            for rounding in ("dither", "nearest")
        }
        for rounding, errors in shadow_run(stream, exact, schemes).items():
            bias = "" if math.isnan(errors.bias) else f"  ln sqrt(v) {errors.bias:+.4f}"
            print(
                f"{name:26} {rounding:8} update {errors.update:7.2%}  largest {errors.largest:5.2f}"
                f"  way {errors.way:7.2%}{bias}"
            )

    for name in STREAMS:
        stream = gradients(name)
        shape = stream.shape[1:]
        for betas in (BETAS, (0.9, 0.95)):
            options = {"betas": betas, "weight_decay": 0.0}
            title = f"AdamW {betas[1]}, {name}"
            run(title, optim.AdamW, exact_adamw(shape, betas=betas), stream, **options)
        amsgrad = {"amsgrad": True, "weight_decay": 0.0}
        exact = exact_adamw(shape, amsgrad=True)
        run(f"amsgrad, {name}", optim.AdamW, exact, stream, **amsgrad)
        run(f"SGD 0.99, {name}", optim.SGD, exact_sgd(shape, 0.99), stream, momentum=0.99)
        run(f"Lion 0.99, {name}", optim.Lion, Lion64(shape), stream)


if __name__ == "__main__":
    print_errors_of_optimizers()
