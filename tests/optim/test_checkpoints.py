"""State dicts of ``amp_ext.optim``: they go to torch and back, and bad ones change nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F32, F64
from harness.optimizer_cases import (
    assert_same_bits,
    make_params,
    ours,
    theirs,
    train,
    trained,
    twins,
)
from harness.reference import same_bits
from harness.rows import rows
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch

Optimizer = torch.optim.Optimizer


def as_their_own(mine: Optimizer, other: Optimizer) -> None:
    """Asserts that ``mine`` has the bits of every state of torch's."""
    for param, twin in zip(cases.params_of(mine), cases.params_of(other), strict=True):
        for key, tensor in other.state.get(twin, {}).items():
            assert same_bits(mine.state[param][key], tensor), key


# Resuming.


def test_parameters_without_a_state_in_the_file_start_anew():
    source = trained(ours("AdamW")(make_params(F32, shapes=[(5,), (3,)])), 1)
    file = source.state_dict()
    del file["state"][1]
    loaded = cases.loading(ours("AdamW")(twins(source)), file)
    train([loaded])
    assert [loaded.state[param]["step"].item() for param in cases.params_of(loaded)] == [2, 1]


STEPS = [3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=F64), torch.tensor([3.0])]
STEPS += [np.int64(3), np.float32(3.0), np.array(3.0), np.array([[3.0]], dtype="f2")]


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_the_step_may_be_any_kind_of_number(device, step):
    straight = trained(ours("AdamW")(make_params(F32, device)))
    file = copy.deepcopy(straight.state_dict())
    for state in file["state"].values():
        state["step"] = copy.deepcopy(step)
    loaded = cases.loading(ours("AdamW")(twins(straight)), file)
    train([straight, loaded], 2)
    assert_same_bits(loaded, straight)
    assert all(
        loaded.state[param]["step"].device == param.device for param in cases.params_of(loaded)
    )


# To torch and back.


SWITCHES = [{"foreach": True}, {"fused": True}, {"capturable": True, "foreach": False}]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
@cases.every_optimizer_in_torch
def test_files_of_all_implementations_of_torch_come_and_go(name, options, switch):
    """torch takes its switches from the file, so those of a CPU are set after the load."""
    switch = cases.taken(name, switch)
    on_cpu = switch | ({"capturable": False} if "capturable" in switch else {})
    other = trained(theirs(name)(make_params(F32), **options, **on_cpu))
    file = other.state_dict()
    file["param_groups"][0] |= switch
    mine = cases.loading(ours(name)(twins(other), lr=123.0), file)
    assert {key: mine.param_groups[0][key] for key in options | switch} == options | switch
    file = copy.deepcopy(mine.state_dict())  # torch keeps the tensors of what it loads
    back = cases.loading(theirs(name)(twins(other), lr=123.0), file)
    as_their_own(mine, other)
    as_their_own(back, other)
    assert {key: back.param_groups[0][key] for key in switch} == switch
    for optimizer in (mine, back):
        optimizer.param_groups[0].update(on_cpu)
    train([mine, other, back], 2)
    cases.assert_all_close(mine, other, steps=2)
    cases.assert_all_close(mine, back, steps=2)


@cases.each_in_torch
def test_a_tensor_lr_comes_and_goes(name):
    other = trained(theirs(name)(make_params(F32), lr=torch.tensor(0.25), foreach=False), 2)
    mine = cases.loading(ours(name)(twins(other)), other.state_dict())
    assert isinstance(mine.param_groups[0]["lr"], torch.Tensor)
    back = cases.loading(theirs(name)(twins(mine), foreach=False), mine.state_dict())
    assert back.param_groups[0]["lr"].item() == 0.25
    train([mine, other], 2)
    cases.assert_all_close(mine, other, steps=2)


def test_groups_of_a_checkpoint_that_share_a_learning_rate_go_on_sharing_it():
    def make(package):
        lr = torch.tensor(0.5)
        groups = [
            {"params": [param], "lr": lr} for param in make_params(F32, shapes=[(5, 3), (7,)])
        ]
        return package("AdamW")(groups, foreach=False)

    for package in (ours, cases.theirs):
        source, target = make(package), make(package)
        target.load_state_dict(source.state_dict())
        rates = [group["lr"] for group in target.param_groups]
        assert rates[0] is rates[1]
        assert rates[0] is not source.param_groups[0]["lr"]


def test_a_checkpoint_of_adam_leaves_adamw_decoupled():
    source = trained(ours("Adam")(make_params(F32), weight_decay=0.5))
    loaded = cases.loading(ours("AdamW")(twins(source)), source.state_dict())
    decoupled = ours("AdamW")(twins(source), weight_decay=0.5)
    states = copy.deepcopy(list(source.state.values()))
    decoupled.state.update(zip(cases.params_of(decoupled), states, strict=True))
    train([loaded, decoupled], 2)
    assert_same_bits(loaded, decoupled)


# Hooks and names.


@cases.each_class
def test_hooks_of_state_dicts_run_in_torchs_order(name, options):
    calls: list[str] = []
    source = trained(ours(name)(make_params(BF16), **options))
    loaded = ours(name)(twins(source), **options)
    source.register_state_dict_pre_hook(lambda opt: calls.append("save-pre"))
    source.register_state_dict_post_hook(
        lambda opt, state_dict: calls.append("save-post") or state_dict | {"note": 5}
    )

    def double_lr(optimizer, state_dict):
        calls.append(f"load-pre {state_dict['note']}")
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] *= 2
        return state_dict

    def scan(optimizer):
        calls.append("load-post")
        assert_same_bits(optimizer, source)

    loaded.register_load_state_dict_pre_hook(double_lr)
    loaded.register_load_state_dict_post_hook(scan)
    loaded.load_state_dict(source.state_dict())
    assert calls == ["save-pre", "save-post", "load-pre 5", "load-post"]
    assert loaded.param_groups[0]["lr"] == 2 * options["lr"]


# Files that are refused.


NO_DICTS = {
    r"'a\.pt': read the file with torch\.load first": "a.pt",
    "NoneType": None,
    "SGD": torch.optim.SGD([torch.ones(1)], lr=0.1),
}


@pytest.mark.parametrize(("got", "given"), NO_DICTS.items())
def test_what_is_no_dict_is_refused(got, given):
    target = trained(ours("Adam")(make_params(BF16), lr=0.1))
    words = f"^Adam.load_state_dict: state_dict must be a dict, got {got}$"
    cases.assert_refused(target, given, TypeError, words)


def test_codes_of_a_scalar_in_groups_are_refused():
    target = ours("Lion")([torch.ones((), requires_grad=True)])
    file = target.state_dict() | {"state": {0: {"exp_avg_q8m": torch.zeros((), dtype=torch.uint8)}}}
    file["state"][0]["exp_avg_exp"] = torch.zeros(1, dtype=torch.uint8)
    words = r"exp_avg_exp of group 0, param 0 must be torch.uint8 of shape \(0,\), got .* \(1,\)"
    cases.assert_refused(target, file, ValueError, words)


@pytest.mark.parametrize("method", ["init_state", "master_params", "load_state_dict"])
def test_a_lazy_parameter_is_refused_by_name_before_any_state_is_made(method):
    lazy = torch.nn.LazyLinear(3)
    optimizer = ours("AdamW")([torch.nn.Parameter(torch.ones(2)), lazy.weight])
    loads = method == "load_state_dict"
    arguments = [trained(ours("AdamW")(make_params(F32, shapes=[(2,), (3, 2)]))).state_dict()]
    words = "param of group 0, param 1 is a lazy parameter, which has no shape yet"
    words = rf"^AdamW.{method if loads else 'init_state'}: {words}"
    with pytest.raises(ValueError if loads else RuntimeError, match=words):
        getattr(optimizer, method)(*arguments[: int(loads)])
    assert optimizer.state_dict()["state"] == {}
    lazy(torch.ones(1, 2))
    getattr(optimizer, method)(*arguments[: int(loads)])
    assert len(optimizer.state) == 2


# State dicts of optimizers that were given names: states follow their parameters by name.


PREFIXES = {
    "same": "{}",
    "both": "module._orig_mod.{}",
    "inside": "blocks._orig_mod.0.module.{}",
    "recomputed": "_checkpoint_wrapped_module.{}",
}
BARE = {"inside": "blocks.0.{}"}


def named(names: list[str], form: str = "{}", dtype=F32) -> list[tuple[str, nn.Parameter]]:
    return [(form.format(name), nn.Parameter(torch.ones(3).to(dtype))) for name in names]


def stepped(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Steps once, with another gradient for each parameter."""
    optimizer = ours(name)(params, lr=0.5, **options)
    for number, param in enumerate(cases.params_of(optimizer), 1):
        param.grad = torch.full_like(param, number)
    optimizer.step()
    return optimizer


def states_by_name(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {
        own.removesuffix(".weight").rpartition(".")[2]: optimizer.state[param]
        for group in optimizer.param_groups
        for param, own in zip(group["params"], group["param_names"], strict=True)
    }


def assert_same_states(first: Any, second: Any) -> None:
    left, right = states_by_name(first), states_by_name(second)
    assert left.keys() == right.keys()
    for name, state in left.items():
        assert state.keys() == right[name].keys() != set()
        assert all(same_bits(value, right[name][key]) for key, value in state.items()), name


@pytest.mark.parametrize("form", PREFIXES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@cases.each_class
def test_states_go_by_name_within_their_group(name, options, dtype, form):
    options = {key: value for key, value in options.items() if key != "lr"}
    bare = BARE.get(form, "{}")
    first = [
        {"params": named(["a", "b", "c"], bare, dtype)},
        {"params": named(["d", "e"], bare, dtype)},
    ]
    source = stepped(name, first, **options)
    for here, names in ((PREFIXES[form], ["c", "a", "b"]), (bare, ["b", "c", "a"])):
        again = [
            {"params": named(names, here, dtype)},
            {"params": named(["e", "d"], here, dtype), "lr": 0.125},
        ]
        own = [[key for key, _ in group["params"]] for group in again]
        resumed = ours(name)(again, **options)
        resumed.load_state_dict(cases.through_a_file(source.state_dict()))
        assert_same_states(resumed, source)
        assert [group["param_names"] for group in resumed.param_groups] == own
        assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.5]
        source = resumed


# Names in the file, those of the optimizer, and whose states its parameters get.
OTHER_NAMES = {
    "renamed": (["first.a", "first.b"], ["second.b", "second.a"], [0, 1]),
    "one-more": (["a", "b"], ["b", "x"], [0, 1]),
    "twice": (["a", "module.a"], ["module.module.a", "a"], [0, 1]),
    "none-in-the-file": (None, ["b", "a"], [0, 1]),
    "none-of-the-optimizer": (["a", "b"], None, [0, 1]),
    "called-as-a-wrapper": (["module.a", "a"], ["a", "module.a"], [1, 0]),
}


@pytest.mark.parametrize(("saved", "own", "places"), rows(OTHER_NAMES))
def test_other_names_go_by_place(saved, own, places):
    """But a module may be called as a wrapper is."""

    def params_under(names: list[str] | None) -> list[Any]:
        return named(names) if names else [param for _, param in named(["a", "b"])]

    source, resumed = stepped("AdamW", params_under(saved)), ours("AdamW")(params_under(own))
    resumed.load_state_dict(source.state_dict())
    assert resumed.param_groups[0]["param_names"] == (own or saved)
    moments, loaded = (
        [each.state[param]["exp_avg"] for param in cases.params_of(each)]
        for each in (source, resumed)
    )
    assert all(map(same_bits, loaded, [moments[place] for place in places]))


def test_names_that_are_in_other_groups_are_refused():
    source = stepped("AdamW", [{"params": named(["a", "b"])}, {"params": named(["c", "d"])}])
    target = ours("AdamW")([{"params": named(["a", "module.c"])}, {"params": named(["b", "d"])}])
    words = (
        r"^AdamW.load_state_dict: param_names of param_groups\[0\] must have 'module.c', got it in "
        r"param_groups\[1\]$"
    )
    cases.assert_refused(target, source.state_dict(), ValueError, words)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning")
def test_keys_that_are_names_are_not_permuted_again(flat):
    how = of_torch.StateDictOptions(flatten_optimizer_state_dict=flat)
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
    pairs = list(model.named_parameters())

    def groups(order: int) -> list[dict[str, Any]]:
        return [{"params": [(f"{name[0]}", param) for name, param in pairs[::order]]}]

    source = stepped("AdamW", groups(1))
    saved = of_torch.get_optimizer_state_dict(model, source, options=how)
    for own in (groups(-1), [{"params": [param for _, param in pairs[::-1]]}]):
        resumed = ours("AdamW")(own)
        resumed.init_state()
        of_torch.set_optimizer_state_dict(model, resumed, saved, options=how)
        for _, param in pairs:
            assert same_bits(resumed.state[param]["exp_avg"], source.state[param]["exp_avg"])
        assert resumed.param_groups[0].get("param_names") in (["b", "a"], None)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_fsdp1_has_matched_by_name_is_not_permuted_again():
    from torch.distributed.fsdp import FullyShardedDataParallel

    def model_and_named() -> tuple[nn.Module, list[tuple[str, nn.Parameter]]]:
        model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        sharded = FullyShardedDataParallel(model, **options)
        return sharded, list(sharded.named_parameters())

    with cases.group_of_one():
        model, pairs = model_and_named()
        source = stepped("AdamW", pairs)
        saved = FullyShardedDataParallel.optim_state_dict(model, source)
        other, others = model_and_named()
        resumed = ours("AdamW")(others[::-1])
        resumed.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(other, resumed, saved)
        )
        assert_same_states(resumed, source)
