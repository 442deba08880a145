"""Tests of one step of averages over lists, on every kind of weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F16, F32, F64
from harness.launch_failures import refusing_launch
from harness.reference import same_bits
from torch import Tensor

from amp_ext import ops

# Less than a vector, a tile and more than one of every kernel, and nothing.
SIZES = [1, 7, 0, 2049, 8193, 33]


def new_counters(device: Any, steps: int = 0, averages: int = 0) -> Tensor:
    return torch.tensor([steps, averages], device=device)


def drawn(device: torch.device, dtype: torch.dtype = F32) -> list[Tensor]:
    return [torch.randn(size).to(dtype).to(device) for size in SIZES]


def weight_of(n: int, decay: float | None, warmup: bool) -> float:
    if decay is None:
        return 1 / (n + 1)
    return 1 - (min(decay, (1 + n) / (10 + n)) if warmup else decay)


@pytest.mark.parametrize(
    ("decay", "warmup"),
    [(None, False), (0.999, True), (0.15, True), *((it, False) for it in (0.999, 0.5, 0.0, 1.0))],
)
def test_the_weight_of_each_average_is_that_of_its_schedule(decay, warmup, device):
    averages, counters = drawn(device), new_counters(device)
    expected = [average.double() for average in averages]
    for n in range(12):
        weights = drawn(device)
        share = 1.0 if n == 0 else weight_of(n, decay, warmup)
        expected = [
            before + share * (weight.double() - before)
            for before, weight in zip(expected, weights, strict=True)
        ]
        ops.average_weights_(averages, weights, counters, decay=decay, warmup=warmup)
    for average, wanted in zip(averages, expected, strict=True):
        torch.testing.assert_close(average.double(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("low_bits", [16, 8])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_split_master_is_averaged_decoded(dtype, low_bits, device):
    masters = drawn(device)
    params = [master.to(dtype) for master in masters]
    residuals = [ops.split_fp32(p, m, low_bits) for p, m in zip(params, masters, strict=True)]
    whole = [ops.join_fp32(p, residual) for p, residual in zip(params, residuals, strict=True)]
    forms: list[dict[str, Any]] = [
        {"params": params, "master_params": residuals},
        {"params": params, "master_params": whole},
        {"params": whole},
    ]
    results = []
    for form in forms:
        averages = [torch.ones_like(each) for each in whole]
        counters = new_counters(device, 1, 1)
        ops.average_weights_(averages, counters=counters, decay=0.75, **form)
        results.append(averages)
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


def test_masters_of_all_kinds_and_parameters_of_other_dtypes_stand_in_one_list(device):
    """Two launches for each dtype of averages, the last of which counts."""
    params = [torch.full((5,), 1.5, dtype=t, device=device) for t in (F32, F64, F16, BF16)] * 2
    averages = [torch.zeros(5, dtype=F32 if i < 4 else BF16, device=device) for i in range(8)]
    counters = new_counters(device)
    for _ in range(3):
        ops.average_weights_(averages, params, counters)
    assert counters.tolist() == [3, 3]
    assert all((average == 1.5).all() for average in averages)


def test_a_step_of_no_tensors_counts_too(device):
    counters, landed = new_counters(device), torch.ones((), device=device)
    for flag in (1.0, 0.0, 1.0):
        ops.average_weights_([], [], counters, step_applied=landed.fill_(flag), every=2)
    assert counters.tolist() == [2, 1]


@pytest.mark.parametrize("average_dtype", [F32, BF16])
def test_any_layout_of_a_weight_is_walked_in_that_of_the_average(average_dtype, device):
    image = torch.randn(3, 4, 5, 6, device=device).to(memory_format=torch.channels_last)
    weights = [image, torch.randn(8, 6, device=device).t(), torch.randn(40, device=device)[::2]]
    counters = new_counters(device, 5, 5)
    layouts: list[list[Tensor]] = [
        [torch.empty_like(weight, dtype=average_dtype).zero_() for weight in weights],
        [torch.zeros(weight.shape, dtype=average_dtype, device=device) for weight in weights],
    ]
    for averages in layouts:
        ops.average_weights_(averages, weights, counters, decay=0.5)
    unit = 2.0**-7 if average_dtype == BF16 else 0.0
    for averages in layouts:
        for average, weight in zip(averages, weights, strict=True):
            torch.testing.assert_close(average.float(), weight / 2, rtol=unit, atol=0)


def test_a_skipped_step_writes_nothing_and_every_counts_those_that_landed(device):
    average, counters = torch.zeros(5, device=device), new_counters(device)
    taken = []
    for step in range(12):
        landed = torch.tensor(float(step % 4 != 1), device=device)
        weight = torch.full((5,), float(step), device=device)
        before = average.clone()
        ops.average_weights_([average], [weight], counters, step_applied=landed, every=3, decay=0.0)
        if not same_bits(before, average):
            taken.append(step)
    assert taken == [3, 7, 11]  # the third, sixth and ninth of those that landed
    assert counters.tolist() == [9, 3]


def test_a_bfloat16_average_moves_as_a_float32_one_where_to_nearest_it_would_stand_still(device):
    """The weights lie between one number of bfloat16 and the next."""
    count, steps, unit = 5_000, 1000, 2.0**-7
    start = (1 + 0.9 * torch.rand(count, device=device)).bfloat16().float()
    weight = start + unit * (0.5 + 0.5 * torch.rand(count, device=device))
    wide, narrow, nearest = start.clone(), start.bfloat16(), start.bfloat16()
    counters = [new_counters(device, 1, 1) for _ in range(2)]
    for _ in range(steps):
        ops.average_weights_([wide], [weight], counters[0])
        ops.average_weights_([narrow], [weight], counters[1])
        nearest.copy_(nearest.float().lerp(weight, 0.001))
    moved = (wide - start).mean()
    assert ((narrow.float() - start).mean() / moved - 1).abs() < 0.01
    assert (nearest.float() - start).mean() < 0.1 * moved
    assert (narrow.float() - wide).abs().max() <= unit


def test_a_part_is_dithered_as_the_whole(device):
    weight = torch.rand(3000, device=device)
    whole = torch.zeros(3000, dtype=BF16, device=device)
    parts = [torch.zeros_like(whole[:1001]), torch.zeros_like(whole[1001:])]
    counters = [new_counters(device, 9, 9) for _ in range(2)]
    ops.average_weights_([whole], [weight], counters[0])
    ops.average_weights_(
        parts, [weight[:1001], weight[1001:]], counters[1], global_offsets=[0, 1001]
    )
    assert same_bits(torch.cat(parts), whole)
    assert not same_bits(whole, (weight * 0.001).bfloat16()), "it is dithered"


def test_one_launch_takes_hundreds_of_tensors(emulated):
    weights = [torch.ones(3) for _ in range(700)]
    averages = [torch.zeros(3) for _ in weights]
    with refusing_launch(1):
        ops.average_weights_(averages, weights, new_counters("cpu"))
    assert all((average == 1).all() for average in averages)


def test_the_first_average_has_the_bits_of_the_weight(device):
    odd = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, 1e-45, 3e38], device=device)
    for average in (torch.full_like(odd, torch.nan), torch.zeros_like(odd)):
        ops.average_weights_([average], [odd], new_counters(device), decay=0.5)
        assert same_bits(average, odd)
