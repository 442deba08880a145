"""The programs that are timed: one step of each side, on parameters and gradients of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext.bench.peers import OPTIONS, PEERS, make_optimizer
from amp_ext.bench.shapes import ShapeList
from amp_ext.bench.work import Work

Step = Callable[[], None]

MAX_NORM = 1.0  # exceeded by far, so that every side clips
_NOISE = 1 << 20  # random numbers, repeated


@dataclass(frozen=True)
class Program:
    """One side of a row.

    Attributes:
        params: The parameters that it trains, with gradients.
        step: What a training loop calls after the backward pass.
    """

    params: list[Parameter]
    step: Step


def make_program(
    side: str, work: Work, shapes: ShapeList, device: torch.device, spread: float = 1e-2
) -> Program:
    """Makes parameters, gradients, optimizer and scaler of one side.

    The scale is 1: torch divides the stored gradients by it in every step, ours leaves them as they
    are, and so both find the same ones again.

    Args:
        side: A key of ``SIDES``.
        work: What to do.
        shapes: The parameters.
        device: Where they are.
        spread: The standard deviation of parameters and gradients.
    """
    params = _make_params(shapes, work.dtype, device, spread)
    if side == "ours":
        return Program(params, _ours(work, params))
    if side == "in_float32":
        return Program(params, _ours(work.in_float32, params))
    if side in BY_HAND:
        masters = _make_masters(params)
        optimizer = _optimizer(torch.optim, work)(masters, fused=True)
        return Program(params, BY_HAND[side](params, masters, _torch(work, masters, optimizer)))
    if side in PEERS:
        return Program(params, _peer(side, work, params))
    options = {} if side == "default" else {side: True}
    return Program(params, _torch(work, params, _optimizer(torch.optim, work)(params, **options)))


def _make_params(
    shapes: ShapeList, dtype: torch.dtype, device: torch.device, spread: float
) -> list[Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    values = (spread * torch.randn(_NOISE, generator=generator, device=device)).to(dtype)
    params = [Parameter(_repeated(values, size)) for size in shapes.sizes]
    for param in params:
        param.grad = _repeated(values, param.shape)
    return params


def _make_masters(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(param.detach().float()) for param in params]


def _repeated(values: Tensor, size: Sequence[int]) -> Tensor:
    tensor = values.new_empty(size)
    flat = tensor.view(-1)
    rest = flat.numel() % len(values)
    whole = flat.numel() - rest
    flat[:whole].view(-1, len(values)).copy_(values)
    flat[whole:].copy_(values[:rest])
    return tensor


def _optimizer(module: Any, work: Work) -> Callable[..., torch.optim.Optimizer]:
    own = {"AdamW": OPTIONS, "SGD": {"lr": 1e-2, "momentum": 0.9}, "Lion": {"lr": 1e-2}}
    kind = getattr(module, work.optimizer)
    return lambda params, **options: kind(params, **own[work.optimizer], **options)


def _started(scaler_class: type[torch.amp.GradScaler], device: torch.device) -> Any:
    """Returns a scaler that has seen its device, and whose scale stays 1."""
    scaler = scaler_class(device.type, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.ones((), device=device))
    return scaler


def make_ours(work: Work, params: list[Parameter]) -> torch.optim.Optimizer:
    """Makes the optimizer of ours that does some work."""
    options: dict[str, Any] = {"max_grad_norm": MAX_NORM} if work.clip else {}
    options |= {"master_weights": work.masters, "state_dtype": work.states.state_dtype}
    if work.is_wide:
        options["rounding"] = "nearest"  # as all others round
    return _optimizer(amp_ext.optim, work)(params, **options)


def _ours(work: Work, params: list[Parameter]) -> Step:
    optimizer = make_ours(work, params)
    if not work.scaler:
        return lambda: optimizer.step()
    scaler = _started(amp_ext.GradScaler, params[0].device)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def _torch(work: Work, params: list[Parameter], optimizer: torch.optim.Optimizer) -> Step:
    scaler = _started(torch.amp.GradScaler, params[0].device) if work.scaler else None

    def step() -> None:
        if work.clip:
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        if scaler is None:
            optimizer.step()
            return
        scaler.step(optimizer)
        scaler.update()

    return step


def _peer(side: str, work: Work, params: list[Parameter]) -> Step:
    how = PEERS[side].methods[work.plain]
    if not how.by_hand:
        return _torch(work, params, make_optimizer(side, params, work))
    masters = _make_masters(params)
    step_masters = _torch(work, masters, make_optimizer(side, masters, work))
    return _by_hand_buffered(params, masters, step_masters)


def _grads(params: list[Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _by_hand(params: list[Parameter], masters: list[Parameter], step_masters: Step) -> Step:
    """Returns the loop around masters as people write it."""

    @torch.no_grad()
    def step() -> None:
        for param, master in zip(params, masters, strict=True):
            if param.grad is not None:
                master.grad = param.grad.float()
        step_masters()
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)

    return step


def _by_hand_buffered(
    params: list[Parameter], masters: list[Parameter], step_masters: Step
) -> Step:
    """Returns the loop around masters as quick as torch's Python interface allows."""
    for master in masters:
        master.grad = torch.empty_like(master)

    def step() -> None:
        torch._foreach_copy_(_grads(masters), _grads(params))
        step_masters()
        torch._foreach_copy_([p.detach() for p in params], [m.detach() for m in masters])

    return step


#: Loops around float32 masters that torch's fused optimizer steps.
BY_HAND = {"by_hand": _by_hand, "by_hand_buffered": _by_hand_buffered}
