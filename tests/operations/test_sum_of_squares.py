"""``check_finite_`` with ``sum_of_squares``: right at any size of numbers, always the same bits."""

from __future__ import annotations

import pytest
import torch
from harness.awkward import F64, INF, NAN, threads
from harness.engine_results import EXTREMES, lists_to_sum
from harness.gradient_lists import (
    GRAD_DTYPES,
    SUM_OF_SQUARES,
    assert_right,
    each_bad_value,
    each_dtype,
)
from harness.reference import same_bits
from torch import Tensor

from amp_ext import ops


def look(tensors: list[Tensor], *, before: float = -1.0, **options: Tensor) -> tuple[Tensor, float]:
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


@pytest.mark.parametrize("shape", [(1,), (6, 1), (1, 50), (6, 50)], ids=str)
def test_an_element_of_an_expanded_tensor_counts_as_often_as_it_is_seen(shape, device) -> None:
    assert_sum_is_right([torch.randn(shape, device=device).expand(6, 50)])


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


def test_a_tile_of_large_numbers_does_not_spoil_the_others(device) -> None:
    tensors = [torch.full((20_000,), value, device=device) for value in (1e-22, 3e38, 1.0, 1e-40)]
    for index in range(4):
        assert_sum_is_right(tensors[index:] + tensors[:index])
    assert_sum_is_right([torch.cat(tensors)])


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
    total, found = look([torch.full((5,), 1e200, dtype=F64, device=device)])
    assert (total.item(), found) == (INF, 0)


@pytest.mark.parametrize("before", [0.0, 5.0, INF, NAN])
def test_the_sum_is_set_whatever_was_there(before: float, device) -> None:
    assert look([torch.full((3,), 2.0, device=device)], before=before)[0].item() == 12
    empty = torch.empty(0, device=device)
    nothings = [[], [empty], [empty, empty.view(3, 0)], [empty.half(), empty.double()]]
    zeros = [torch.zeros(70_000, dtype=dtype, device=device) for dtype in GRAD_DTYPES]
    for nothing in (*nothings, zeros, [-zero for zero in zeros], *([zero] for zero in zeros)):
        total, found = look(nothing, before=before)
        assert same_bits(total, torch.zeros((), dtype=F64))
        assert found == 0


def test_the_sum_is_of_the_numbers_as_they_are_whatever_the_scale(device) -> None:
    tensors = [torch.full((3,), 2.0, device=device)]
    for scale, found in ((65536.0, 0), (3.0, 0), (0.0, 1), (1e-39, 1)):
        total, found_inf = look(tensors, grad_scale=torch.tensor(scale, device=device))
        assert (total.item(), found_inf) == (12, found)


def test_every_run_gives_the_same_bits(device) -> None:
    for tensors in lists_to_sum(device):
        first, _ = look(tensors)
        assert same_bits(look(tensors)[0], first)
        assert same_bits(look([tensor.clone() for tensor in tensors])[0], first)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    sums = {}
    for count in (1, 2, 3):
        torch.manual_seed(0)
        with threads(count):
            sums[count] = torch.stack([look(tensors)[0] for tensors in lists_to_sum("cpu")])
    assert same_bits(sums[2], sums[1])
    assert same_bits(sums[3], sums[1])
