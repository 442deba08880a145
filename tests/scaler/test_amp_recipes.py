"""Tests of the loops that torch's AMP pages show, under ``torch.amp.GradScaler = ours``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness.awkward import threads
from harness.optimizer_cases import theirs
from harness.rows import rows
from harness.trainer_cases import new_model
from torch import Tensor
from torch.nn.functional import mse_loss

import amp_ext

ITERATIONS = 12
# So large that the first iterations overflow and the scale must come down.
INIT_SCALE = 2.0**127

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def maker(package: Callable[[str], Any], name: str, **options: Any) -> MakeOptimizer:
    return lambda params: package(name)(params, **options)


TORCH_OPTIMIZERS = {
    "AdamW-foreach": maker(theirs, "AdamW", lr=0.05, foreach=False),
    "AdamW-fused": maker(theirs, "AdamW", lr=0.05, fused=True),
    "SGD-momentum": maker(theirs, "SGD", lr=0.01, momentum=0.9),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps matrix products of a few elements away from threads, whose start costs far more."""
    with threads(1):
        yield


class Log:
    """What a recipe leaves behind: losses, scales and the parameters at the end."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.scales: list[float] = []
        self.params: list[Tensor] = []

    def iteration(self, scaler: torch.amp.GradScaler, *losses: Tensor) -> None:
        self.losses.extend(loss.detach().float().cpu() for loss in losses)
        self.scales.append(scaler.get_scale())


def batches(device: Any) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs = [torch.randn(8, 6) for _ in range(ITERATIONS)]
    return [(x.to(device), 10 * x[:, :2].to(device) + 5) for x in inputs]


def autocast(device: Any) -> torch.autocast:
    return torch.autocast(device_type=device.type, dtype=torch.bfloat16)


def new_scaler(device: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, init_scale=INIT_SCALE, growth_interval=2)


def plain(
    make: MakeOptimizer,
    device: Any,
    before_step: Callable[[Any, Any, Any], None] = lambda model, scaler, optimizer: None,
    backward: Callable[[Any, Any, Any], Any] = lambda model, scaler, loss: loss,
) -> Log:
    """Typical mixed precision training, into which the recipes below put their own."""
    model, scaler, log = new_model(device), new_scaler(device), Log()
    optimizer = make(model.parameters())
    for x, target in batches(device):
        optimizer.zero_grad()
        with autocast(device):
            loss = mse_loss(model(x).float(), target)
        loss = backward(model, scaler, loss)
        scaler.scale(loss).backward()
        before_step(model, scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        log.iteration(scaler, loss)
    log.params.extend(model.parameters())
    return log


def unscale_and_clip(model: Any, scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)


def clipping(make: MakeOptimizer, device: Any) -> Log:
    """Gradient clipping after ``unscale_``."""
    return plain(make, device, unscale_and_clip)


def clipping_scaled_gradients(make: MakeOptimizer, device: Any) -> Log:
    """Gradient clipping by ``max_norm`` times the scale, without ``unscale_``."""

    def clip(model: Any, scaler: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1 * scaler.get_scale())

    return plain(make, device, clip)


def gradient_penalty(make: MakeOptimizer, device: Any) -> Log:
    """A loss that contains the norm of unscaled gradients."""

    def penalized(model: Any, scaler: Any, loss: Any) -> Any:
        params = list(model.parameters())
        scaled_grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)
        grads = [grad * (1.0 / scaler.get_scale()) for grad in scaled_grads]
        with autocast(device):
            return loss + 0.1 * sum(grad.pow(2).sum() for grad in grads).sqrt()

    return plain(make, device, backward=penalized)


def accumulation(make: MakeOptimizer, device: Any) -> Log:
    """Gradient accumulation over two batches."""
    model, scaler, log = new_model(device), new_scaler(device), Log()
    optimizer = make(model.parameters())
    for index, (x, target) in enumerate(batches(device) * 2):
        with autocast(device):
            loss = mse_loss(model(x).float(), target) / 2
        scaler.scale(loss).backward()
        if (index + 1) % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        log.iteration(scaler, loss)
    log.params.extend(model.parameters())
    return log


def several_models(make: MakeOptimizer, device: Any) -> Log:
    """Two models, two losses and two optimizers with one scaler."""
    first, second = new_model(device), new_model(device, seed=3)
    optimizers = make(first.parameters()), make(second.parameters())
    scaler, log = new_scaler(device), Log()
    for x, target in batches(device):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast(device):
            outputs = first(x).float(), second(x).float()
            loss = mse_loss(2 * outputs[0] + 3 * outputs[1], target)
            other = mse_loss(3 * outputs[0] - 5 * outputs[1], target)
        scaler.scale(loss).backward(retain_graph=True)
        scaler.scale(other).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        log.iteration(scaler, loss, other)
    log.params.extend([*first.parameters(), *second.parameters()])
    return log


RECIPES = [plain, clipping, clipping_scaled_gradients, accumulation]
RECIPES += [gradient_penalty, several_models]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize("make", rows(TORCH_OPTIMIZERS))
def test_the_losses_of_a_recipe_are_torchs_to_the_bit(recipe, make, device, monkeypatch):
    expected = recipe(make, device)
    monkeypatch.setattr(torch.amp, "GradScaler", amp_ext.GradScaler)
    actual = recipe(make, device)
    falls = [later < sooner for sooner, later in itertools.pairwise([INIT_SCALE, *actual.scales])]
    assert 0 < sum(falls) < len(falls) - 2, "overflows and clean steps are wanted"
    assert actual.scales == expected.scales
    losses = torch.stack(actual.losses), torch.stack(expected.losses)
    torch.testing.assert_close(*losses, rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, actual.params, expected.params))
