"""``check_finite_`` and ``count_nonfinite``: their flags, counts and the loss scale."""

from __future__ import annotations

import pytest
import torch
from harness.awkward import F32, INF, NAN
from harness.gradient_lists import each_dtype, spoiled
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

from amp_ext import ops


def found(tensors: list[Tensor], *, before: float = 0.0, **options: Tensor) -> float:
    """Returns found_inf after a check that starts from ``before``."""
    found_inf = torch.full((), before, device=tensors[0].device)
    ops.check_finite_(tensors, found_inf, **options)
    return found_inf.item()


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0, -2.0])
def test_found_inf_is_set_to_one_or_left_as_it_is(before: float, device) -> None:
    assert found([torch.ones(10, device=device)], before=before) == before
    assert found([torch.empty(0, device=device)], before=before) == before
    bad = [torch.full((9_000,), INF, device=device) for _ in range(3)]
    assert found(bad, before=before) == 1


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
