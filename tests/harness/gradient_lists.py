"""The operations over lists of gradients, in one table, and what each should find and write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from harness.edge_shapes import BF16, F16, F32, F64, INF, NAN
from harness.reference import same_bits
from harness.rows import rows

GRAD_DTYPES = [F32, F16, BF16, F64]
# Around the widths of vectors, around the tiles of CUDA and the CPU, and more than one of them.
SIZES = [0, 1, 3, 4, 5, 8, 9, 31, 33, 1023, 1025, 8193, 16383, 16384, 16385, 65537]
each_dtype = pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
each_bad_value = pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)

Tensors = list[Tensor]
Number = float | int


def is_bad(tensor: Tensor) -> Tensor:
    return ~tensor.isfinite()


def multiplied(grad: Tensor, factor: float) -> Tensor:
    """Multiplies in float32, in float64 for float64, and rounds once to the dtype of ``grad``."""
    factor_tensor = torch.tensor(factor, dtype=F32)
    if grad.dtype == F64:
        return grad.cpu() * factor_tensor.double()
    return (grad.cpu().float() * factor_tensor).to(grad.dtype)


def equal(actual: Tensor, wanted: Tensor) -> bool:
    """Compares bits, except that any NaN equals any other."""
    if same_bits(actual, wanted):
        return True
    actual, wanted = actual.cpu(), wanted.cpu()
    nan = wanted.isnan()
    return torch.equal(actual.isnan(), nan) and same_bits(actual[~nan], wanted[~nan])


@dataclasses.dataclass(frozen=True)
class GradientOperation:
    """What tests must know of one operation.

    Attributes:
        name: In ``amp_ext.ops``.
        run: Calls it on tensors of one device and returns the numbers that it found.
        finds: What it should find.
        writes: What it should make of one tensor; None if it only reads.
        list_name: What errors call its list.
        id: In the names of tests, where the name serves several.
    """

    name: str
    run: Callable[[Tensors], list[Number]]
    finds: Callable[[Tensors], list[Number]]
    writes: Callable[[Tensor], Tensor] | None = None
    list_name: str = "grads"
    id: str = ""


def device_of(tensors: Tensors) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


NOTHING_YET = 10**6  # a number behind that of every tensor


def run_check_finite(tensors: Tensors, **options: Tensor) -> list[Number]:
    """Looks for overflow, and unscales as well where there is ``inv_scale``."""
    device = device_of(tensors)
    found_inf = torch.zeros((), device=device)
    first = torch.tensor(NOTHING_YET, device=device)
    scan = ops.unscale_ if "inv_scale" in options else ops.check_finite_
    scan(tensors, found_inf=found_inf, first_nonfinite=first, **options)
    return [found_inf.item(), first.item()]


def run_sum_of_squares(tensors: Tensors) -> list[Number]:
    total = torch.full((), -1.0, dtype=F64, device=device_of(tensors))
    return [*run_check_finite(tensors, sum_of_squares=total), total.item()]


def run_unscale(tensors: Tensors) -> list[Number]:
    return run_check_finite(tensors, inv_scale=torch.full((), 1 / 3, device=device_of(tensors)))


def run_clip_grads(tensors: Tensors) -> list[Number]:
    ops.clip_grads_(tensors, torch.full((), 3.0, device=device_of(tensors)), max_norm=1.0)
    return []


def finds_overflow(tensors: Tensors) -> list[Number]:
    bad = [index for index, tensor in enumerate(tensors) if is_bad(tensor).any()]
    return [float(bool(bad)), min(bad, default=NOTHING_YET)]


def finds_sum(tensors: Tensors) -> list[Number]:
    """The sum in float64, where squares of 24 bits and fewer are exact, serves a float32 norm.

    1e-6 is some roundings in float32: less than a loop that adds one number after the other has.
    """
    exact = math.fsum(tensor.double().square().sum().item() for tensor in tensors)
    relative = 1e-13 if all(tensor.dtype == F64 for tensor in tensors) else 1e-6
    return [*finds_overflow(tensors), pytest.approx(exact, rel=relative, abs=0, nan_ok=True)]


SUM_OF_SQUARES = GradientOperation(
    "check_finite_", run_sum_of_squares, finds_sum, list_name="tensors", id="sum_of_squares"
)
OPERATIONS = [
    GradientOperation(
        "check_finite_", run_check_finite, finds_overflow, list_name="tensors", id="check_finite"
    ),
    SUM_OF_SQUARES,
    GradientOperation(
        "unscale_", run_unscale, finds_overflow, lambda grad: multiplied(grad, 1 / 3)
    ),
    GradientOperation(
        "clip_grads_", run_clip_grads, lambda _: [], lambda grad: multiplied(grad, 1 / (3 + 1e-6))
    ),
    GradientOperation(
        "count_nonfinite",
        lambda tensors: ops.count_nonfinite(tensors).tolist(),
        lambda tensors: [int(is_bad(tensor).sum()) for tensor in tensors],
        list_name="tensors",
    ),
]
by_id = {each.id or each.name: each for each in OPERATIONS}
each_operation = pytest.mark.parametrize("operation", rows(by_id))


def assert_right(operation: GradientOperation, tensors: Tensors, what: object = "") -> None:
    """Runs an operation and compares what it found, wrote and left with what it should."""
    before = [tensor.clone() for tensor in tensors]
    assert operation.run(tensors) == operation.finds(before), what
    for index, (actual, old) in enumerate(zip(tensors, before, strict=True)):
        wanted = operation.writes(old) if operation.writes else old
        assert equal(actual, wanted), (index, what)


def spoiled(size: int | tuple[int, ...], dtype: torch.dtype, device, share: float = 0.3) -> Tensor:
    """Returns random numbers of which a share is inf, -inf or NaN."""
    tensor = torch.randn(size, device=device).to(dtype)
    draw = torch.rand(tensor.shape, device=device)
    for index, value in enumerate((INF, -INF, NAN)):
        tensor[(draw >= index * share / 3) & (draw < (index + 1) * share / 3)] = value
    return tensor


# Views of 4200 numbers; the last two are only read, since they hold elements twice.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every-second": lambda base: base[::2],
    "misaligned": lambda base: base[1:-1],
    "columns": lambda base: base.view(60, 70)[:, 3:66],
    "transposed": lambda base: base.view(60, 70).t()[2:, :59],
    "channels-last": lambda base: base.view(2, 5, 6, 70).permute(0, 3, 1, 2)[:1],
    "three-dimensions": lambda base: base.view(60, 7, 10)[::3, 1:6, ::2],
    "one-element": lambda base: base[77],
    "expanded": lambda base: base[5:6].expand(100),
    "overlapping": lambda base: base.as_strided((30, 10), (1, 1)),
}
each_view = pytest.mark.parametrize("view", rows(VIEWS))
