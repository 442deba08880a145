"""Tests of ``update_scale_``: back off on overflow, grow after the interval, never to inf."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from amp_ext import ops

LARGEST = torch.finfo(torch.float32).max


class Numbers(NamedTuple):
    """The hyperparameters of one update."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 3


def updated(
    scale: float, tracker: int, found_infs: list[float], numbers: Numbers, device
) -> tuple[float, int]:
    """Returns the scale and the counter after one update."""
    scale_tensor = torch.full((), scale, device=device)
    tracker_tensor = torch.full((), tracker, dtype=torch.int32, device=device)
    tensors = [torch.full((), value, device=device) for value in found_infs]
    ops.update_scale_(scale_tensor, tracker_tensor, tensors, **numbers._asdict())
    return scale_tensor.item(), int(tracker_tensor.item())


@pytest.mark.parametrize(
    ("scale", "tracker", "found_infs", "numbers", "expected"),
    [
        pytest.param(8.0, 0, [0.0], Numbers(), (8.0, 1), id="counts"),
        pytest.param(8.0, 1, [0.0], Numbers(), (8.0, 2), id="counts-on"),
        pytest.param(8.0, 2, [0.0], Numbers(), (16.0, 0), id="grows-at-the-interval"),
        pytest.param(8.0, 0, [0.0], Numbers(growth_interval=1), (16.0, 0), id="interval-one"),
        pytest.param(8.0, 3, [0.0], Numbers(), (8.0, 4), id="past-the-interval-no-growth"),
        pytest.param(8.0, 0, [0.0], Numbers(growth_interval=0), (8.0, 1), id="interval-zero"),
        pytest.param(8.0, 2, [1.0], Numbers(), (4.0, 0), id="backs-off"),
        pytest.param(8.0, 0, [1.0], Numbers(growth_interval=1), (4.0, 0), id="backoff-wins"),
        pytest.param(8.0, 1, [2.0], Numbers(), (4.0, 0), id="found-by-two"),
        pytest.param(8.0, 1, [3.0], Numbers(), (4.0, 0), id="found-by-three"),
        pytest.param(8.0, 1, [0.25], Numbers(), (4.0, 0), id="any-value-but-zero"),
        pytest.param(8.0, 1, [float("nan")], Numbers(), (4.0, 0), id="found-inf-nan"),
        pytest.param(8.0, 1, [-0.0], Numbers(), (8.0, 2), id="minus-zero-is-clean"),
        pytest.param(8.0, 2, [0.0] * 3, Numbers(), (16.0, 0), id="three-clean"),
        pytest.param(8.0, 2, [0.0, 0.0, 1.0], Numbers(), (4.0, 0), id="last-of-three"),
        pytest.param(8.0, 2, [1.0, 0.0, 0.0], Numbers(), (4.0, 0), id="first-of-three"),
        pytest.param(8.0, 2, [1.0] * 50, Numbers(), (4.0, 0), id="one-backoff-for-fifty"),
        pytest.param(8.0, 2, [0.0], Numbers(growth_factor=1.5), (12.0, 0), id="growth-factor"),
        pytest.param(8.0, 2, [1.0], Numbers(backoff_factor=0.25), (2.0, 0), id="backoff-factor"),
        pytest.param(2.0**127, 2, [0.0], Numbers(), (2.0**127, 0), id="never-to-inf"),
        pytest.param(LARGEST, 2, [0.0], Numbers(1.0001), (LARGEST, 0), id="largest-stays"),
        pytest.param(LARGEST / 2, 2, [0.0], Numbers(), (LARGEST, 0), id="up-to-the-largest"),
        pytest.param(0.0, 2, [1.0], Numbers(), (0.0, 0), id="zero-stays"),
        pytest.param(2.0**-149, 2, [1.0], Numbers(), (0.0, 0), id="down-to-zero"),
        pytest.param(2.0**-130, 2, [1.0], Numbers(), (2.0**-131, 0), id="subnormal"),
    ],
)
def test_one_update(
    scale: float,
    tracker: int,
    found_infs: list[float],
    numbers: Numbers,
    expected: tuple[float, int],
    device,
) -> None:
    assert updated(scale, tracker, found_infs, numbers, device) == expected


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(Numbers(), id="usual"),
        pytest.param(Numbers(1.7, 0.3, 2), id="factors-that-round"),
        pytest.param(Numbers(1.0 + 1e-9, 1.0 - 1e-9, 1), id="factors-that-are-one-in-float32"),
        pytest.param(Numbers(1e30, 1e-30, 2), id="huge-factors"),
    ],
)
def test_a_long_sequence_is_torchs(numbers: Numbers, device) -> None:
    draw = random.Random(0)
    actual = torch.full((), 65536.0, device=device)
    actual_tracker = torch.zeros((), dtype=torch.int32, device=device)
    expected, expected_tracker = actual.clone(), actual_tracker.clone()
    for step in range(300):
        found_inf = torch.full((), float(draw.random() < 0.35), device=device)
        torch._amp_update_scale_(expected, expected_tracker, found_inf, *numbers)
        ops.update_scale_(actual, actual_tracker, [found_inf], **numbers._asdict())
        assert actual.item() == expected.item(), step
        assert actual_tracker.item() == expected_tracker.item(), step


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_only_the_scale_and_the_counter_are_written(shape: tuple[int, ...], device) -> None:
    scales = torch.tensor([5.0, 8.0, 5.0], device=device)
    trackers = torch.tensor([5, 1, 5], dtype=torch.int32, device=device)
    found_infs = [torch.zeros(shape, device=device), torch.full(shape, 2.0, device=device)]
    ops.update_scale_(
        scales[1:2].view(shape), trackers[1:2].view(shape), found_infs, **Numbers()._asdict()
    )
    assert scales.tolist() == [5, 4, 5]
    assert trackers.tolist() == [5, 0, 5]
    assert [found_inf.item() for found_inf in found_infs] == [0, 2]
