"""Builds the steps to be timed, one for each implementation ("side")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_ext
from amp_ext.bench.work import ShapeList, Work

Step = Callable[[], object]

DECAY = 0.999  # decay of the exponential moving averages of weights
MAX_NORM = 1.0  # far below the gradient norm, so that every side clips
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}


@dataclass(frozen=True)
class Program:
    """One side's optimizer with its parameters, and a function that takes a training step."""

    params: list[Parameter]
    optimizer: torch.optim.Optimizer
    step: Step
    average: Any = None  # keeps the WeightAverage alive; None without an average


def make_params(
    work: Work, shapes: ShapeList, device: torch.device, spread: float = 1e-2
) -> list[Parameter]:
    """Makes normally distributed parameters and gradients with standard deviation ``spread``."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for size in shapes.sizes:
        values = spread * torch.randn(size, generator=generator, device=device)
        params.append(Parameter(values.to(work.dtype)))
        params[-1].grad = params[-1].detach().clone()
    return params


def make_program(side: str, work: Work, params: list[Parameter]) -> Program:
    """Makes the optimizer, scaler and step of ``side``, a key of ``SIDES``."""
    options: dict[str, Any] = dict(OPTIONS[work.optimizer])
    if side in ("ours", "in_float32", "swa_utils"):
        if side == "in_float32":
            work = replace(work, masters=True, state_dtype=torch.float32)
        options |= {"master_weights": work.masters, "state_dtype": work.state_dtype}
        options["max_grad_norm"] = MAX_NORM if work.clip else None
        if not work.masters and work.state_dtype == torch.float32:
            options["rounding"] = "nearest"  # torch rounds in this way
        optimizer = getattr(amp_ext.optim, work.optimizer)(params, **options)
        step, average = scaled(work, params, optimizer, amp_ext.GradScaler), None
        if side == "swa_utils":
            step = averaged(params, step)
        elif work.average:
            average = amp_ext.optim.WeightAverage(optimizer, DECAY)
        return Program(params, optimizer, step, average)
    options |= {"fused": True} if side == "by_hand" else {} if side == "default" else {side: True}
    stepped = params
    if side == "by_hand":
        stepped = [Parameter(param.detach().float()) for param in params]
    optimizer = getattr(torch.optim, work.optimizer)(stepped, **options)
    step = scaled(work, stepped, optimizer)
    return Program(params, optimizer, by_hand(params, stepped, step) if side == "by_hand" else step)


def scaled(
    work: Work,
    params: list[Parameter],
    optimizer: Any,
    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler,
) -> Step:
    """Returns a step of ``optimizer``, under a gradient scaler if ``work`` has one.

    The scale stays 1, because the step is repeated with the same gradients and torch's scaler would
    unscale them each time.
    """
    scaler = scaler_class(params[0].device.type, init_scale=1.0, growth_interval=2**30)
    scaler.scale(params[0].new_zeros(()))  # creates the scaler's tensors
    clips = work.clip and scaler_class is torch.amp.GradScaler  # our optimizers clip in step()

    def step() -> None:
        if clips and work.scaler:
            scaler.unscale_(optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        if work.scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    return step


def averaged(params: list[Parameter], step_params: Step) -> Step:
    """Returns the step followed by torch's exponential moving average of the weights."""
    model = torch.nn.Module()
    model.params = torch.nn.ParameterList(params)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def step() -> None:
        step_params()
        average.update_parameters(model)

    return step


def by_hand(params: list[Parameter], masters: list[Parameter], step_masters: Step) -> Step:
    """Returns a step that copies gradients to masters, steps the masters, and copies them back."""

    @torch.no_grad()
    def step() -> None:
        for param, master in zip(params, masters, strict=True):
            if param.grad is not None:
                master.grad = param.grad.float()
        step_masters()
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)

    return step
