"""``unscale_``: one multiplication in place, and the verdict on what came in."""

from __future__ import annotations

import pytest
import torch
from harness.awkward import BF16, F16, F32, F64, INF, NAN
from harness.gradient_lists import SIZES, each_dtype, equal, multiplied
from torch import Tensor

from amp_ext import ops


def unscale(grads: list[Tensor], inv_scale: float, *, before: float = 0.0) -> float:
    """Unscales in place and returns found_inf."""
    device = grads[0].device
    found_inf = torch.full((), before, device=device)
    ops.unscale_(grads, torch.full((), inv_scale, device=device), found_inf)
    return found_inf.item()


@each_dtype
def test_gradients_are_multiplied_in_place(dtype: torch.dtype, device) -> None:
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    limits = torch.tensor([0.0, -0.0, tiny / 2, -tiny, 1.1, largest, -largest], dtype=dtype)
    for inv_scale in (1 / 65536, 1 / 3, 1.0, 3.0, 1e30):
        grads = [torch.randn(size, device=device).to(dtype) for size in SIZES]
        grads.append(limits.to(device, copy=True))
        wanted = [multiplied(grad, inv_scale) for grad in grads]
        addresses = [grad.data_ptr() for grad in grads]
        assert unscale(grads, inv_scale) == 0
        assert all(map(equal, grads, wanted)), inv_scale
        assert [grad.data_ptr() for grad in grads] == addresses


@pytest.mark.parametrize(
    ("value", "inv_scale", "dtype"),
    [(3e38, 4.0, F32), (6e4, 2.0, F16), (3e38, 2.0, BF16), (1e308, 1e30, F64)],
)
def test_the_verdict_is_about_the_incoming_value(value, inv_scale, dtype, device) -> None:
    grad = torch.full((40,), value, dtype=dtype, device=device)
    assert unscale([grad], inv_scale) == 0
    assert grad.isinf().all()


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0])
def test_found_inf_is_set_to_one_or_left_as_it_is(before: float, device) -> None:
    assert unscale([torch.ones(9, device=device)], 0.5, before=before) == before
    bad = [torch.full((9_000,), NAN, device=device) for _ in range(3)]
    for inverse in (0.5, 1.0):
        assert unscale(bad, inverse, before=before) == 1
    assert unscale([torch.tensor([1.0, INF], device=device)], 0.0, before=before) == 1
    for inverse in (INF, NAN):
        assert unscale([torch.ones(3, device=device)], inverse, before=before) == 1
