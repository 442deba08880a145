"""Small trainings and their parts, for the tests of the trainer."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import amp_ext
from amp_ext.training import MixedPrecisionConfig, MixedPrecisionTrainer, StepMetrics
from harness.reference import same_bits

# So large that the first steps overflow and the scale must come down; then it grows soon.
TOO_LARGE, GROWTH_INTERVAL = 2.0**20, 3
BATCHES = 36

PRECISIONS = ["fp32", "bf16", "fp16"]

mse_loss = nn.functional.mse_loss


def new_model(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(device, dtype)


def batches(device: Any = "cpu", count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs = [torch.randn(8, 6) for _ in range(count)]
    return [(x.to(device), 3 * x[:, :2].to(device) + 1) for x in inputs]


X, TARGET = batches(count=1)[0]


def new_trainer(precision: str = "fp32", model: nn.Module | None = None, **options: Any) -> Any:
    """Returns a trainer around SGD; options of the config and of the trainer may be mixed.

    The scale is such that nothing overflows.
    """
    options = {"initial_loss_scale": 256.0, **options}
    model = new_model() if model is None else model
    settings = {field.name for field in dataclasses.fields(MixedPrecisionConfig)} & options.keys()
    config = MixedPrecisionConfig(precision, **{name: options.pop(name) for name in settings})
    make = options.pop("optimizer", lambda params: amp_ext.optim.SGD(params, 0.1))
    optimizer = make(model.parameters())
    options.setdefault("loss_function", mse_loss)
    if isinstance(options.get("scheduler"), types.FunctionType):
        options["scheduler"] = options["scheduler"](optimizer)
    return MixedPrecisionTrainer(model, optimizer, config, **options)


def two_trainers(*arguments: Any, **options: Any) -> list[Any]:
    return [new_trainer(*arguments, **options) for _ in range(2)]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that is another one after each step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def two_schedules(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, rate) for rate in (0.5, 0.9)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, milestones=[1])


def falling_decay(optimizer: torch.optim.Optimizer) -> Any:
    return amp_ext.optim.StepWeightDecay(optimizer, step_size=1, gamma=0.5)


def params_of(trainer: MixedPrecisionTrainer) -> list[Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


def grads_of(trainer: MixedPrecisionTrainer) -> list[Tensor]:
    return [param.grad.clone() for param in trainer.model.parameters()]


def plain(content: Any) -> str:
    """Returns all values of anything of tensors and numbers, for comparison."""
    return repr(tree_map(lambda one: one.tolist() if isinstance(one, Tensor) else one, content))


def all_of(trainer: MixedPrecisionTrainer) -> str:
    """Returns everything that a file would hold, and gradients that have accumulated."""
    return plain((trainer.model.state_dict(), trainer.state_dict(), torch.get_rng_state()))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(same_bits, actual, expected))


def ours_and_torchs(name: str, lr: float, **options: Any) -> pytest.MarkDecorator:
    """Parametrizes ``make`` over our optimizer and torch's of that name."""
    classes = getattr(amp_ext.optim, name), getattr(torch.optim, name)
    makes = [functools.partial(each, lr=lr, **options) for each in classes]
    return pytest.mark.parametrize("make", makes, ids=["ours", "torchs"])


def train_on(trainer: MixedPrecisionTrainer, data: Any) -> list[StepMetrics]:
    return [trainer.train_step(x, target) for x, target in data]


def guarded_sgd(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    """Returns a function that makes an optimizer with a guard of its own."""
    guard = lambda: amp_ext.optim.NormGuard(**options)  # noqa: E731
    return lambda params: amp_ext.optim.SGD(params, 0.1, norm_guard=guard())


def torchs_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def torchs_adamw(params: Any) -> torch.optim.Optimizer:
    """One that unscales and skips in its step, as ours do."""
    return torch.optim.AdamW(params, 0.05, eps=1e-3, fused=True)


class WithLoss(nn.Module):
    """Computes its loss itself and returns it in some wrapping."""

    def __init__(self, wrap: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner = new_model()
        self.wrap = wrap

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        return self.wrap(None if labels is None else mse_loss(logits, labels), logits)
