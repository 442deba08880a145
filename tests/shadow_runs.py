"""Shadow runs: one stream of gradients feeds an optimizer in float64 and others beside it.

None of them moves a parameter, so errors do not feed back, and a run of seconds tells how far each
update of a scheme lies from the exact one.

    PYTHONPATH=. python tests/shadow_runs.py  # those of the optimizers, with states in bfloat16
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from harness.number_codes import (
    decode_q8h,
    decode_q8m,
    dither_words,
    encode_q8h,
    encode_q8m,
    encode_q8s,
    root_of,
    root_of_q8s,
    round_bfloat16,
)
from torch import Tensor

from amp_ext import optim
from amp_ext.optim.fused_optimizer import FusedOptimizer

BETAS, EPS = (0.9, 0.999), 1e-8
# Updates of the first steps, whose bias correction is large, do not count.
FIRST_STEPS = 10


class Scheme(Protocol):
    """An optimizer without its parameter.

    ``second_moment`` is what it divides by as it is stored, in float; None where there is none.
    """

    second_moment: Tensor | None

    def step(self, grad: Tensor) -> Tensor:
        """Takes one gradient, and returns the update in units of the learning rate."""


@dataclasses.dataclass
class Errors:
    """How far a scheme is from float64.

    Attributes:
        update: Root mean square of the difference of the updates, beside that of the updates.
        largest: The largest single difference of an update, in units of the learning rate.
        way: As ``update``, of the sums of all updates: what a parameter would have moved.
        bias: The mean over the elements of the difference of ln sqrt(v) after the last step.
        spread: The standard deviation of the same.
    """

    update: float
    largest: float
    way: float
    bias: float = math.nan
    spread: float = math.nan


def shadow_run(gradients: Tensor, exact: Scheme, schemes: dict[str, Scheme]) -> dict[str, Errors]:
    """Steps all with the same gradients, [steps, rows, columns], and compares with ``exact``."""
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
    """Mean and deviation of ln sqrt(moment / exact) over what is positive in both."""
    if moment is None or exact is None:
        return []
    both = (moment > 0) & (exact > 0)
    error = (moment.double()[both] / exact[both]).log() / 2
    return [error.mean().item(), error.std().item()]


class Adam64:
    """Adam in float64, in the order in which torch computes it."""

    def __init__(
        self, shape: torch.Size, betas: tuple[float, float] = BETAS, amsgrad: bool = False
    ) -> None:
        self.betas, self.amsgrad, self.steps = betas, amsgrad, 0
        self.exp_avg, self.exp_avg_sq, self.second_moment = torch.zeros(3, *shape).double()

    def step(self, grad: Tensor) -> Tensor:
        self.steps += 1
        grad = grad.double()
        beta1, beta2 = self.betas
        self.exp_avg = self.exp_avg + (grad - self.exp_avg) * (1 - beta1)
        self.exp_avg_sq = self.exp_avg_sq * beta2 + grad * grad * (1 - beta2)
        self.second_moment = (
            self.second_moment.maximum(self.exp_avg_sq) if self.amsgrad else self.exp_avg_sq
        )
        correction = math.sqrt(1 - beta2**self.steps)
        denominator = self.second_moment.sqrt() / correction + EPS
        return self.exp_avg / denominator / (1 - beta1**self.steps)


# What a number is after it was stored and loaded again.


def stored(value: Tensor, kind: str, step: int, stream: str) -> Tensor:
    """Float32 as a later step will load it.

    ``kind`` is "float32"; "nearest" or "dithered", which are bfloat16; "q8m" or "q8m dithered".
    """
    if kind == "float32":
        return value
    words = None
    if kind.endswith("dithered"):
        words = dither_words(0, value.numel(), step, stream).view(value.shape)
    if kind.startswith("q8m"):
        return decode_q8m(*encode_q8m(value, words))
    return round_bfloat16(value, words).float()


class CodedAdam:
    """Adam in float32 whose states are stored in the codes of ``number_codes``.

    Args:
        exp_avg: How the first moment is stored: a kind of ``stored``, "q8h" or "q8h dithered".
        exp_avg_sq: How the second moment is stored: a kind of ``stored``, or "q8s".
        maximum: How amsgrad's maximum is stored: a kind of ``stored``, or None without it.
    """

    def __init__(
        self,
        shape: torch.Size,
        betas: tuple[float, float],
        exp_avg: str,
        exp_avg_sq: str,
        maximum: str | None = None,
    ) -> None:
        self.betas, self.steps = betas, 0
        self.kinds = exp_avg, exp_avg_sq, maximum
        self.exp_avg, self.exp_avg_sq, self.second_moment = torch.zeros(3, *shape)

    def step(self, grad: Tensor) -> Tensor:
        self.steps += 1
        beta1, beta2 = self.betas
        exp_avg = self.exp_avg + (grad - self.exp_avg) * (1 - beta1)
        exp_avg_sq = self.exp_avg_sq * beta2 + grad * grad * (1 - beta2)
        fresh = exp_avg_sq if self.kinds[2] is None else self.second_moment.maximum(exp_avg_sq)
        correction = math.sqrt(1 - beta2**self.steps)
        update = exp_avg / (fresh.sqrt() / correction + EPS) / (1 - beta1**self.steps)
        self.store(exp_avg, exp_avg_sq, fresh)
        return update

    def store(self, exp_avg: Tensor, exp_avg_sq: Tensor, fresh: Tensor) -> None:
        """The second moment first: it gives the unit of q8h, as a later step will load it."""
        first, second, maximum = self.kinds
        if second == "q8s":
            words = dither_words(0, exp_avg_sq.numel(), self.steps, "second_moment")
            unit = root_of_q8s(*encode_q8s(exp_avg_sq, words.view(exp_avg_sq.shape)))
            self.exp_avg_sq = unit * unit
        else:
            self.exp_avg_sq = stored(exp_avg_sq, second, self.steps, "second_moment")
            unit = root_of(self.exp_avg_sq)
        if first.startswith("q8h"):
            words = None
            if first == "q8h dithered":
                words = dither_words(0, unit.numel(), self.steps, "first_moment").view(unit.shape)
            self.exp_avg = decode_q8h(encode_q8h(exp_avg, unit, words), unit)
        else:
            self.exp_avg = stored(exp_avg, first, self.steps, "first_moment")
        self.second_moment = self.exp_avg_sq
        if maximum is not None:
            self.second_moment = stored(fresh, maximum, self.steps, "second_moment")


class Momentum:
    """SGD's momentum in the dtype of ``zeros``, stored as ``kind`` of ``stored``."""

    second_moment = None

    def __init__(self, zeros: Tensor, momentum: float, kind: str = "float32") -> None:
        self.buffer, self.momentum, self.kind, self.steps = zeros, momentum, kind, 0

    def step(self, grad: Tensor) -> Tensor:
        self.steps += 1
        update = self.buffer * self.momentum + grad
        self.buffer = stored(update, self.kind, self.steps, "momentum")
        return update


class Lion:
    """Lion in the dtype of ``zeros``, stored as ``kind`` of ``stored``."""

    second_moment = None

    def __init__(self, zeros: Tensor, beta2: float = 0.99, kind: str = "float32") -> None:
        self.exp_avg, self.beta2, self.kind, self.steps = zeros, beta2, kind, 0

    def step(self, grad: Tensor) -> Tensor:
        self.steps += 1
        update = (self.exp_avg * BETAS[0] + grad * (1 - BETAS[0])).sign()
        exp_avg = self.exp_avg * self.beta2 + grad * (1 - self.beta2)
        self.exp_avg = stored(exp_avg, self.kind, self.steps, "lion")
        return update


class OptimizerScheme:
    """A class of torch.optim or amp_ext.optim as a scheme, with one parameter that is zero.

    Args:
        optimizer: The class.
        shape: Of the gradients.
        options: Of the class, without lr, which is 1 so that the parameter becomes the update.
    """

    def __init__(
        self, optimizer: Callable[..., torch.optim.Optimizer], shape: torch.Size, **options: Any
    ) -> None:
        self.param = torch.zeros(shape, requires_grad=True)
        self.optimizer = optimizer([self.param], lr=1.0, **options)

    def step(self, grad: Tensor) -> Tensor:
        with torch.no_grad():
            self.param.zero_()
        self.param.grad = grad.clone()
        self.optimizer.step()
        return -self.param.detach()

    @property
    def second_moment(self) -> Tensor | None:
        """By its name in torch, under which codes are numbers."""
        state = self.optimizer.state[self.param]
        if isinstance(self.optimizer, FusedOptimizer):
            state = optim.float32_state_dict(self.optimizer)["state"][0]
        moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        return None if moment is None else moment.float()


# How far a scheme may be from float64, on the streams of ``gradient_streams``: what the codes above
# measure, times 1.3, or times 1.6 for a single difference, which varies with the seed.


@dataclasses.dataclass(frozen=True)
class Bound:
    """Of the errors of the same names; the way of a stream without rare rows errs as updates do."""

    update: float
    largest: float
    way: float | None = None


AdamBounds = dict[tuple[float, float], dict[str, Bound]]

# By the kinds of first and second moment, betas and stream.
ADAM_BOUNDS: dict[tuple[str, str], AdamBounds] = {
    ("nearest", "dithered"): {
        (0.9, 0.999): {
            "two decades": Bound(0.013, 0.06),
            "half a decade": Bound(0.013, 0.06),
            "ending": Bound(0.013, 0.06),
            "leaning": Bound(0.015, 0.11, way=0.01),
            "permuted": Bound(0.014, 0.10),
            "tiny": Bound(0.015, 0.07),
            "sparse": Bound(0.008, 0.05),
            "rare": Bound(0.0065, 0.08),
            "model": Bound(0.013, 0.08),
        },
        (0.9, 0.95): {
            "two decades": Bound(0.006, 0.02),
            "half a decade": Bound(0.006, 0.02),
            "ending": Bound(0.006, 0.02),
            "leaning": Bound(0.006, 0.04, way=0.0008),
            "permuted": Bound(0.006, 0.02),
            "tiny": Bound(0.006, 0.02),
            "sparse": Bound(0.008, 0.02),
            "rare": Bound(0.007, 0.01),
            "model": Bound(0.007, 0.05),
        },
        (0.98, 0.999): {
            "leaning": Bound(0.018, 0.1, way=0.01),
            "rare": Bound(0.0105, 0.02),
            "model": Bound(0.014, 0.04, way=0.009),
        },
        (0.9, 0.9999): {
            "leaning": Bound(0.017, 0.12, way=0.011),
            "rare": Bound(0.005, 0.05),
            "model": Bound(0.0135, 0.08, way=0.0075),
        },
    },
    ("q8h dithered", "dithered"): {
        (0.9, 0.999): {
            "two decades": Bound(0.034, 0.20),
            "half a decade": Bound(0.034, 0.20),
            "ending": Bound(0.034, 0.20),
            "leaning": Bound(0.035, 0.50, way=0.011),
            "permuted": Bound(0.031, 0.60),
            "tiny": Bound(0.031, 0.20),
            "sparse": Bound(0.034, 0.20),
            # The ratio of a row that is seen for the first time is 3.2, where codes are up to 0.39
            # roots apart, of which a step keeps 0.9.
            "rare": Bound(0.035, 0.35),
            "model": Bound(0.035, 0.60, way=0.02),
        },
        (0.9, 0.95): {
            "two decades": Bound(0.030, 0.07),
            "half a decade": Bound(0.030, 0.07),
            "ending": Bound(0.030, 0.09),
            "leaning": Bound(0.033, 0.17, way=0.003),
            "permuted": Bound(0.029, 0.07),
            "tiny": Bound(0.029, 0.07),
            "sparse": Bound(0.035, 0.05),
            "rare": Bound(0.035, 0.04, way=0.03),
            "model": Bound(0.031, 0.15, way=0.015),
        },
        (0.98, 0.999): {
            "leaning": Bound(0.075, 0.5, way=0.018),
            "rare": Bound(0.067, 0.09, way=0.048),
            "model": Bound(0.092, 0.6, way=0.045),
        },
        # Ratios above 8 are too small.
        (0.9, 0.9999): {
            "leaning": Bound(0.105, 1.0, way=0.017),
            "rare": Bound(0.16, 1.2),
            "model": Bound(0.19, 1.3, way=0.11),
        },
    },
    # A member that is a hundredth of its group's largest has codes of 1 to 3, between which dither
    # wanders: few single updates are then off by their size and more.
    ("q8h dithered", "q8s"): {
        (0.9, 0.999): {
            "two decades": Bound(0.12, 1.8),
            "half a decade": Bound(0.052, 0.4),
            "ending": Bound(0.053, 0.25),
            "leaning": Bound(0.06, 0.50, way=0.03),
            "permuted": Bound(0.068, 0.9),
            "tiny": Bound(0.064, 0.6),
            "sparse": Bound(0.038, 0.8),
            "rare": Bound(0.044, 2.5),
            "model": Bound(0.06, 1.0, way=0.035),
        },
        (0.9, 0.95): {
            "two decades": Bound(0.11, 1.8),
            "half a decade": Bound(0.033, 0.1),
            "ending": Bound(0.038, 0.1),
            "leaning": Bound(0.036, 0.2, way=0.0035),
            "permuted": Bound(0.048, 0.45),
            "tiny": Bound(0.034, 0.1),
            "sparse": Bound(0.048, 0.9),
            "rare": Bound(0.1, 1.1),
            "model": Bound(0.06, 3.0, way=0.018),
        },
        (0.98, 0.999): {
            "leaning": Bound(0.087, 0.6, way=0.032),
            "rare": Bound(0.078, 0.5, way=0.06),
            "model": Bound(0.097, 0.5, way=0.05),
        },
        (0.9, 0.9999): {
            "leaning": Bound(0.113, 1.0, way=0.034),
            "rare": Bound(0.16, 2.9),
            "model": Bound(0.195, 1.3, way=0.11),
        },
    },
}

# Of ln sqrt(v) at beta2 = 0.999, by the kind of the second moment. A number that only decays is not
# independent of the words that rounded it, so its decay may be some per cent too fast.
LARGEST_BIAS = {"dithered": 0.01, "q8s": 0.03}

# The update's error on any stream, by kind and momentum. To nearest a buffer freezes in rows
# without gradients unless it decays by more than half a code in a step.
MOMENTUM_BOUNDS: dict[str, dict[float, float]] = {
    "nearest": {0.9: 0.0045},
    "dithered": {0.9: 0.0062, 0.99: 0.0185, 0.999: 0.047},
    "q8m": {0.9: 0.024},
    "q8m dithered": {0.9: 0.032, 0.99: 0.096, 0.999: 0.22},
}

# The share of signs that may differ at beta2 = 0.99, by kind, on any stream.
LION_BOUNDS = {"nearest": 0.012, "dithered": 0.0031, "q8m dithered": 0.015}


def print_errors_of_optimizers() -> None:
    """Prints how far the optimizers are from float64 with states in bfloat16, by their rounding."""
    from harness.gradient_streams import STREAMS, gradients

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
        shape, zeros = stream.shape[1:], torch.zeros(stream.shape[1:], dtype=torch.float64)
        for betas in (BETAS, (0.9, 0.95)):
            options = {"betas": betas, "weight_decay": 0.0}
            title = f"AdamW {betas[1]}, {name}"
            run(title, optim.AdamW, Adam64(shape, betas), stream, **options)
        amsgrad = {"amsgrad": True, "weight_decay": 0.0}
        exact = Adam64(shape, amsgrad=True)
        run(f"amsgrad, {name}", optim.AdamW, exact, stream, **amsgrad)
        run(f"SGD 0.99, {name}", optim.SGD, Momentum(zeros, 0.99), stream, momentum=0.99)
        run(f"Lion 0.99, {name}", optim.Lion, Lion(zeros), stream)


def assert_within(errors: Errors, bound: Bound, *, what: str) -> None:
    """Asserts that a scheme keeps its bound."""
    assert errors.update < bound.update, what
    assert errors.largest < bound.largest, what
    assert errors.way < (bound.way or bound.update), what


if __name__ == "__main__":
    print_errors_of_optimizers()
