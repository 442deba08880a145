"""Files of other optimizers are refused with what they lack or have, older ones are filled in.

Those of other libraries are taken over if they say everything that an optimizer needs.

What a true file looks like, torch's own classes say: each of them writes one here.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from harness.edge_shapes import F16, F32, F64
from harness.optimizer_cases import (
    HALVES,
    IN_TORCH,
    KINDS,
    NAMES,
    assert_refused,
    assert_same_bits,
    each_name,
    loading,
    make_params,
    ours,
    params_of,
    theirs,
    train,
    trained,
    twins,
)
from harness.reference import assert_close, same_bits
from harness.rows import rows

from amp_ext.optim.options import CONFIGURED_OPTIONS

SHAPES = [(5, 3), (7, 2)]  # Muon takes matrices only
FOREIGN = [
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and name not in {"Optimizer", *KINDS}
]
MOMENTUM = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}


def stepped(optimizer: torch.optim.Optimizer, steps: int = 2) -> torch.optim.Optimizer:
    """Takes steps with gradients of the kind that the optimizer wants."""
    for _ in range(steps):
        for param in params_of(optimizer):
            grad = torch.randn_like(param)
            param.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda: torch.tensor(0.0))
        else:
            optimizer.step()
    return optimizer


def file_of(name: str, steps: int, **options: Any) -> dict[str, Any]:
    params = make_params(torch.float32, shapes=SHAPES)
    return stepped(theirs(name)(params, **MOMENTUM.get(name, {}), **options), steps).state_dict()


def target_of(name: str, **options: Any) -> torch.optim.Optimizer:
    params = make_params(torch.float32, shapes=SHAPES)
    return stepped(ours(name)(params, lr=0.1, **MOMENTUM.get(name, {}), **options))


def refused(optimizer: torch.optim.Optimizer, file: dict[str, Any], words: str) -> None:
    assert_refused(optimizer, file, ValueError, words)


@each_name
@pytest.mark.parametrize("steps", [2, 0])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_file_of_another_optimizer_of_torch_is_refused(foreign, steps, name):
    words = rf"^{name}.load_state_dict: (param_groups\[0\]|state) must have"
    refused(target_of(name), file_of(foreign, steps), words)


@each_name
@pytest.mark.parametrize("package", [ours, theirs])
def test_a_file_of_another_class_of_ours_is_refused(package, name):
    words = rf"^{name}.load_state_dict: (param_groups\[0\]|state) must have"
    params = make_params(torch.float32, shapes=SHAPES)
    for foreign in KINDS.keys() - {name, *KINDS[name].reads}:
        source = stepped(package(foreign)(params, lr=0.1, **MOMENTUM.get(foreign, {})))
        refused(target_of(name), source.state_dict(), words)


LATER = ["decoupled_weight_decay", "capturable", "differentiable", "maximize", "foreach"]


@pytest.mark.parametrize("foreign", ["NAdam", "RAdam", "Adamax"])
@pytest.mark.parametrize("later", [LATER[:1], LATER], ids=["before-decoupling", "first-release"])
def test_files_of_older_releases_are_told_apart_from_adams(foreign, later):
    file = file_of(foreign, steps=2)
    # While Adamax had 'capturable', RAdam had decoupled decay.
    for key in [*later, "capturable"] if foreign == "RAdam" else later:
        file["param_groups"][0].pop(key, None)
    refused(target_of("Adam"), file, r"param_groups\[0\] must have \['amsgrad'\], got")


def test_a_file_of_transformers_adamw_is_taken():
    source, target = target_of("AdamW"), target_of("AdamW")
    file = source.state_dict()
    (group,) = file["param_groups"]
    kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
    target.load_state_dict(file | {"param_groups": [kept | {"correct_bias": True}]})
    assert same_bits(*(o.state[params_of(o)[0]]["exp_avg"] for o in (source, target)))


@pytest.mark.parametrize(
    ("package", "name"), [*((ours, name) for name in NAMES), *((theirs, name) for name in IN_TORCH)]
)
def test_keys_of_the_user_are_kept_in_files_of_torch_and_of_amp_ext(package, name):
    params = make_params(torch.float32, shapes=SHAPES)
    source = stepped(package(name)(params, lr=0.1, **MOMENTUM.get(name, {})))
    file = source.state_dict()
    file["param_groups"][0] |= {"label": "backbone", "rho": 0.05}
    file["state"].setdefault(0, {})["average"] = torch.ones(3)
    loaded = ours(name)(twins(params_of(source)))
    loaded.load_state_dict(file)
    assert loaded.param_groups[0]["label"] == "backbone"
    assert loaded.param_groups[0]["rho"] == 0.05
    assert same_bits(loaded.state[params_of(loaded)[0]]["average"], torch.ones(3))


def test_keys_that_a_group_of_the_optimizer_has_are_kept_in_any_file():
    file = target_of("Lion").state_dict()
    (group,) = file["param_groups"]
    kept = {key: group[key] for key in ("lr", "betas", "weight_decay", "params")}
    file["param_groups"] = [kept | {"label": "backbone", "initial_lr": 0.5}]
    refused(target_of("Lion"), file, r"options of Lion, got \['label'\]")
    params = make_params(torch.float32, shapes=SHAPES)
    loaded = ours("Lion")([{"params": params, "label": "head"}])
    loaded.load_state_dict(file)
    assert loaded.param_groups[0]["label"] == "backbone"
    assert loaded.param_groups[0]["initial_lr"] == 0.5


# Options that torch's classes got over the years.

DECOUPLED = {"decoupled_weight_decay": True, "weight_decay": 0.1}
OLDER = {
    "sgd": ("SGD", ["nesterov", "maximize", "foreach", "fused"], {"maximize": True}),
    "adam": ("Adam", ["maximize", "decoupled_weight_decay"], {"maximize": True, **DECOUPLED}),
    "adamw": ("AdamW", ["maximize", "decoupled_weight_decay"], {"weight_decay": 0.1}),
}


@pytest.mark.parametrize(("name", "lacking", "options"), rows(OLDER))
def test_options_that_an_old_file_lacks_are_what_torch_takes_them_for(name, lacking, options):
    """Not what the target was made with, which is the opposite where it matters."""
    momentum = MOMENTUM.get(name, {})
    other = stepped(theirs(name)(make_params(torch.float32), lr=0.05, **momentum))
    file = other.state_dict()
    for key in lacking:
        del file["param_groups"][0][key]
    options = options | momentum
    both = [package(name)(twins(params_of(other)), lr=7.0, **options) for package in (ours, theirs)]
    for optimizer in both:
        optimizer.load_state_dict(copy.deepcopy(file))
    for key in lacking:
        mine, torchs = (optimizer.param_groups[0][key] for optimizer in both)
        assert bool(mine) == bool(torchs), key
    train(both, 2)
    for param, twin in zip(*map(params_of, both), strict=True):
        assert_close(param, twin, steps=2)


def test_configured_are_the_options_that_torch_does_not_have():
    own, of_torch = (make("AdamW")(make_params(torch.float32)).defaults for make in (ours, theirs))
    own = own.keys() - {"cautious_weight_decay"}  # which a file of ours decides
    assert own - of_torch.keys() == own & set(CONFIGURED_OPTIONS)


def test_cautious_decay_is_what_a_file_says_or_else_what_was_configured():
    cautious = {"cautious_weight_decay": True}
    params = make_params(torch.float32, shapes=SHAPES)
    ours_file = stepped(ours("AdamW")(params, **cautious)).state_dict()
    of_torch = stepped(theirs("AdamW")(params)).state_dict()
    del of_torch["param_groups"][0]["decoupled_weight_decay"]  # older files lack it
    for file, options in ((ours_file, {}), (of_torch, cautious)):
        loaded = ours("AdamW")(twins(params), **options)
        loaded.load_state_dict(file)
        assert loaded.param_groups[0]["cautious_weight_decay"]
        assert loaded.param_groups[0]["decoupled_weight_decay"]
        stepped(loaded)


def test_options_that_torch_does_not_have_stay_as_their_group_was_configured():
    first, second = make_params(torch.float32, shapes=SHAPES)
    groups = [{"params": [first], "decoupled_weight_decay": True}, {"params": [second]}]
    target = ours("SGD")(groups, momentum=0.9)
    other = theirs("SGD")([{"params": [p]} for p in twins([first, second])], momentum=0.9)
    target.load_state_dict(stepped(other).state_dict())
    assert [group["decoupled_weight_decay"] for group in target.param_groups] == [True, False]


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
        for param in params_of(source):
            source.state[param]["master_param"].copy_(param)
    file = as_fused_adam(source, step=step(3))
    if not with_masters:
        for state in file["state"].values():
            del state["master_param"]
    loaded = loading(ours("AdamW")(twins(source), lr=123.0), file)
    train([source, loaded], 3)
    assert_same_bits(loaded, source)
    assert loaded.state[params_of(loaded)[0]]["step"].item() == 6
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
    loaded = loading(ours("AdamW")(twins(source)), file)
    train([source, loaded], 2)
    assert_same_bits(loaded, source)


def test_steps_of_the_states_win_over_one_of_their_group():
    source = trained(ours("AdamW")(make_params(F32)))
    file = copy.deepcopy(source.state_dict())
    file["param_groups"][0] |= {"step": 77, "bias_correction": True}
    loaded = loading(ours("AdamW")(twins(source)), file)
    assert_same_bits(loaded, source)


@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
def test_a_buffer_that_a_group_does_not_use_is_loaded_like_those_that_it_uses(dtype) -> None:
    source = torch.optim.SGD(make_params(dtype), lr=0.1, momentum=0.9)
    train([source])
    file = source.state_dict()
    file["param_groups"][0]["momentum"] = 0.0
    optimizer = loading(ours("SGD")(make_params(F32), lr=0.1), file)
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype == F32


# Numbers of numpy, which files have that scripts converted from other frameworks.


@pytest.mark.parametrize("value", [np.zeros(2), np.str_("5"), np.array("5")], ids=repr)
def test_a_step_of_numpy_that_is_not_one_number_is_refused(value):
    source = trained(ours("AdamW")(make_params(F32)))
    file = copy.deepcopy(source.state_dict())
    file["state"][0]["step"] = value
    assert_refused(source, file, ValueError, "step of group 0, param 0 must be one number, got")
