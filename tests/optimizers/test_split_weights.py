"""Masters that are split: the optimizers' option, what becomes of it in files and conversions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_ext
from amp_ext.optim import SGD, Adam, AdamW, Lion

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
dtypes = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)
every_class = pytest.mark.parametrize(
    "kind", [Adam, AdamW, Lion, MOMENTUM], ids=["Adam", "AdamW", "Lion", "SGD"]
)


def model_of(dtype: torch.dtype, device: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 21), nn.Linear(21, 5)).to(device, dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator) * 0.1
            param.grad = grad.to(param.device, param.dtype)
        optimizer.step()


def bits(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone().view(torch.int16) for param in model.parameters()]


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@every_class
@dtypes
def test_masters_are_those_that_stand_beside(device, kind, dtype):
    model, twin = model_of(dtype, device), model_of(dtype, device)
    optimizer = kind(model.parameters(), master_weights="split")
    other = kind(twin.parameters())
    for steps in (range(5), range(5, 10)):
        train(model, optimizer, steps)
        train(twin, other, steps)
        for split, whole in zip(optimizer.master_params(), other.master_params(), strict=True):
            assert split.dtype == F32
            error = 0.0 if dtype == BF16 else 2**-38
            assert (split - whole).abs().max().item() <= error
    for param, equal in zip(model.parameters(), twin.parameters(), strict=True):
        assert (param != equal).float().mean().item() < 0.01  # ties alone


@dtypes
def test_a_state_has_the_lower_part_under_the_name_of_its_format(device, dtype):
    model = model_of(dtype, device)
    weight = next(model.parameters())
    name = "bf16" if dtype == BF16 else "fp16"
    optimizer = AdamW(model.parameters(), master_weights="split")
    optimizer.init_state()
    low = optimizer.state[weight][f"master_low_{name}"]
    assert (low.dtype, low.shape) == (torch.uint8, (21, 37, 2))
    assert "master_param" not in optimizer.state[weight]
    optimizer = AdamW(model.parameters(), master_weights="split8")
    optimizer.init_state()
    low = optimizer.state[weight][f"master_low8_{name}"]
    assert (low.dtype, low.shape) == (torch.int8, (21, 37))


@dtypes
def test_every_number_that_is_written_is_followed(device, dtype):
    """Whatever is below it, unless that is half a unit in the last place."""
    values = torch.arange(2**16).to(torch.int16).view(dtype)
    values = values[values.isfinite()].to(device)
    for start in (1.2, -0.7, 1.0 + 2**-12, 3e-5):
        param = nn.Parameter(torch.full(values.shape, start, dtype=dtype, device=device))
        optimizer = SGD([param], lr=0.0, master_weights="split")
        optimizer.init_state()
        key = next(key for key in optimizer.state[param] if key.startswith("master_low"))
        unit = 2.0**-7 if dtype == BF16 else 2.0**-10
        fractions = torch.linspace(-0.499, 0.499, len(values), device=device)
        near = param.detach().float() * (1 + unit * 0.65 * fractions)
        optimizer.state[param][key].copy_(amp_ext.ops.split_master(param.detach(), near, 16))
        with torch.no_grad():
            param.copy_(values)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert torch.equal(param, values)


def test_masters_are_copies_and_need_no_refresh(device):
    model = model_of(BF16, device)
    optimizer = AdamW(model.parameters(), master_weights="split")
    train(model, optimizer, range(3))
    before = bits(model)
    for master in optimizer.master_params():
        master.zero_()
    optimizer.refresh_masters()
    assert_equal(bits(model), before)
    assert all(master.any() for master in optimizer.master_params())


def test_a_layout_is_kept(device):
    conv = nn.Conv2d(3, 8, 3).to(device, BF16, memory_format=torch.channels_last)
    twin = nn.Conv2d(3, 8, 3).to(device, BF16)
    twin.load_state_dict(conv.state_dict())
    optimizer = AdamW(conv.parameters(), master_weights="split")
    other = AdamW(twin.parameters(), master_weights="split")
    train(conv, optimizer, range(3))
    train(twin, other, range(3))
    assert_equal([*conv.parameters()], [*twin.parameters()])
    assert_equal(optimizer.master_params(), other.master_params())
