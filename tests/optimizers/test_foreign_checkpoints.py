"""Files that other libraries wrote: converted where they say all, else refused with a cure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.awkward import F16, F32, F64
from harness.optimizer_cases import (
    HALVES,
    make_params,
    ours,
    train,
    trained,
    twins,
)

# FusedAdam of apex and of TransformerEngine: float32 moments, one step for a group, and from the
# latter masters as well.


def as_fused_adam(optimizer: torch.optim.Optimizer, **changes: Any) -> dict[str, Any]:
    """Returns the state of an AdamW of ours in the layout of a FusedAdam."""
    file = optimizer.state_dict()
    states = {}
    for index, state in file["state"].items():
        step = int(state["step"].item())
        states[index] = {name: value for name, value in state.items() if name != "step"}
    groups = [
        {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "params")}
        | {"bias_correction": True, "step": step}
        | changes
        for group in file["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


@pytest.mark.parametrize("step", [int, lambda step: torch.tensor([step], dtype=torch.int32)])
@pytest.mark.parametrize("with_masters", [True, False], ids=["masters", "no-masters"])
@HALVES
def test_a_file_of_fused_adam_is_converted(dtype, with_masters, step):
    source = trained(ours("AdamW")(make_params(dtype), lr=0.05))
    if not with_masters:  # as if training went on from the rounded parameters
        for param in cases.params_of(source):
            source.state[param]["master_param"].copy_(param)
    file = as_fused_adam(source, step=step(3))
    if not with_masters:
        for state in file["state"].values():
            del state["master_param"]
    loaded = cases.loading(ours("AdamW")(twins(source), lr=123.0), file)
    train([source, loaded], 3)
    cases.assert_same_bits(loaded, source)
    assert loaded.state[cases.params_of(loaded)[0]]["step"].item() == 6
    saved = loaded.state_dict()["param_groups"][0]
    assert "step" not in saved
    assert "bias_correction" not in saved
    assert file["param_groups"][0]["bias_correction"] is True


def test_a_file_of_fused_adam_from_before_its_first_step_is_taken():
    source = ours("AdamW")(make_params(F32), lr=0.05)
    file = copy.deepcopy(source.state_dict())
    (group,) = file["param_groups"]
    for name in ("amsgrad", "fused", "foreach"):
        del group[name]
    group["bias_correction"] = True
    loaded = cases.loading(ours("AdamW")(twins(source)), file)
    train([source, loaded], 2)
    cases.assert_same_bits(loaded, source)


def test_steps_of_the_states_win_over_one_of_their_group():
    source = trained(ours("AdamW")(make_params(F32)))
    file = copy.deepcopy(source.state_dict())
    file["param_groups"][0] |= {"step": 77, "bias_correction": True}
    loaded = cases.loading(ours("AdamW")(twins(source)), file)
    cases.assert_same_bits(loaded, source)


@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
def test_a_buffer_that_a_group_does_not_use_is_loaded_like_those_that_it_uses(dtype) -> None:
    source = torch.optim.SGD(make_params(dtype), lr=0.1, momentum=0.9)
    train([source])
    file = source.state_dict()
    file["param_groups"][0]["momentum"] = 0.0
    optimizer = cases.loading(ours("SGD")(make_params(F32), lr=0.1), file)
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype == F32
