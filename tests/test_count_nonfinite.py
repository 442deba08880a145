"""Tests of ``count_nonfinite``: how many inf and NaN each tensor of a list holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from awkward import LAYOUT_SHAPE, LAYOUTS, Layout, placed
from reference import same_bits
from test_check_finite import DTYPES, NON_FINITE, SIZES, VIEWS
from torch import Tensor

from amp_ext import ops


def expected(tensors: list[Tensor]) -> list[int]:
    return [int((~tensor.isfinite()).sum()) for tensor in tensors]


def spoiled(size: int | tuple[int, ...], dtype: torch.dtype, device, share: float = 0.3) -> Tensor:
    """Returns random numbers of which a share is inf, -inf or NaN."""
    tensor = torch.randn(size, device=device).to(dtype)
    draw = torch.rand(tensor.shape, device=device)
    for index, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        tensor[(draw >= index * share / 3) & (draw < (index + 1) * share / 3)] = value
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_tensor_has_its_own_count(dtype: torch.dtype, device) -> None:
    tensors = [spoiled(size, dtype, device) for size in [*SIZES, 0, 200_001]]
    counts = ops.count_nonfinite(tensors)
    assert counts.dtype == torch.int64
    assert counts.shape == (len(tensors),)
    assert counts.device == tensors[0].device
    assert counts.tolist() == expected(tensors)
    assert counts.max() > 10_000


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_anywhere_counts_one(dtype: torch.dtype, value: float, device) -> None:
    for size in SIZES:
        tensor = torch.ones(size, dtype=dtype, device=device)
        for index in {0, size // 2, size - 1}:
            tensor[index] = value
            assert ops.count_nonfinite([tensor[:1] * 0, tensor]).tolist()[1] == 1, (size, index)
            tensor[index] = 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern_is_judged_right(dtype: torch.dtype, device) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(device)
    counts = ops.count_nonfinite([patterns, *patterns.split(1000)])
    assert counts.tolist() == expected([patterns, *patterns.split(1000)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_small_finite_numbers_are_not_counted(dtype: torch.dtype, device) -> None:
    limits = torch.finfo(dtype)
    values = [limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, -0.0, 0.0]
    tensors = [torch.full((5000,), value, dtype=dtype, device=device) for value in values]
    assert ops.count_nonfinite(tensors).tolist() == [0] * len(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_nothing_but_nan_are_counted_whole(dtype: torch.dtype, device) -> None:
    sizes = [1, 33, 4097, 70_000, 500_003]
    tensors = [torch.full((size,), float("nan"), dtype=dtype, device=device) for size in sizes]
    assert ops.count_nonfinite(tensors).tolist() == sizes


def test_a_list_may_mix_dtypes_and_be_long(device) -> None:
    tensors = [spoiled(index % 9, DTYPES[index % 4], device) for index in range(3000)]
    assert ops.count_nonfinite(tensors).tolist() == expected(tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout_is_counted(dtype: torch.dtype, layout: Layout, device) -> None:
    tensors = [placed(spoiled(LAYOUT_SHAPE, dtype, device), layout) for _ in range(2)]
    assert ops.count_nonfinite(tensors).tolist() == expected(tensors)


@pytest.mark.parametrize("view", [pytest.param(view, id=name) for name, view in VIEWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_counted_whole_and_its_neighbours_not_at_all(
    dtype: torch.dtype, view: Callable[[Tensor], Tensor], device
) -> None:
    inside = view(torch.arange(4200)).flatten().unique().to(device)
    base = torch.full((4200,), float("nan"), dtype=dtype, device=device)
    base[inside] = 1
    assert ops.count_nonfinite([view(base)]).tolist() == [0]
    for index in (inside[0], inside[-1]):
        base[index] = float("inf")
    assert ops.count_nonfinite([view(base)]).tolist() == expected([view(base)])


def test_one_tensor_may_be_listed_twice(device) -> None:
    tensor = spoiled(100, torch.float32, device)
    counts = ops.count_nonfinite([tensor, tensor, tensor[:0]])
    assert counts.tolist() == [*expected([tensor, tensor]), 0]


def test_an_empty_list_has_no_counts() -> None:
    counts = ops.count_nonfinite([])
    assert counts.shape == (0,)
    assert counts.dtype == torch.int64


def test_empty_and_scalar_tensors_have_places(device) -> None:
    empty, bad = torch.empty(0, device=device), torch.full((), float("nan"), device=device)
    tensors = [empty, bad, empty.view(3, 0), torch.ones((), device=device), bad, empty]
    assert ops.count_nonfinite(tensors).tolist() == [0, 1, 0, 0, 1, 0]


def test_tensors_are_only_read(device) -> None:
    tensors = [spoiled(1000, dtype, device) for dtype in DTYPES]
    copies = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    ops.count_nonfinite(tensors)
    assert all(map(same_bits, tensors, copies))
    assert [tensor._version for tensor in tensors] == versions


def test_tensors_of_a_graph_are_counted_outside_of_it(device) -> None:
    tensor = torch.full((3,), float("nan"), device=device, requires_grad=True)
    counts = ops.count_nonfinite([tensor, tensor * 2])
    assert counts.tolist() == [3, 3]
    assert not counts.requires_grad


def test_the_number_of_threads_does_not_matter() -> None:
    tensors = [spoiled(size, torch.float32, "cpu") for size in (300_001, 5, 70_000)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert ops.count_nonfinite(tensors).tolist() == expected(tensors)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        pytest.param(torch.ones(2, dtype=torch.int32), "must be .*Int", id="integers"),
        pytest.param(torch.ones(2, dtype=torch.complex64), "must be .*Complex", id="complex"),
        pytest.param(torch.ones(2).to_sparse(), "must be .*[Ss]parse", id="sparse"),
        pytest.param(torch.ones(2, device="meta"), "must be .*meta", id="another-device"),
    ],
)
def test_bad_arguments_are_named(bad: Tensor, text: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^count_nonfinite: tensors\[1\] {text}"):
        ops.count_nonfinite([torch.ones(2), bad])
