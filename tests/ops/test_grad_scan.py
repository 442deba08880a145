"""The looks at gradients: ``check_finite_``, its sum of squares, ``unscale_`` and counts."""

from __future__ import annotations

import pytest
import torch
from harness.edge_shapes import F32, F64, INF, NAN, threads
from harness.engine_results import EXTREMES, lists_to_sum
from harness.gradient_lists import (
    GRAD_DTYPES,
    SUM_OF_SQUARES,
    assert_right,
    each_bad_value,
    each_dtype,
    equal,
    multiplied,
    spoiled,
)
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

from amp_ext import ops

# The flags.


def found(tensors: list[Tensor], *, before: float = 0.0, **options: Tensor) -> float:
    """Returns found_inf after a look, one that unscales where there is ``inv_scale``."""
    found_inf = torch.full((), before, device=tensors[0].device)
    scan = ops.unscale_ if "inv_scale" in options else ops.check_finite_
    scan(tensors, found_inf=found_inf, **options)
    return found_inf.item()


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0, -2.0])
def test_found_inf_is_set_to_one_or_left_as_it_is(before: float, device) -> None:
    inverses = [torch.tensor(inverse, device=device) for inverse in (0.5, 1.0, 0.0, INF, NAN)]
    for options in ({}, *({"inv_scale": inverse} for inverse in inverses)):
        bad = [torch.full((9_000,), INF, device=device) for _ in range(3)]
        assert found(bad, before=before, **options) == 1
        is_finite = not options or options["inv_scale"].isfinite()
        clean = [torch.ones(10, device=device), torch.empty(0, device=device)]
        assert found(clean, before=before, **options) == (before if is_finite else 1)


@pytest.mark.parametrize(
    ("scale", "expected"),
    rows(
        {
            "usual": (65536.0, 0),
            "inverse-below-the-largest-float": (1e-38, 0),
            "subnormal-with-a-finite-inverse": (3e-39, 0),
            "inverse-above-the-largest-float": (1e-39, 1),
            "zero": (0.0, 1),
            "nan": (NAN, 1),
        }
    ),
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_scale_without_a_finite_inverse_counts_as_overflow(scale, expected, shape, device):
    grad_scale = torch.full(shape, scale, device=device)
    clean = torch.ones(10, device=device)
    assert found([clean], grad_scale=grad_scale) == expected
    assert found([clean, clean * INF], grad_scale=grad_scale) == 1
    assert same_bits(grad_scale, torch.full(shape, scale))


@pytest.mark.parametrize("inverse", [1 / 65536, 1.0, 3.0, 1e30])
@each_dtype
def test_any_inverse_multiplies_in_place_and_the_verdict_is_about_what_came(
    dtype, inverse, device
) -> None:
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    limits = torch.tensor([0.0, -0.0, tiny / 2, -tiny, 1.1, largest, -largest], dtype=dtype)
    grads = [torch.randn(70).to(dtype).to(device), limits.to(device, copy=True)]
    wanted, addresses = [multiplied(g, inverse) for g in grads], [g.data_ptr() for g in grads]
    assert found(grads, inv_scale=torch.tensor(inverse, device=device)) == 0
    assert all(map(equal, grads, wanted))
    assert grads[1][-2].isinf() == (largest * inverse > largest)
    assert [grad.data_ptr() for grad in grads] == addresses


# Counts.


@each_dtype
def test_tensors_of_nothing_but_nan_are_counted_whole(dtype: torch.dtype, device) -> None:
    sizes = [1, 33, 4097, 70_000, 500_003]
    tensors = [torch.full((size,), NAN, dtype=dtype, device=device) for size in sizes]
    assert ops.count_nonfinite(tensors).tolist() == sizes


def test_counts_are_integers_beside_the_tensors_outside_of_any_graph(device) -> None:
    tensor = spoiled(100, F32, device).requires_grad_()
    bad = int((~tensor.isfinite()).sum())
    counts = ops.count_nonfinite([tensor, tensor, tensor[:0], tensor * 2])  # one may be there twice
    assert counts.tolist() == [bad, bad, 0, bad]
    assert (counts.dtype, counts.shape, counts.device) == (torch.int64, (4,), tensor.device)
    assert not counts.requires_grad
    none = ops.count_nonfinite([])
    assert (none.dtype, none.shape) == (torch.int64, (0,))


# Sums of squares.


def scan(tensors: list[Tensor], *, before: float = -1.0, **options: Tensor) -> tuple[Tensor, float]:
    """Returns the sum of squares, which held ``before``, and found_inf."""
    device = tensors[0].device if tensors else "cpu"
    total = torch.full((), before, dtype=F64, device=device)
    found_inf = torch.zeros((), device=device)
    ops.check_finite_(tensors, found_inf, sum_of_squares=total, **options)
    return total, found_inf.item()


def assert_sum_is_right(tensors: list[Tensor], what: object = "") -> None:
    assert_right(SUM_OF_SQUARES, tensors, what)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.9999, 3e4])
@each_dtype
def test_equal_numbers_do_not_let_roundings_pile_up(dtype, value, device) -> None:
    """A running sum rounds every addition the same way and drifts; pairs do not."""
    for size in (4097, 70_000, 200_003):
        assert_sum_is_right([torch.full((size,), value, dtype=dtype, device=device)], size)


@pytest.mark.parametrize(
    ("dtype", "value"), [pytest.param(*row, id=f"{row[1]}-{row[0]}") for row in EXTREMES]
)
def test_squares_may_leave_the_range_of_float32(dtype: torch.dtype, value: float, device) -> None:
    for size in (1, 5, 16385, 100_000):
        tensor = torch.full((size,), value, dtype=F64).to(device, dtype)
        assert tensor[0] != 0
        tensor[::2] *= -1
        assert_sum_is_right([tensor], size)


@pytest.mark.parametrize("place", [0, 1, 4097, 16383, 16384, 49_998, 49_999])
@pytest.mark.parametrize(("rest", "one"), [(1.0, 3e38), (1e-22, 1e20), (0.0, 1e-40), (0.0, 1e-22)])
def test_one_extreme_element_is_not_lost(rest: float, one: float, place: int, device) -> None:
    tensor = torch.full((50_000,), rest, device=device)
    tensor[place] = one
    assert_sum_is_right([tensor])
    assert_sum_is_right([tensor[:place], tensor[place : place + 1], tensor[place + 1 :]])


@each_bad_value
@each_dtype
def test_inf_and_nan_are_found_among_numbers_whose_squares_are_inf(dtype, value, device) -> None:
    for size in (1, 5, 4097, 16385, 70_000):
        for index in {0, size // 2, size - 1}:
            fill = torch.finfo(dtype).max if dtype != F64 else 1e39
            tensor = torch.full((size,), fill, dtype=dtype, device=device)
            tensor[index] = value
            assert_sum_is_right([torch.ones(3, device=device), tensor], (size, index))


def test_a_sum_above_float64_is_inf_and_no_overflow_of_a_gradient(device) -> None:
    total, found = scan([torch.full((5,), 1e200, dtype=F64, device=device)])
    assert (total.item(), found) == (INF, 0)


@pytest.mark.parametrize("before", [0.0, 5.0, INF, NAN])
def test_the_sum_is_set_whatever_was_there(before: float, device) -> None:
    assert scan([torch.full((3,), 2.0, device=device)], before=before)[0].item() == 12
    empty = torch.empty(0, device=device)
    nothings = [[], [empty], [empty, empty.view(3, 0)], [empty.half(), empty.double()]]
    zeros = [torch.zeros(70_000, dtype=dtype, device=device) for dtype in GRAD_DTYPES]
    for nothing in (*nothings, zeros, [-zero for zero in zeros], *([zero] for zero in zeros)):
        total, found = scan(nothing, before=before)
        assert same_bits(total, torch.zeros((), dtype=F64))
        assert found == 0


def test_the_sum_is_of_the_numbers_as_they_are_whatever_the_scale(device) -> None:
    tensors = [torch.full((3,), 2.0, device=device)]
    for scale, found in ((65536.0, 0), (3.0, 0), (0.0, 1), (1e-39, 1)):
        total, found_inf = scan(tensors, grad_scale=torch.tensor(scale, device=device))
        assert (total.item(), found_inf) == (12, found)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    sums = {}
    for count in (1, 2, 3):
        torch.manual_seed(0)
        with threads(count):
            sums[count] = torch.stack([scan(tensors)[0] for tensors in lists_to_sum("cpu")])
    assert same_bits(sums[2], sums[1])
    assert same_bits(sums[3], sums[1])
