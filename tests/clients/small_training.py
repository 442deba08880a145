"""A small model, its data, and the loop by hand that the clients' loops are compared with."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_ext

BATCHES = 12
LR = 0.05
# So large that the first iterations overflow in float16.
INIT_SCALE = 2.0**20


def client(name: str) -> Any:
    """Imports a client library, or skips the whole file.

    Under ``AMP_EXT_REQUIRE_CLIENTS=1`` a missing one is a failure.
    """
    required = os.environ.get("AMP_EXT_REQUIRE_CLIENTS") == "1"
    if importlib.util.find_spec(name) is None and not required:
        pytest.skip(f"{name} is not installed: make test-clients", allow_module_level=True)
    _make_torchvision_importable()
    return importlib.import_module(name)


@functools.cache
def _make_torchvision_importable() -> None:
    """Declares two operators that torchvision takes for granted when it is imported.

    Its wheels need a torch for CUDA; under one for the CPU its binary does not load. timm and
    torchmetrics import it and use none of its operators here.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for operator in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)


def our_scaler() -> amp_ext.GradScaler:
    return amp_ext.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=4)


MakeOptimizer = Callable[..., torch.optim.Optimizer]

our_adamw = functools.partial(amp_ext.optim.AdamW, lr=LR)


def guarded_adamw(params: Any, **options: Any) -> amp_ext.optim.AdamW:
    """Returns an optimizer with a guard, which a broken batch of ``make_batches`` offends."""
    guard = amp_ext.optim.NormGuard(max_norm=50.0)
    return our_adamw(params, norm_guard=guard, **options)


FUSED = [
    pytest.param(our_adamw, id="our-adamw"),
    pytest.param(functools.partial(amp_ext.optim.SGD, lr=LR, momentum=0.9), id="our-sgd"),
    pytest.param(functools.partial(torch.optim.AdamW, lr=LR, fused=True), id="torch-fused"),
]
LOOPING = pytest.param(functools.partial(torch.optim.AdamW, lr=LR, foreach=True), id="torch")


def switched_off(params: Any) -> torch.optim.Optimizer:
    """Our optimizer, under which the scaler unscales and decides whether to step."""
    optimizer = our_adamw(params)
    optimizer._step_supports_amp_scaling = False
    return optimizer


SWITCHED_OFF = pytest.param(switched_off, id="our-adamw-switched-off")


def make_model() -> nn.Module:
    """Returns the model, the same at every call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batches(broken: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Returns the batches, the same at every call, and the targets of one of them broken."""
    generator = torch.Generator().manual_seed(2)
    xs = torch.randn(BATCHES, 8, 6, generator=generator)
    batches = [(x, x.sum(dim=1, keepdim=True).sin()) for x in xs]
    if broken is not None:
        batches[broken][1].fill_(1e3)
    return batches


def make_schedule(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """Returns a schedule that shows how often it was stepped."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), y)


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    batches: list[tuple[Tensor, Tensor]] | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
) -> list[bool]:
    """Trains as torch's AMP pages show it; returns for every step whether it was skipped."""
    skipped = []
    for number, (x, y) in enumerate(make_batches() if batches is None else batches, 1):
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        scaler.scale(loss_of(output, y) / accumulate).backward()
        if number % accumulate:
            continue
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < scale)
        if schedule is not None and not skipped[-1]:
            schedule.step()
        optimizer.zero_grad()
    return skipped


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    """Asserts that two trained models of ``make_model`` agree in every bit."""
    states = [model.state_dict() for model in (actual, expected, make_model())]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
        assert not torch.equal(value, states[2][name].to(value.dtype)), f"{name} was not trained"


def assert_close_weights(actual: nn.Module, expected: nn.Module, rtol: float, atol: float) -> None:
    for left, right in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)


def by_hand(make_optimizer: MakeOptimizer, **options: Any) -> tuple[nn.Module, list[bool]]:
    """Returns the model that the loop by hand has trained, and which of its steps were skipped."""
    model = make_model()
    skipped = train_by_hand(model, make_optimizer(model.parameters()), our_scaler(), **options)
    assert any(skipped)
    assert not all(skipped)
    return model, skipped


def assert_trained_as_by_hand(
    model: nn.Module, scaler: amp_ext.GradScaler, make_optimizer: MakeOptimizer, **options: Any
) -> None:
    expected, skipped = by_hand(make_optimizer, **options)
    assert (scaler.stats().updates, scaler.stats().skips) == (len(skipped), sum(skipped))
    assert_same_weights(model, expected)
