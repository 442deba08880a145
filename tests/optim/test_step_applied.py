"""Whether the last step was taken, which it leaves on the device for those who follow it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from harness.edge_shapes import F16, F32
from torch.nn import Parameter

import amp_ext


def optimizer_of(device: torch.device, *dtypes: torch.dtype, **options: Any) -> Any:
    """An SGD over a parameter of each dtype, that tracks whether a step was applied."""
    params = [Parameter(torch.ones(5, device=device, dtype=dtype)) for dtype in dtypes]
    optimizer = amp_ext.optim.SGD(params, lr=0.1, **options)
    optimizer.track_step_applied()
    return optimizer


def give_grads(optimizer: Any, *values: float | None) -> None:
    for param, value in zip(optimizer.param_groups[0]["params"], values, strict=True):
        param.grad = None if value is None else torch.full_like(param, value)


def test_it_is_0_without_a_finite_inverse_of_the_scale_and_without_a_gradient(device):
    optimizer = optimizer_of(device, F32, F16)
    for values, scale, landed in [
        ((None, None), 1.0, 0.0),
        ((None, 1.0), 1.0, 1.0),
        ((1.0, 1.0), 0.0, 0.0),
        ((1.0, None), 2.0, 1.0),
        ((None, None), 1.0, 0.0),
    ]:
        give_grads(optimizer, *values)
        optimizer.grad_scale = torch.tensor(scale, device=device)
        optimizer.step()
        assert optimizer.step_applied.item() == landed


def test_it_stays_where_it_is_and_followers_outlive_a_load(device):
    optimizer = optimizer_of(device, F32)
    give_grads(optimizer, 1.0)
    optimizer.step()
    word = optimizer.step_applied
    optimizer.step()
    assert optimizer.step_applied is not None
    assert optimizer.step_applied.data_ptr() == word.data_ptr()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.step_applied.item() == 1.0
    other = copy.deepcopy(optimizer)
    give_grads(other, 1.0)
    other.step()
    assert other.step_applied is None, "nobody follows the copy"


class CopyOfAttributes:
    """What Lightning puts around an optimizer: an object of its class with its attributes."""

    def __init__(self, optimizer: Any) -> None:
        vars(self).update(vars(optimizer))
        self.__class__ = type("Wrapped", (CopyOfAttributes, type(optimizer)), {})


def test_who_has_a_wrapper_with_a_copy_of_the_attributes_watches_the_optimizer_inside():
    inside = optimizer_of(torch.device("cpu"), F32)
    wrapper = CopyOfAttributes(inside)
    inside.load_state_dict(inside.state_dict())
    wrapper.norm_guard, wrapper.track_grad_norms = amp_ext.optim.NormGuard(), True
    assert inside.norm_guard is wrapper.norm_guard
    give_grads(inside, 2.0)
    inside.step()
    assert wrapper.grad_norm is inside.grad_norm
    assert wrapper.grad_norms.item() == wrapper.grad_norm.item() == pytest.approx(math.sqrt(20.0))
