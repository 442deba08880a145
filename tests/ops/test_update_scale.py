"""Tests of ``update_scale_`` at the edges; test_scaler_limits.py has all rules beside torch's."""

from __future__ import annotations

import math

import pytest
import torch
from harness.rows import rows

from amp_ext import ops

LARGEST = torch.finfo(torch.float32).max


def factors(growth_factor=2.0, backoff_factor=0.5, growth_interval=3) -> dict[str, float]:
    names = ("growth_factor", "backoff_factor", "growth_interval")
    return dict(zip(names, (growth_factor, backoff_factor, growth_interval), strict=True))


@pytest.mark.parametrize(
    ("scale", "tracker", "found_infs", "numbers", "expected"),
    rows(
        {
            "past-the-interval-no-growth": (8.0, 3, [0.0], factors(), (8.0, 4)),
            "interval-zero": (8.0, 0, [0.0], factors(growth_interval=0), (8.0, 1)),
            "found-inf-nan": (8.0, 1, [math.nan], factors(), (4.0, 0)),
            "minus-zero-is-clean": (8.0, 1, [-0.0], factors(), (8.0, 2)),
            "first-of-several-launches": (8.0, 2, [1.0] + [0.0] * 300, factors(), (4.0, 0)),
            "rounded-once": (3.0, 2, [0.0], factors(1.7), (torch.tensor(5.1).item(), 0)),
            "never-to-inf": (2.0**127, 2, [0.0], factors(), (2.0**127, 0)),
            "largest-stays": (LARGEST, 2, [0.0], factors(1.0001), (LARGEST, 0)),
            "up-to-the-largest": (LARGEST / 2, 2, [0.0], factors(), (LARGEST, 0)),
            "zero-stays": (0.0, 2, [1.0], factors(), (0.0, 0)),
            "down-to-zero": (2.0**-149, 2, [1.0], factors(), (0.0, 0)),
            "subnormal": (2.0**-130, 2, [1.0], factors(), (2.0**-131, 0)),
        }
    ),
)
def test_one_update(scale, tracker, found_infs, numbers, expected, device) -> None:
    scale_tensor = torch.full((), scale, device=device)
    tracker_tensor = torch.full((), tracker, dtype=torch.int32, device=device)
    flags = [torch.full((), value, device=device) for value in found_infs]
    ops.update_scale_(scale_tensor, tracker_tensor, flags, **numbers)
    assert (scale_tensor.item(), tracker_tensor.item()) == expected


def test_a_product_with_the_scale_can_not_go_back_after_an_update(device) -> None:
    scale = torch.full((), 8.0, device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    loss = torch.ones((), device=device, requires_grad=True) * scale
    ops.update_scale_(scale, tracker, [torch.ones((), device=device)], **factors())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert (scale._version, tracker._version) == (1, 1)
