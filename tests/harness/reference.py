"""The formulas of the optimizers in plain torch float64, and how closely results must agree."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# How far one step may lie from the float64 formula that starts from the same stored numbers.
# Exact where the maths is exact: then use torch.equal or `same_bits`, not this table.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    # A dozen roundings of 1.1e-16, in another order than the reference.
    torch.float64: {"rtol": 1e-12, "atol": 1e-14},
    # A dozen roundings of 6e-8. Much below the 1.3e-5 by which 1 - beta2 is off when beta2 is a
    # float; the absolute part is for sums of numbers up to 8 that cancel (gradient and decay).
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    # Maths in float32, hence its absolute part, stored once: one unit in the last of 11 bits, since
    # a value close to the middle of two neighbours may round to either.
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
    # The same with 8 bits.
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},
}


def tolerance(dtype: torch.dtype, steps: int = 1, size: float = 0.0) -> dict[str, float]:
    """Returns the row of ``TOLERANCES`` for a run of several steps.

    Each step starts from the rounded result of the one before, so the distances add up; and what
    ends near zero was rounded on its way there, when it was as large as ``size``.
    """
    row = TOLERANCES[dtype]
    on_the_way = size * row["rtol"] if steps > 1 else 0.0
    return {"rtol": steps * row["rtol"], "atol": steps * row["atol"] + on_the_way}


def assert_close(actual: Tensor, expected: Tensor, *, steps: int = 1, what: str = "") -> None:
    """Asserts that ``actual`` is ``expected`` to the rounding of the dtype of ``actual``.

    Args:
        actual: What the code under test stored.
        expected: The same shape in any floating dtype, usually float64.
        steps: How many roundings of the stored number lie between the two.
        what: Named in the message.
    """
    actual_double, expected_double = (
        actual.detach().double().cpu(),
        expected.detach().double().cpu(),
    )
    size = expected_double.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual_double,
        expected_double,
        **tolerance(actual.dtype, steps, size),
        msg=lambda text: f"{what}: {text}",
    )


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Tells whether two tensors hold the same bits: NaN equals itself, 0.0 is not -0.0."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        actual.element_size()
    ]
    return torch.equal(
        actual.detach().cpu().contiguous().view(integers),
        expected.detach().cpu().contiguous().view(integers),
    )


def snapshot(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns copies that share nothing with ``tensors``."""
    return [tensor.detach().clone() for tensor in tensors]


def decayed(
    param: Tensor, grad: Tensor, lr: float, weight_decay: float, maximize: bool, decoupled: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Applies weight decay in float64.

    Returns:
        The parameter, the gradient, and with a decay that is added to the gradient ``doubt``: where
        the two cancel, so that rounding them, as float32 does, decides the sign of the gradient.
    """
    param, grad = param.double(), -grad.double() if maximize else grad.double()
    if decoupled or weight_decay == 0:
        return param * (1 - lr * weight_decay), grad, {}
    decay = weight_decay * param
    parts, grad = grad.abs() + decay.abs(), grad + decay
    return param, grad, {"doubt": (grad.abs() <= 1e-6 * parts) & (parts > 0) & parts.isfinite()}


def cautiously(
    param: Tensor, decayed: Tensor, direction: Tensor, parts: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Applies decoupled decay only to elements that the update does not move away from 0.

    Args:
        param: The parameter before the step.
        decayed: The same with decay in all elements.
        direction: What is subtracted, apart from a positive factor.
        parts: The size of the numbers whose sum is the direction.

    Returns:
        The parameter, and ``doubt``: where rounding decides the sign of the direction.

    Reference:
        Chen et al., "Cautious Weight Decay", arXiv 2510.12402.
    """
    agree = param.double().sign() * direction.sign() >= 0
    doubt = (direction.abs() <= 1e-6 * parts) & (parts > 0)
    return torch.where(agree, decayed, param.double()), {"doubt": doubt}


def adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    cautious_weight_decay: bool = False,
    denominator_floor: float = 0.0,
) -> dict[str, Tensor]:
    """Takes one step of Adam, AdamW or AMSGrad in float64.

    Args:
        param: The number that is updated: the master where there is one. Nothing is written.
        grad: Gradient, unscaled and clipped.
        exp_avg: First moment before the step.
        exp_avg_sq: Second moment before the step.
        step: Steps taken before this one.
        max_exp_avg_sq: Largest second moment so far; given means AMSGrad.
        denominator_floor: Least value of the corrected second moment; NaN stays NaN.

    Returns:
        The new values under the names of the arguments, and ``doubt`` as :func:`decayed` does,
        since the sign of the gradient decides that of the first step.

    Reference:
        Kingma and Ba, "Adam", 2015; Loshchilov and Hutter, "Decoupled Weight Decay
        Regularization", 2019; Reddi et al., "On the Convergence of Adam and Beyond", 2018.
    """
    start = param
    param, grad, result = decayed(param, grad, lr, weight_decay, maximize, decoupled_weight_decay)
    step = step.double() + 1
    parts = beta1 * exp_avg.double().abs() + (1 - beta1) * grad.abs()
    exp_avg = beta1 * exp_avg.double() + (1 - beta1) * grad
    if cautious_weight_decay:
        param, result = cautiously(start, param, exp_avg, parts)
    exp_avg_sq = beta2 * exp_avg_sq.double() + (1 - beta2) * grad * grad
    result |= {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": step}
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        second = torch.maximum(max_exp_avg_sq.double(), exp_avg_sq)
        result["max_exp_avg_sq"] = second
    corrected = exp_avg / (1 - beta1**step)
    second = second / (1 - beta2**step)
    second = torch.where(second < denominator_floor, denominator_floor, second)
    return result | {"param": param - lr * corrected / (second.sqrt() + eps)}


def lion(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
    cautious_weight_decay: bool = False,
) -> dict[str, Tensor]:
    """Takes one step of Lion in float64.

    Returns:
        The new ``param`` and ``exp_avg``, and ``doubt``: where the average is so small beside its
        parts that rounding them, as float32 does, decides its sign.

    Reference:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
    """
    start = param
    param, grad, _ = decayed(param, grad, lr, weight_decay, maximize, decoupled_weight_decay)
    exp_avg = exp_avg.double()
    average = beta1 * exp_avg + (1 - beta1) * grad
    parts = (beta1 * exp_avg).abs() + ((1 - beta1) * grad).abs() + (weight_decay * param).abs()
    sign = torch.where(average.isnan(), average, average.sign())
    if cautious_weight_decay:
        param, _ = cautiously(start, param, average, parts)
    return {
        "param": param - lr * sign,
        "exp_avg": beta2 * exp_avg + (1 - beta2) * grad,
        "doubt": (average.abs() <= 1e-6 * parts) & (parts > 0),
    }


def sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    step: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    cautious_weight_decay: bool = False,
) -> dict[str, Tensor]:
    """Takes one step of SGD in float64.

    At a ``step`` of 0, no step was taken yet: the buffer becomes the gradient, without dampening.

    Returns:
        The new values under the names of the arguments, and ``doubt`` as :func:`cautiously` does.

    Reference:
        Sutskever et al., "On the importance of initialization and momentum in deep learning",
        2013, in the variant of ``torch.optim.SGD``.
    """
    start = param
    param, grad, _ = decayed(param, grad, lr, weight_decay, maximize, decoupled_weight_decay)
    result = {} if step is None else {"step": step.double() + 1}
    direction, parts = grad, grad.abs()
    if momentum != 0 or momentum_buffer is not None:
        if step is not None and step.item() == 0:
            buffer = grad
        else:
            buffer = momentum * momentum_buffer.double() + (1 - dampening) * grad
            parts = parts + momentum_buffer.double().abs()
        direction = grad + momentum * buffer if nesterov else buffer
        result["momentum_buffer"] = buffer
    if cautious_weight_decay:
        param, doubt = cautiously(start, param, direction, parts)
        result |= doubt
    return result | {"param": param - lr * direction}


def refreshed_master(master: Tensor, param: Tensor) -> Tensor:
    """Returns the master after somebody may have changed ``param`` under it.

    Elements that still round to the parameter keep their extra bits.
    """
    return torch.where(master.to(param.dtype) == param, master, param.float())


def clipped(
    grads: list[Tensor],
    *,
    grad_scale: Tensor | float | None = None,
    max_grad_norm: float | None = None,
    clip_value: float | None = None,
) -> tuple[list[Tensor], float]:
    """Unscales gradients and clips them, by their norm first; inf and NaN do not count.

    The inverse of the scale is computed in float64 and rounded to float32, as torch's is.
    Norm and coefficient are rounded to float32, as those of torch's clip_grad_norm_ are.

    Args:
        grads: Gradients, still multiplied by ``grad_scale``. Nothing is written.

    Returns:
        The gradients in float64, where inf and NaN are what they were, and the norm of their finite
        elements before the clipping.

    Reference:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
        2013.
    """
    inverse = 1 if grad_scale is None else (1 / torch.as_tensor(grad_scale).double()).float().item()
    doubles = [grad.double() * inverse for grad in grads]
    squares = sum(double[double.isfinite()].square().sum().item() for double in doubles)
    norm = torch.tensor(squares, dtype=torch.float64).sqrt().float().double()
    if max_grad_norm is not None:
        coefficient = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float().double().item()
        doubles = [
            torch.where(double.isfinite(), double * coefficient, double) for double in doubles
        ]
    if clip_value is not None:
        doubles = [
            torch.where(double.isfinite(), double.clamp(-clip_value, clip_value), double)
            for double in doubles
        ]
    return doubles, norm.item()
