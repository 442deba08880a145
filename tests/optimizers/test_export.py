"""State dicts in float32 of optimizers that keep their states in less."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.awkward import BF16, F16, F32, F64
from torch import nn

from amp_ext.optim import AdamW, float32_state_dict


def stepped(kind, param: torch.Tensor, **options) -> torch.optim.Optimizer:
    optimizer = kind([nn.Parameter(param.clone())], lr=1e-2, **options)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        (held,) = optimizer.param_groups[0]["params"]
        held.grad = torch.randn(held.shape, generator=generator).to(held.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("state_dtype", ["8bit", "8bit-bf16", torch.bfloat16])
@pytest.mark.parametrize("masters", ["split", "split8", True])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_small_states_are_exported_as_float32_numbers(dtype, masters, state_dtype):
    options = {"master_weights": masters, "state_dtype": state_dtype}
    optimizer = stepped(AdamW, torch.randn(64, 96).to(dtype), **options)
    exported = float32_state_dict(optimizer)
    state = exported["state"][0]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
    assert {tensor.dtype for tensor in state.values()} == {F32}
    assert torch.equal(state["master_param"], optimizer.master_params()[0])
    assert exported["param_groups"][0]["state_dtype"] == "float32"
    assert exported["param_groups"][0]["master_weights"] is True
    # Rounded to nearest again, they are what they were.
    kept = copy.deepcopy(optimizer.state_dict()["state"][0])
    optimizer.load_state_dict(exported)
    again = optimizer.state_dict()["state"][0]
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[key], kept[key]) for key in kept)


def test_what_is_float32_is_exported_as_it_is():
    optimizer = stepped(AdamW, torch.randn(7))
    exported, own = float32_state_dict(optimizer), optimizer.state_dict()
    assert exported["param_groups"] == own["param_groups"]
    assert exported["state"][0].keys() == own["state"][0].keys()
    for key, tensor in own["state"][0].items():
        assert torch.equal(exported["state"][0][key], tensor)
        assert exported["state"][0][key].data_ptr() != tensor.data_ptr()


def test_float64_states_stay_float64():
    state = float32_state_dict(stepped(AdamW, torch.randn(7, dtype=F64)))["state"][0]
    assert state["exp_avg"].dtype == F64


def test_another_optimizer_has_no_such_export():
    with pytest.raises(TypeError, match=r"optimizer must be one of amp_ext\.optim, got SGD"):
        float32_state_dict(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
