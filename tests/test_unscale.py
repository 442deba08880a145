"""Tests of ``unscale_``: one multiplication in place, and the verdict on what came in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import same_bits
from torch import Tensor

from amp_ext import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SIZES = [0, 1, 3, 4, 5, 8, 9, 31, 33, 1023, 1025, 4097, 16385, 65537]
INVERSES = [1 / 65536, 1 / 3, 3.0, 1e30]


def expected(grad: Tensor, inv_scale: float) -> Tensor:
    """Multiplies in float32, in float64 for float64, and rounds once to the dtype of ``grad``."""
    inverse = torch.tensor(inv_scale, dtype=torch.float32)
    if grad.dtype == torch.float64:
        return grad.cpu() * inverse.double()
    return (grad.cpu().float() * inverse).to(grad.dtype)


def unscale(grads: list[Tensor], inv_scale: float, *, before: float = 0.0) -> float:
    """Unscales in place and returns found_inf."""
    device = grads[0].device if grads else "cpu"
    found_inf = torch.full((), before, device=device)
    ops.unscale_(grads, torch.full((), inv_scale, device=device), found_inf)
    return found_inf.item()


def equal(actual: Tensor, wanted: Tensor) -> bool:
    """Compares bits, except that any NaN equals any other."""
    actual = actual.cpu()
    nan = wanted.isnan()
    return torch.equal(actual.isnan(), nan) and same_bits(actual[~nan], wanted[~nan])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_multiplied_in_place(dtype: torch.dtype, device) -> None:
    for inv_scale in INVERSES:
        grads = [torch.randn(size, device=device).to(dtype) for size in SIZES]
        wanted = [expected(grad, inv_scale) for grad in grads]
        addresses = [grad.data_ptr() for grad in grads]
        assert unscale(grads, inv_scale) == 0
        assert all(map(equal, grads, wanted)), inv_scale
        assert [grad.data_ptr() for grad in grads] == addresses


@pytest.mark.parametrize("inv_scale", [1.0, 1 / 65536, 1 / 3, 2.0, 1000.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number_is_rounded_once(dtype: torch.dtype, inv_scale: float, device) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = patterns[patterns.isfinite()]
    grads = [patterns.clone().to(device), finite.clone().to(device)]
    assert unscale(grads[1:], inv_scale) == 0
    assert unscale(grads[:1], inv_scale) == 1
    assert equal(grads[0], expected(patterns, inv_scale))
    assert same_bits(grads[1], expected(finite, inv_scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_inverse_of_one_changes_no_bit(dtype: torch.dtype, device) -> None:
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    grad = torch.tensor([0.0, -0.0, tiny / 2, -tiny, 1.1, largest, -largest], dtype=dtype)
    before = grad.clone()
    grad = grad.to(device)
    assert unscale([grad], 1.0) == 0
    assert same_bits(grad, before)


def test_float64_is_multiplied_by_the_float32_inverse_in_float64(device) -> None:
    grad = torch.tensor([1.0, 1e300, 1e-300, 1 / 3], dtype=torch.float64, device=device)
    wanted = grad.cpu() * torch.tensor(1 / 3, dtype=torch.float32).item()
    assert unscale([grad], 1 / 3) == 0
    assert same_bits(grad, wanted)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gradients_are_unscaled_even_when_one_is_not_finite(
    dtype: torch.dtype, value: float, device
) -> None:
    for size in (1, 9, 4097, 65537):
        grads = [torch.ones(7, dtype=dtype), torch.ones(size, dtype=dtype), torch.ones(3)]
        grads = [grad.to(device=device, dtype=dtype) for grad in grads]
        grads[1][size // 2] = value
        wanted = [expected(grad, 0.25) for grad in grads]
        assert unscale(grads, 0.25) == 1
        assert all(map(equal, grads, wanted))


@pytest.mark.parametrize(
    ("value", "inv_scale", "dtype"),
    [
        pytest.param(3e38, 4.0, torch.float32, id="float32"),
        pytest.param(6e4, 2.0, torch.float16, id="float16"),
        pytest.param(3e38, 2.0, torch.bfloat16, id="bfloat16"),
        pytest.param(1e308, 1e30, torch.float64, id="float64"),
    ],
)
def test_the_verdict_is_about_the_incoming_value(
    value: float, inv_scale: float, dtype: torch.dtype, device
) -> None:
    grad = torch.full((40,), value, dtype=dtype, device=device)
    assert unscale([grad], inv_scale) == 0
    assert grad.isinf().all()


def test_a_gradient_that_becomes_zero_was_still_an_overflow(device) -> None:
    grad = torch.tensor([1.0, float("inf")], device=device)
    assert unscale([grad], 0.0) == 1


@pytest.mark.parametrize("inv_scale", [float("inf"), float("nan")], ids=str)
def test_an_inverse_that_is_not_finite_counts_as_overflow(inv_scale: float, device) -> None:
    assert unscale([torch.ones(3, device=device)], inv_scale) == 1


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0])
def test_found_inf_is_set_to_one_or_left_as_it_is(before: float, device) -> None:
    assert unscale([torch.ones(9, device=device)], 0.5, before=before) == before
    bad = [torch.full((9_000,), float("nan"), device=device) for _ in range(3)]
    assert unscale(bad, 0.5, before=before) == 1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_scalars_may_have_any_shape_of_one_element(shape: tuple[int, ...], device) -> None:
    neighbours = torch.tensor([7.0, 0.0, 7.0], device=device)
    inverses = torch.tensor([9.0, 0.5, 9.0], device=device)
    grad = torch.tensor([2.0, float("inf")], device=device)
    ops.unscale_([grad], inverses[1:2].view(shape), neighbours[1:2].view(shape))
    assert neighbours.tolist() == [7, 1, 7]
    assert inverses.tolist() == [9, 0.5, 9]
    assert grad.tolist() == [1, float("inf")]


def test_no_gradients_are_clean(device) -> None:
    found_inf = torch.zeros((), device=device)
    ops.unscale_([], torch.full((), 0.5, device=device), found_inf)
    ops.unscale_([torch.empty(0, 3, device=device)], torch.ones((), device=device), found_inf)
    assert found_inf.item() == 0


@pytest.mark.parametrize("count", [1, 30, 700])
def test_any_number_of_gradients_is_unscaled(count: int, device) -> None:
    grads = [torch.randn(index % 6, device=device) for index in range(count)]
    wanted = [expected(grad, 1 / 3) for grad in grads]
    assert unscale(grads, 1 / 3) == 0
    assert all(map(equal, grads, wanted))


def test_a_list_may_mix_dtypes(device) -> None:
    grads = [torch.randn(9, device=device).to(dtype) for dtype in DTYPES * 2]
    wanted = [expected(grad, 1 / 3) for grad in grads]
    assert unscale(grads, 1 / 3) == 0
    assert all(map(equal, grads, wanted))


VIEWS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("every-second", lambda base: base[::2]),
    ("misaligned", lambda base: base[1:-1]),
    ("columns", lambda base: base.view(60, 70)[:, 3:66]),
    ("transposed", lambda base: base.view(60, 70).t()[2:, :59]),
    ("channels-last", lambda base: base.view(2, 5, 6, 70).permute(0, 3, 1, 2)[:1]),
    ("three-dimensions", lambda base: base.view(60, 7, 10)[::3, 1:6, ::2]),
    ("one-element", lambda base: base[77]),
]


@pytest.mark.parametrize("view", [pytest.param(view, id=name) for name, view in VIEWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_unscaled_and_its_neighbours_are_not(
    dtype: torch.dtype, view: Callable[[Tensor], Tensor], device
) -> None:
    values = torch.randn(4200).to(dtype)
    outside = torch.ones(4200, dtype=torch.bool)
    view(outside).zero_()
    values[outside] = float("inf")
    wanted = values.clone()
    view(wanted).copy_(expected(view(values), 1 / 3))
    base = values.to(device)
    assert unscale([view(base)], 1 / 3) == 0
    assert same_bits(base, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_slices_at_every_alignment_are_right(dtype: torch.dtype, device) -> None:
    for start in range(17):
        for length in range(0, 36, 5):
            values = torch.randn(60).to(dtype)
            wanted = values.clone()
            part = slice(start, start + length)
            wanted[part] = expected(values[part], 1 / 3)
            base = values.to(device)
            assert unscale([base[part]], 1 / 3) == 0
            assert same_bits(base, wanted), (start, length)


def test_the_versions_of_the_gradients_move(device) -> None:
    grads = [torch.ones(5, device=device), torch.ones(4, 4, device=device).t()]
    versions = [grad._version for grad in grads]
    inv_scale = torch.full((), 0.5, device=device)
    ops.unscale_(grads, inv_scale, torch.zeros((), device=device))
    assert all(grad._version > before for grad, before in zip(grads, versions, strict=True))
    assert inv_scale._version == 0


def test_a_stale_saved_tensor_is_detected(device) -> None:
    weight = torch.ones(5, device=device, requires_grad=True)
    grad = torch.ones(5, device=device)
    product = (weight * grad).sum()
    unscale([grad], 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        pytest.param(torch.ones(2, dtype=torch.int32), "must be .*Int", id="integers"),
        pytest.param(torch.ones(2, dtype=torch.complex64), "must be .*Complex", id="complex"),
        pytest.param(torch.ones(2).to_sparse(), "must be .*[Ss]parse", id="sparse"),
        pytest.param(torch.ones(2, device="meta"), "must be .*meta", id="another-device"),
        pytest.param(torch.ones(1).expand(5), ".*must not overlap", id="expanded"),
        pytest.param(
            torch.ones(6).as_strided((3, 3), (1, 1)), ".*must not overlap", id="overlapping"
        ),
    ],
)
def test_a_bad_gradient_is_named_and_nothing_is_written(bad: Tensor, text: str) -> None:
    good, found_inf = torch.ones(3), torch.zeros(())
    with pytest.raises(RuntimeError, match=rf"unscale_: grads\[1\] {text}"):
        ops.unscale_([good, bad, good.clone()], torch.tensor(0.5), found_inf)
    assert good.tolist() == [1, 1, 1]
    assert found_inf.item() == 0
    if bad.layout is torch.strided and bad.device.type == "cpu":
        assert torch.equal(bad, torch.ones_like(bad))


@pytest.mark.parametrize(
    ("inv_scale", "found_inf", "text"),
    [
        pytest.param(
            torch.ones((), dtype=torch.float64),
            torch.zeros(()),
            "inv_scale must be Float, got Double",
            id="double-inverse",
        ),
        pytest.param(torch.ones(2), torch.zeros(()), "inv_scale must", id="two-inverses"),
        pytest.param(
            torch.ones(()),
            torch.zeros((), dtype=torch.float16),
            "found_inf must be Float, got Half",
            id="half-found-inf",
        ),
        pytest.param(torch.ones(()), torch.zeros(0), "found_inf must", id="no-found-inf"),
        pytest.param(
            torch.ones((), device="meta"), torch.zeros(()), "inv_scale must", id="elsewhere"
        ),
    ],
)
def test_bad_scalars_are_named_and_nothing_is_written(
    inv_scale: Tensor, found_inf: Tensor, text: str
) -> None:
    grad = torch.full((3,), 2.0)
    with pytest.raises(RuntimeError, match=rf"unscale_: {text}"):
        ops.unscale_([grad], inv_scale, found_inf)
    assert grad.tolist() == [2, 2, 2]
