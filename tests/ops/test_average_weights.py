"""Tests of one update of averages, on every kind of weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F16, F32, F64
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor
from torch.nn import Parameter

from amp_ext import ops
from amp_ext.optim import SGD, WeightAverage

# Less than a vector, a tile and more than one of every kernel, and nothing.
SIZES = [1, 7, 0, 2049, 8193, 33]


def drawn(device: torch.device, dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(size).to(dtype).to(device) for size in SIZES]


def weight_of(n: int, decay: float | str, warmup: bool) -> float:
    if decay == "equal":
        return 1 / (n + 1)
    return 1 - (min(decay, (1 + n) / (10 + n)) if warmup else decay)


@pytest.mark.parametrize(
    ("decay", "warmup"),
    [
        ("equal", False),
        (0.999, True),
        (0.15, True),
        *((it, False) for it in (0.999, 0.5, 0.0, 1.0)),
    ],
)
def test_the_weight_of_each_average_is_that_of_its_schedule(decay, warmup, device):
    params = [Parameter(weight) for weight in drawn(device)]
    optimizer = SGD(params, lr=0.0)
    average = WeightAverage(optimizer, decay, warmup=warmup)
    expected = [average.double() for average in average.averages]
    for n in range(12):
        share = 1.0 if n == 0 else weight_of(n, decay, warmup)
        for index, (param, new) in enumerate(zip(params, drawn(device), strict=True)):
            param.data, param.grad = new, torch.zeros_like(new)
            expected[index] += share * (new.double() - expected[index])
        optimizer.step()
    for actual, wanted in zip(average.averages, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=2e-6, atol=2e-6)


# The operator


def number(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=F64, device=device)


@pytest.mark.parametrize("low_bits", [16, 8])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_split_master_is_averaged_decoded(dtype, low_bits, device):
    """Also in another layout than that of its average."""
    masters = [*drawn(device), torch.randn(8, 6, device=device)]
    params = [master.to(dtype) for master in masters]
    residuals = [ops.split_fp32(p, m, low_bits) for p, m in zip(params, masters, strict=True)]
    whole = [ops.join_fp32(p, residual) for p, residual in zip(params, residuals, strict=True)]
    split, joined = ([torch.ones_like(each) for each in whole] for _ in range(2))
    split[-1] = torch.ones(6, 8, device=device).t()
    numbers = number(0.25, device), number(2.0, device)
    version = split[0]._version
    ops.average_params_(split, params, *numbers, residuals=residuals)
    ops.average_params_(joined, whole, *numbers)
    assert all(map(same_bits, split, joined))
    assert split[0]._version > version, "autograd knows of the write"


@pytest.mark.parametrize("average_dtype", [F32, BF16])
def test_any_layout_of_a_weight_is_walked_in_that_of_the_average(average_dtype, device):
    image = torch.randn(3, 4, 5, 6, device=device).to(memory_format=torch.channels_last)
    layouts = [image, torch.randn(8, 6, device=device).t(), torch.randn(40, device=device)[::2]]
    averages = [torch.zeros_like(each, dtype=average_dtype) for each in layouts]
    unit = 2.0**-7 if average_dtype == BF16 else 0.0
    weights = layouts
    for count, share in enumerate((0.5, 0.75), 6):
        ops.average_params_(averages, weights, number(0.5, device), number(count, device))
        for average, weight in zip(averages, layouts, strict=True):
            torch.testing.assert_close(average.float(), weight * share, rtol=unit, atol=unit)
        weights = [weight.contiguous() for weight in layouts]


def test_a_bfloat16_average_moves_as_a_float32_one_where_to_nearest_it_would_stand_still(device):
    """The weights lie between one number of bfloat16 and the next."""
    count, steps, unit = 5_000, 1000, 2.0**-7
    start = (1 + 0.9 * torch.rand(count, device=device)).bfloat16().float()
    weight = start + unit * (0.5 + 0.5 * torch.rand(count, device=device))
    wide, narrow, nearest = start.clone(), start.bfloat16(), start.bfloat16()
    for step in range(steps):
        for average in (wide, narrow):
            numbers = number(0.001, device), number(2.0 + step, device)
            ops.average_params_([average], [weight], *numbers)
        nearest.copy_(nearest.float().lerp(weight, 0.001))
    moved = (wide - start).mean()
    assert ((narrow.float() - start).mean() / moved - 1).abs() < 0.01
    assert (nearest.float() - start).mean() < 0.1 * moved
    assert (narrow.float() - wide).abs().max() <= unit


def test_the_first_average_has_the_bits_of_the_weight(device):
    odd = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, 1e-45, 3e38], device=device)
    for dtype in (F32, F64, F16, BF16):
        wanted, average = odd.to(dtype), torch.full_like(odd, torch.nan)
        ops.average_params_([average], [wanted], number(0.5, device), number(1.0, device))
        assert same_bits(average, wanted.float())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_weight_of_0_writes_nothing_and_the_first_average_is_a_copy(dtype, device):
    params = [torch.arange(5.0, device=device), torch.tensor([torch.nan, 1.0], device=device)]
    averages = [torch.full_like(param, torch.nan, dtype=dtype) for param in params]
    before = [average.clone() for average in averages]
    for count in (1.0, 7.0):
        ops.average_params_(averages, params, number(0.0, device), number(count, device))
        assert all(map(same_bits, averages, before))
    ops.average_params_(averages, params, number(0.25, device), number(1.0, device))
    assert same_bits(averages[0], params[0].to(dtype))
    ops.average_params_(averages, [-params[0], params[1]], *(number(n, device) for n in (0.5, 2)))
    assert not averages[0].any()


def test_a_shard_is_dithered_as_in_the_full_tensor(device):
    param = torch.randn(500, device=device)
    weight, count = number(0.001, device), number(9.0, device)
    whole = torch.ones_like(param, dtype=BF16)
    shard = whole[100:].clone()
    ops.average_params_([whole], [param], weight, count)
    ops.average_params_([shard], [param[100:].clone()], weight, count, global_offsets=[100])
    assert same_bits(shard, whole[100:])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a-list-too-short": ({"averages": []}, "averages must have 1 tensors, one for each of params"),
    "another-shape": (
        {"params": [torch.ones(3)]},
        r"params\[0\] must be of sizes \[2\] on cpu, got",
    ),
    "half-averages": ({"averages": [torch.ones(2, dtype=F16)]}, r"averages\[0\] must be dense, Fl"),
    "gaps": ({"averages": [torch.ones(4)[::2]]}, r"averages\[0\] must be dense, Float or BFloat16"),
    "a-weight-in-float32": ({"weight": torch.ones(())}, "weight must be "),
    "a-residual-of-float32": (
        {"residuals": [torch.ones(2, dtype=torch.int8)]},
        r"residuals\[0\] must be on cpu beside Half or BFloat16, got cpu beside Float",
    ),
    "no-offsets": ({"global_offsets": []}, "global_offsets must have 1 elements, as params, got 0"),
    "a-residual-of-another-shape": (
        {"params": [torch.ones(2, dtype=BF16)], "residuals": [torch.ones(3, dtype=torch.int8)]},
        r"residuals\[0\] must be of sizes \[2\], got \[3\]",
    ),
}


@pytest.mark.parametrize(("change", "text"), rows(WRONG))
def test_wrong_arguments_are_refused_by_name(change, text):
    one = torch.ones((), dtype=F64)
    arguments: dict[str, Any] = {"params": [torch.ones(2)], "weight": one, "number": one}
    average = torch.zeros(2)
    with pytest.raises(RuntimeError, match=f"^average_params_: {text}"):
        ops.average_params_(**{"averages": [average]} | arguments | change)
    assert not average.any()
