"""What is made inside torch.inference_mode(): states, masters, scalers; and training after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import scaler_cases
from harness.edge_shapes import BF16
from harness.optimizer_cases import assert_same_bits, make_params, ours, params_of, train, trained
from harness.rows import rows
from test_forms import FORMS
from torch import Tensor
from torch.utils._pytree import tree_leaves

import amp_ext

SHAPES = [(64, 64), (7,), ()]


def load(optimizer: Any) -> None:
    optimizer.load_state_dict(trained(copy.deepcopy(optimizer)).state_dict())


def step(optimizer: Any) -> None:
    trained(optimizer, 1)


CALLS = {
    "init_state": lambda optimizer: optimizer.init_state(),
    "float32_state_dict": lambda optimizer: amp_ext.optim.float32_state_dict(trained(optimizer)),
    "load": load,
    "step": step,
}


def inference_tensors(*values: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    assert found
    return [tensor for tensor in found if tensor.is_inference()]


# Every call with masters of a kind and with codes, and two with all forms.
MADE = {
    f"{form}-{call}": (*FORMS[form], call)
    for form in FORMS
    for call in CALLS
    if call in ("load", "step") or form in ("bf16-masters", "fp16-split", "bf16-8bit")
}


@pytest.mark.parametrize(("dtype", "kept", "call"), rows(MADE))
def test_training_goes_on_from_what_was_made_in_inference_mode(dtype, kept, call, device):
    sides = []
    for is_on in (True, False):
        torch.manual_seed(0)
        params = make_params(dtype, device, SHAPES)
        optimizer = ours("AdamW")(params, lr=0.05, max_grad_norm=1.0, **kept)
        with torch.inference_mode(is_on):
            optimizer.norm_guard = amp_ext.optim.NormGuard()
            made = CALLS[call](optimizer)
        assert inference_tensors(made, dict(optimizer.state), optimizer.grad_norm) == []
        train([optimizer], 2)
        optimizer.refresh_masters()
        train([optimizer])
        sides.append(optimizer)
    assert_same_bits(*sides)


# Scalers.

# What an iteration calls inside the mode; the rest of it comes after.
ITERATION = {
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "update": lambda scaler, optimizer: scaler.update(),
    "load": lambda scaler, optimizer: scaler.load_state_dict(scaler.state_dict()),
}


def give_scaled_grads(scaler: Any, optimizer: Any, value: float) -> None:
    for param in params_of(optimizer):
        param.grad = None
    with torch.enable_grad():
        scaler.scale(sum(param.sum() for param in params_of(optimizer)) * value).backward()


@scaler_cases.over([scaler_cases.our_adamw_with_norm, scaler_cases.our_sgd, scaler_cases.Duck])
@pytest.mark.parametrize("inside", range(len(ITERATION) + 1))
def test_scalers_go_on_after_inference_mode(make, inside, device):
    sides = []
    for is_on in (True, False):
        optimizer = make(scaler_cases.new_params(device))
        scaler = amp_ext.GradScaler(device.type, init_scale=4.0, hysteresis=2)
        with torch.inference_mode(is_on):
            scaler.scale(torch.ones((), device=device))
        give_scaled_grads(scaler, optimizer, 2.0)
        for number, call in enumerate(ITERATION.values()):
            with torch.inference_mode(is_on and number < inside):
                call(scaler, optimizer)
        assert inference_tensors(list(vars(scaler).values())) == []
        for value in (2.0, torch.inf, torch.inf, 3.0):
            give_scaled_grads(scaler, optimizer, value)
            scaler.step(optimizer)
            scaler.update()
        sides.append((params_of(optimizer), scaler.state_dict(), scaler.stats()))
    assert_same_bits(sides[0][0], sides[1][0])
    assert sides[0][1:] == sides[1][1:]


def test_a_parameter_of_inference_mode_stays_what_it_is(device):
    """Whoever makes a model there steps and loads it there."""
    with torch.inference_mode():
        optimizer = trained(ours("AdamW")(make_params(BF16, device, SHAPES)))
        load(optimizer)
        trained(optimizer)
    assert all(param.is_inference() for param in params_of(optimizer))
