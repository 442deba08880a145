"""Files that other libraries wrote: converted where they say all, else refused with a cure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.awkward import BF16, F16, F32, F64
from harness.optimizer_cases import (
    HALVES,
    assert_refused,
    make_params,
    ours,
    theirs,
    train,
    trained,
    twins,
)
from harness.reference import assert_close, same_bits
from harness.rows import rows


def two_trained(dtype: torch.dtype = F32) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns an AdamW whose file is changed, and one that shall load it."""
    source = trained(ours("AdamW")(make_params(dtype)))
    return source, trained(ours("AdamW")(twins(source)))


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


def test_training_without_bias_correction_is_not_gone_on_with():
    source, target = two_trained()
    words = r"bias_correction of param_groups\[0\] must be True, got False"
    assert_refused(target, as_fused_adam(source, bias_correction=False), ValueError, words)


@pytest.mark.parametrize(
    ("key", "dtype", "words"),
    [
        ("master_param", torch.int16, "must be floating, .*store_param_remainders=True"),
        ("exp_avg", torch.uint8, "must be .* floating.*torch.uint8"),
        ("exp_avg", torch.int8, "must be .* floating.*torch.int8"),
    ],
)
def test_halves_of_masters_and_moments_in_8_bits_are_refused(key, dtype, words):
    source, target = two_trained(BF16)
    file = as_fused_adam(source)
    for state in file["state"].values():
        state[key] = state[key].to(dtype)
    assert_refused(target, file, ValueError, f"{key} of group 0, param 0 {words}")
    if key == "master_param":  # may be left out
        for state in file["state"].values():
            del state[key]
        target.load_state_dict(file)
        train([target])
        assert target.state[cases.params_of(target)[0]]["step"].item() == 4


# Wrappers, which keep the optimizer's state dict, masters and the loss scale in one dict.

OF_FP16_OPTIMIZER = {"loss_scaler": object(), "dynamic_loss_scale": True, "overflow": False}
WRAPPED = {
    "apex-fp16-optimizer": (
        lambda file, masters: (
            OF_FP16_OPTIMIZER
            | {"first_closure_call_this_step": True}
            | {"optimizer_state_dict": file, "fp32_from_fp16": [masters]}
        ),
        r"entry 'optimizer_state_dict' instead; the masters in 'fp32_from_fp16' are not read",
    ),
    "apex-contrib": (
        lambda file, masters: {"optimizer_state_dict": file, "fp32_groups": [masters]},
        r"entry 'optimizer_state_dict' instead; the masters in 'fp32_groups' are not read",
    ),
    "megatron": (
        lambda file, masters: {"optimizer": file, "fp32_from_fp16_params": [masters]},
        r"entry 'optimizer' instead; the masters in 'fp32_from_fp16_params' are not read",
    ),
    "apex-amp": (
        lambda file, masters: {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}},
        r"must have 'state', got \['loss_scaler0'\]",
    ),
}


@pytest.mark.parametrize(("wrapped", "words"), rows(WRAPPED))
@HALVES
def test_a_dict_around_the_state_is_refused_with_a_word_on_what_to_load(dtype, wrapped, words):
    params = make_params(dtype)
    masters = twins(params, F32)
    inner = trained(theirs("AdamW")(masters, lr=0.05))
    target = trained(ours("AdamW")(params, lr=0.05))
    file = wrapped(inner.state_dict(), masters)
    assert_refused(target, file, KeyError, words)


@HALVES
def test_what_lies_within_a_wrapper_is_loaded_and_its_masters_can_be_added(dtype):
    params = make_params(dtype)
    masters = twins(params, F32)
    inner = trained(theirs("AdamW")(masters, lr=0.05))
    for param, master in zip(params, masters, strict=True):
        param.data.copy_(master.detach())
    file = inner.state_dict()
    mine = cases.loading(ours("AdamW")(params), file)
    plain_master = mine.master_params()[0].clone()
    assert same_bits(plain_master, params[0].detach().float())

    for index, master in enumerate(masters):
        file["state"][index]["master_param"] = master.detach()
    mine.load_state_dict(file)
    assert all(map(same_bits, mine.master_params(), masters))
    for _ in range(2):
        cases.give_grads(masters, params)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
        inner.step()
        mine.step()
    for master, expected in zip(mine.master_params(), masters, strict=True):
        assert_close(master, expected, steps=2)


@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
def test_a_buffer_that_a_group_does_not_use_is_loaded_like_those_that_it_uses(dtype) -> None:
    source = torch.optim.SGD(make_params(dtype), lr=0.1, momentum=0.9)
    train([source])
    file = source.state_dict()
    file["param_groups"][0]["momentum"] = 0.0
    optimizer = cases.loading(ours("SGD")(make_params(F32), lr=0.1), file)
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype == F32
