"""Tests of ``check_finite_`` with ``sum_of_squares``: right at any size of numbers, same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from awkward import BF16, F16, F32, F64, LAYOUT_SHAPE, LAYOUTS, Layout, placed
from reference import same_bits
from test_check_finite import DTYPES, NON_FINITE, SIZES, VIEWS
from torch import Tensor

from amp_ext import ops


def look(tensors: list[Tensor], *, before: float = -1.0, **options: Tensor) -> tuple[Tensor, float]:
    """Returns the sum of squares, which held ``before``, and found_inf."""
    device = tensors[0].device if tensors else "cpu"
    total = torch.full((), before, dtype=F64, device=device)
    found_inf = torch.zeros((), device=device)
    ops.check_finite_(tensors, found_inf, sum_of_squares=total, **options)
    return total, found_inf.item()


def exact(tensors: list[Tensor]) -> float:
    """Returns the sum of squares in float64, where squares of 24 bits and fewer are exact."""
    return math.fsum(tensor.double().square().sum().item() for tensor in tensors)


def assert_right(tensors: list[Tensor], what: str = "") -> None:
    """Asserts a sum that serves a float32 norm, and a clean look.

    1e-6 is some roundings in float32: less than a loop that adds one number after the other has.
    """
    total, found = look(tensors)
    relative = 1e-13 if all(tensor.dtype == F64 for tensor in tensors) else 1e-6
    assert total.item() == pytest.approx(exact(tensors), rel=relative, abs=0), what
    assert found == 0, what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_that_of_float64_at_any_size(dtype: torch.dtype, device) -> None:
    for size in [*SIZES, 16383, 16384, 200_001]:
        assert_right([torch.randn(size, device=device).to(dtype)], f"{size} elements")


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.9999, 3e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_numbers_do_not_let_roundings_pile_up(
    dtype: torch.dtype, value: float, device
) -> None:
    """A running sum rounds every addition the same way and drifts; pairs do not."""
    for size in (4097, 70_000, 200_003):
        assert_right([torch.full((size,), value, dtype=dtype, device=device)], f"{size} elements")


@pytest.mark.parametrize("count", [2, 30, 3000])
def test_many_tensors_have_one_sum(count: int, device) -> None:
    tensors = [
        torch.randn(index % 7, device=device).to(DTYPES[index % 4]) for index in range(count)
    ]
    assert_right(tensors)


def test_small_and_large_tensors_have_one_sum(device) -> None:
    sizes = [1, 100_000, 0, 3, 16384, 5, 40_000, 1]
    assert_right(
        [torch.randn(size, device=device) * 10.0**index for index, size in enumerate(sizes)]
    )
    assert_right(
        [torch.randn(size, device=device) / 10.0**index for index, size in enumerate(sizes)]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout_is_summed(dtype: torch.dtype, layout: Layout, device) -> None:
    tensors = [placed(torch.randn(LAYOUT_SHAPE, device=device).to(dtype), layout) for _ in range(2)]
    assert_right(tensors)


@pytest.mark.parametrize("view", [pytest.param(view, id=name) for name, view in VIEWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_summed_whole_and_its_neighbours_not_at_all(
    dtype: torch.dtype, view: Callable[[Tensor], Tensor], device
) -> None:
    inside = view(torch.arange(4200)).flatten().unique().to(device)
    base = torch.full((4200,), float("nan"), dtype=dtype, device=device)
    base[inside] = torch.randn(len(inside), device=device).to(dtype)
    assert_right([view(base)])


@pytest.mark.parametrize("shape", [(1,), (6, 1), (1, 50), (6, 50)], ids=str)
def test_an_element_of_an_expanded_tensor_counts_as_often_as_it_is_seen(shape, device) -> None:
    small = torch.randn(shape, device=device)
    assert_right([small.expand(6, 50)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_slices_at_every_alignment_are_summed(dtype: torch.dtype, device) -> None:
    base = torch.randn(60, device=device).to(dtype)
    for start in range(17):
        for length in range(0, 36, 5):
            assert_right([base[start : start + length]], f"{start}, {length}")


# Squares that are 0, subnormal, just normal, just finite or inf in float32; and, from 1e-20 on and
# from 1e17 on, many of them that are more than one of them is.
EXTREMES = [
    *[(F32, value) for value in (1e-45, 1e-40, 1.2e-38, 1e-30, 1e-22, 4e-22, 1e-21, 1e-20)],
    *[(F32, value) for value in (1.1e-19, 1e-18, 1e17, 1e18, 1.8e19, 1.9e19, 1e30, 3e38)],
    *[(BF16, value) for value in (1e-40, 1e-30, 1e-22, 1e-20, 1.8e19, 3.38e38)],
    *[(F16, value) for value in (6e-8, 1e-5, 65504.0)],
    *[(F64, value) for value in (1e-150, 1e-40, 1e-22, 3e38, 1e39, 1e150)],
]


@pytest.mark.parametrize(
    ("dtype", "value"), [pytest.param(*row, id=f"{row[1]}-{row[0]}") for row in EXTREMES]
)
def test_squares_may_leave_the_range_of_float32(dtype: torch.dtype, value: float, device) -> None:
    for size in (1, 5, 16385, 100_000):
        tensor = torch.full((size,), value, dtype=F64).to(device, dtype)
        assert tensor[0] != 0
        tensor[::2] *= -1
        assert_right([tensor], f"{size} elements")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("scale", [1e-24, 1e-21, 1e-19, 1e17, 1e19, 1e36])
def test_random_numbers_far_from_one_are_summed_right(
    scale: float, dtype: torch.dtype, device
) -> None:
    for size in (5, 1000, 50_000):
        tensor = (torch.randn(size, device=device).double() * scale).to(dtype)
        assert_right([tensor], f"{size} elements")


def test_one_tensor_may_span_all_of_float32(device) -> None:
    exponents = torch.rand(50_000, dtype=F64) * 76 - 38
    tensor = (10**exponents).float().to(device)
    assert_right([tensor])
    assert_right([tensor.sort().values])
    assert_right([tensor.sort(descending=True).values])


@pytest.mark.parametrize("place", [0, 1, 4097, 16383, 16384, 49_998, 49_999])
@pytest.mark.parametrize(("rest", "one"), [(1.0, 3e38), (1e-22, 1e20), (0.0, 1e-40), (0.0, 1e-22)])
def test_one_extreme_element_is_not_lost(rest: float, one: float, place: int, device) -> None:
    tensor = torch.full((50_000,), rest, device=device)
    tensor[place] = one
    assert_right([tensor])
    assert_right([tensor[:place], tensor[place : place + 1], tensor[place + 1 :]])


def test_a_tile_of_large_numbers_does_not_spoil_the_others(device) -> None:
    tensors = [torch.full((20_000,), value, device=device) for value in (1e-22, 3e38, 1.0, 1e-40)]
    for index in range(4):
        assert_right(tensors[index:] + tensors[:index])
    assert_right([torch.cat(tensors)])


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_and_nan_are_found_and_the_sum_is_not_finite(
    dtype: torch.dtype, value: float, device
) -> None:
    for size in (1, 5, 4097, 16385, 70_000):
        for fill in (1.0, torch.finfo(dtype).max if dtype != F64 else 1e39):
            tensor = torch.full((size,), fill, dtype=dtype, device=device)
            for index in {0, size // 2, size - 1}:
                tensor[index] = value
                total, found = look([torch.ones(3, device=device), tensor])
                assert not total.isfinite(), (size, fill, index)
                assert found == 1, (size, fill, index)
                tensor[index] = fill


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_nan_makes_the_sum_nan(dtype: torch.dtype, device) -> None:
    tensor = torch.ones(20_000, dtype=dtype, device=device)
    tensor[[7, 19_000]] = torch.tensor([float("inf"), float("-inf")], dtype=dtype, device=device)
    assert look([tensor])[0].item() == float("inf")
    tensor[11] = float("nan")
    assert look([tensor])[0].isnan()


def test_a_sum_above_float64_is_inf_and_no_overflow_of_a_gradient(device) -> None:
    total, found = look([torch.full((5,), 1e200, dtype=F64, device=device)])
    assert total.item() == float("inf")
    assert found == 0


@pytest.mark.parametrize("before", [0.0, 5.0, float("inf"), float("nan")])
def test_the_sum_is_set_whatever_was_there(before: float, device) -> None:
    assert look([torch.full((3,), 2.0, device=device)], before=before)[0].item() == 12


@pytest.mark.parametrize("before", [0.0, 5.0, float("nan")])
def test_nothing_to_sum_is_zero(before: float, device) -> None:
    empty = torch.empty(0, device=device)
    total, found_inf = torch.full((), before, dtype=F64, device=device), empty.new_zeros(())
    ops.check_finite_([], found_inf, sum_of_squares=total)
    assert same_bits(total, torch.zeros((), dtype=F64))
    for tensors in ([empty], [empty, empty.view(3, 0)], [empty.half(), empty.double()]):
        assert same_bits(look(tensors, before=before)[0], torch.zeros((), dtype=F64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_have_the_sum_zero(value: float, dtype: torch.dtype, device) -> None:
    zeros = torch.full((70_000,), value, dtype=dtype, device=device)
    total, found = look([zeros, zeros[:3]])
    assert same_bits(total, torch.zeros((), dtype=F64))
    assert found == 0


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_the_sum_may_have_any_shape_of_one_element(shape: tuple[int, ...], device) -> None:
    neighbours = torch.full((3,), 7.0, dtype=F64, device=device)
    found_inf = torch.zeros((), device=device)
    tensors = [torch.full((3,), 2.0, device=device)]
    ops.check_finite_(tensors, found_inf, sum_of_squares=neighbours[1:2].view(shape))
    assert neighbours.tolist() == [7, 12, 7]


def test_the_sum_is_of_the_numbers_as_they_are_whatever_the_scale(device) -> None:
    tensors = [torch.full((3,), 2.0, device=device)]
    for scale, found in ((65536.0, 0), (3.0, 0), (0.0, 1), (1e-39, 1)):
        grad_scale = torch.tensor(scale, device=device)
        total, found_inf = look(tensors, grad_scale=grad_scale)
        assert (total.item(), found_inf) == (12, found)


def test_the_sum_is_taken_after_an_earlier_overflow_as_well(device) -> None:
    total, found_inf = torch.zeros(1, dtype=F64, device=device), torch.ones(1, device=device)
    ops.check_finite_([torch.full((3,), 2.0, device=device)], found_inf, sum_of_squares=total)
    assert (total.item(), found_inf.item()) == (12, 1)


def test_tensors_are_only_read(device) -> None:
    tensors = [torch.randn(20_000, device=device).to(dtype) * 1e4 for dtype in DTYPES]
    tensors += [torch.full((20_000,), 3e38, device=device), torch.full((9,), 1e-40, device=device)]
    copies = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    look(tensors)
    assert all(map(same_bits, tensors, copies))
    assert [tensor._version for tensor in tensors] == versions


def awkward_lists(device: torch.device | str) -> Iterator[list[Tensor]]:
    """Lists whose sums depend on the order of the additions."""
    for dtype in DTYPES:
        yield [torch.randn(size, device=device).to(dtype) for size in (1, 100_001, 0, 7, 30_000)]
        yield [torch.randn(index % 40, device=device).to(dtype) for index in range(500)]
    yield [
        torch.randn(LAYOUT_SHAPE, device=device).permute(3, 1, 0, 2),
        torch.rand(5, 9, device=device).t(),
    ]
    spread = (10 ** (torch.rand(60_000, dtype=F64) * 76 - 38)).float().to(device)
    yield [spread, spread[1:], spread[::3]]
    yield [spread.double(), spread.bfloat16(), spread]


def test_every_run_gives_the_same_bits(device) -> None:
    for tensors in awkward_lists(device):
        first, _ = look(tensors)
        for _ in range(5):
            assert same_bits(look(tensors)[0], first)
        assert same_bits(look([tensor.clone() for tensor in tensors])[0], first)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    threads, sums = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 3):
            torch.manual_seed(0)
            torch.set_num_threads(count)
            sums[count] = torch.stack([look(tensors)[0] for tensors in awkward_lists("cpu")])
    finally:
        torch.set_num_threads(threads)
    assert same_bits(sums[2], sums[1])
    assert same_bits(sums[3], sums[1])


def sample_results() -> Tensor:
    """Sums in many cases, for comparison between engines."""
    lists = [*awkward_lists("cpu")]
    lists += [[torch.full((16385,), value, dtype=F64).to(dtype)] for dtype, value in EXTREMES]
    lists += [[torch.randn(size).to(dtype)] for dtype in DTYPES for size in SIZES]
    return torch.stack([look(tensors)[0] for tensors in lists])


def test_every_instruction_set_gives_the_same_bits(under_isa) -> None:
    if ops.cpu_isa() == "plain":
        pytest.skip("this process has the plain engine itself")
    plain_isa, plain = under_isa(sample_results, "plain")
    assert plain_isa == "plain"
    assert same_bits(sample_results(), plain)


@pytest.mark.parametrize(
    ("total", "text"),
    [
        pytest.param(torch.zeros(()), "must be Double, got Float", id="float"),
        pytest.param(torch.zeros((), dtype=F16), "must be Double, got Half", id="half"),
        pytest.param(torch.zeros((), dtype=torch.int64), "must be Double, got Long", id="long"),
        pytest.param(torch.zeros(2, dtype=F64), r"must be one element.*\[2\]", id="two"),
        pytest.param(torch.zeros(0, dtype=F64), r"must be one element.*\[0\]", id="none"),
        pytest.param(torch.zeros((), dtype=F64, device="meta"), "must .*meta", id="elsewhere"),
        pytest.param(torch.zeros(1, dtype=F64).to_sparse(), "must .*[Ss]parse", id="sparse"),
    ],
)
def test_a_wrong_place_for_the_sum_is_named_before_anything_is_written(
    total: Tensor, text: str
) -> None:
    found_inf = torch.zeros(())
    bad = [torch.full((3,), float("nan"))]
    with pytest.raises(RuntimeError, match=f"^check_finite_: sum_of_squares {text}"):
        ops.check_finite_(bad, found_inf, sum_of_squares=total)
    assert found_inf.item() == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=str)
def test_a_wrong_tensor_is_named_and_the_sum_left_alone(dtype: torch.dtype) -> None:
    total = torch.full((), 7.0, dtype=F64)
    tensors = [torch.ones(2), torch.ones(2, dtype=dtype)]
    with pytest.raises(RuntimeError, match=r"^check_finite_: tensors\[1\] must be"):
        ops.check_finite_(tensors, torch.zeros(()), sum_of_squares=total)
    assert total.item() == 7
