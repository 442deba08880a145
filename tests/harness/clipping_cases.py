"""Clipping inside the step and apart from it, under every scaler, for the tests of both."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_ext
from harness.edge_shapes import BF16, F16, F32, F64
from harness.optimizer_cases import OPTIMIZERS, Optimizer, make_params, ours, params_of, twins
from harness.reference import tolerance
from harness.rows import rows
from harness.scaler_cases import takes

SCALE = 2.0**10

# Gradients of these tests have norms of about 128 and elements up to 4.
CLIPPING = [
    pytest.param({"max_grad_norm": 3.0}, id="norm"),
    pytest.param({"clip_value": 0.25}, id="value"),
    pytest.param({"max_grad_norm": 30.0, "clip_value": 0.25}, id="norm-and-value"),
    pytest.param({"max_grad_norm": 0.0}, id="norm-0"),
]
HARMLESS = [
    pytest.param({"max_grad_norm": 1e4}, id="large-norm"),
    pytest.param({"max_grad_norm": math.inf}, id="inf-norm"),
    pytest.param({"clip_value": 1e4}, id="large-value"),
    pytest.param({"clip_value": math.inf}, id="inf-value"),
    pytest.param({"max_grad_norm": 1e4, "clip_value": 1e4}, id="both"),
]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step is taken: under which scaler, if any, and whether ``unscale_`` goes before it."""

    scaler: type[torch.amp.GradScaler] | None
    unscale_first: bool = False

    def make_scaler(self, device, scale: float = SCALE) -> torch.amp.GradScaler | None:
        if self.scaler is None:
            return None
        return self.scaler(torch.device(device).type, scale, growth_interval=2)

    def takes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Tells whether it is a way for gradients of this dtype."""
        if self.unscale_first and dtype == F16:  # which are unscaled in the step alone
            return False
        return takes(self.scaler, dtype, device)

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is None:
            optimizer.step()
            return
        if self.unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


WAYS = [
    pytest.param(Way(None), id="no-scaler"),
    pytest.param(Way(amp_ext.GradScaler), id="our-scaler"),
    pytest.param(Way(amp_ext.GradScaler, unscale_first=True), id="our-scaler-unscale"),
    pytest.param(Way(torch.amp.GradScaler), id="torch-scaler"),
    pytest.param(Way(torch.amp.GradScaler, unscale_first=True), id="torch-scaler-unscale"),
]
SCALERS = WAYS[1:]


def clipped(clippings: list[Any], ways: list[Any], optimizers: list[Any] = OPTIMIZERS) -> Any:
    """Marks a test with one optimizer in every way, and the others in the two usual ones.

    The one is SGD, whose steps are as long as the gradients; those of Adam hardly change with them.
    """
    table = {
        f"{optimizer.id}-{clipping.id}-{way.id}": optimizer.values + clipping.values + way.values
        for optimizer in optimizers
        for clipping in clippings
        for way in ways
        if optimizer.id == "momentum"
        or (clipping.id in ("norm-and-value", "both") and way.id in ("no-scaler", "our-scaler"))
    }
    return pytest.mark.parametrize(("name", "options", "clipping", "way"), rows(table))


def scale_grads(side: Any, scaler: torch.amp.GradScaler | None) -> None:
    """Multiplies gradients as the backward pass of a scaled loss would have."""
    if scaler is None:
        return
    params = params_of(side)
    scale = scaler.scale(torch.ones((), device=params[0].device))
    for param in params:
        if param.grad is not None:
            param.grad = param.grad * scale.to(param.grad.dtype)


def fused_step(optimizer: Optimizer, way: Way, scaler: torch.amp.GradScaler | None) -> None:
    """Takes a step that clips inside, if its options say so."""
    scale_grads(optimizer, scaler)
    way.step(optimizer, scaler)


def step_apart(
    optimizer: Optimizer, scaler: Any, clipping: dict[str, float], clip=amp_ext.clip_grad_norm_
) -> Tensor:
    """Unscales, clips by norm, clips by value, and steps an optimizer that does none of it."""
    params = params_of(optimizer)
    scale_grads(params, scaler)
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip(params, clipping.get("max_grad_norm", math.inf))
    if "clip_value" in clipping:
        torch.nn.utils.clip_grad_value_(params, clipping["clip_value"])
    Way(scaler and type(scaler)).step(optimizer, scaler)
    return norm


def norm_of(grads: list[Tensor]) -> float:
    return math.sqrt(math.fsum(grad.double().square().sum().item() for grad in grads))


def assert_nearly(fused: Optimizer, expected: Optimizer, norm: Tensor, steps: int = 3) -> None:
    """Asserts that norms and parameters agree but for the rounding of their last bits."""
    torch.testing.assert_close(fused.grad_norm, norm, rtol=1e-6, atol=0, equal_nan=True)
    for param, wanted in zip(params_of(fused), params_of(expected), strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(F32, steps, 4.0), equal_nan=True)


def of_all_dtypes(
    way: Way, name: str, options: dict[str, Any], device: torch.device, **clipping: Any
) -> tuple[Optimizer, Optimizer]:
    """Returns an optimizer with groups of all dtypes of a way that clips, and one that does not."""
    groups = [
        {"params": make_params(dtype, device), "lr": 0.01 * (index + 1)}
        for index, dtype in enumerate([F32, F16, BF16, F64, F32])
        if way.takes(dtype, device)
    ]
    copied: list[dict[str, Any]] = [group | {"params": twins(group["params"])} for group in groups]
    return ours(name)(groups, **options, **clipping), ours(name)(copied, **options)
