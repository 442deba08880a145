"""How often a warm call goes from Python into the compiled module."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F32
from harness.optimizer_cases import each_class, give_grads, make_params, ours

import amp_ext
from amp_ext import ops


def counted(function: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def crossings() -> Iterator[list[str]]:
    """Yields a list that grows by the name of each function of the module, while it is called.

    Without ``is_profiled``, which asks torch alone.
    """
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vars(ops.binary).items():
            if not inspect.isclass(value):
                if callable(value) and name != "is_profiled":
                    patch.setattr(ops.binary, name, counted(value, name, calls))
                continue
            for member, inside in list(vars(value).items()):
                full = f"{name}.{member}"
                if isinstance(inside, property):
                    getter = property(counted(inside.fget, full, calls), inside.fset)
                    patch.setattr(value, member, getter)
                elif isinstance(inside, staticmethod):
                    function = counted(inside.__func__, full, calls)
                    patch.setattr(value, member, staticmethod(function))
                elif callable(inside) and (member == "__init__" or not member.startswith("__")):
                    patch.setattr(value, member, counted(inside, full, calls))
        yield calls


def warm(name: str, options: dict[str, Any], **more: Any) -> torch.optim.Optimizer:
    """Returns an optimizer with two groups that has stepped and has new gradients."""
    groups = [{"params": make_params(dtype)} for dtype in (F32, BF16)]
    optimizer = ours(name)(groups, **options, **more)
    for _ in range(2):
        give_grads(optimizer)
        optimizer.step()
    give_grads(optimizer)
    return optimizer


@pytest.mark.parametrize("more", [{}, {"max_grad_norm": 1.0}], ids=["plain", "clipping"])
@each_class
def test_a_warm_step_is_one_call(name, options, more) -> None:
    optimizer = warm(name, options, **more)
    optimizer.param_groups[1]["lr"] = 0.25
    with crossings() as calls:
        optimizer.step()
    assert calls == ["Stepper.step"]


@each_class
def test_a_warm_look_is_one_call(name, options) -> None:
    optimizer = warm(name, options, max_grad_norm=1.0)
    with crossings() as calls:
        scan = optimizer.scan_gradients(torch.ones(()))
    assert len(scan.found_infs) == 1
    assert calls == ["Stepper.scan"]


@each_class
def test_a_warm_iteration_with_a_scaler_is_three_calls(name, options) -> None:
    optimizer, scaler = warm(name, options), amp_ext.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for _ in range(2):
        give_grads(optimizer)
        with crossings() as calls:
            scaler.step(optimizer)
            scaler.update()
    assert calls == ["Stepper.scan", "Stepper.step", "update_scale_"]
