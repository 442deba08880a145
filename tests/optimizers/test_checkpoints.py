"""State dicts of ``amp_ext.optim``: they go to torch and back, and bad ones change nothing."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from optimizer_cases import (
    AS_TORCH,
    EACH_CLASS,
    FEW_OPTIMIZERS,
    OPTIMIZERS,
    assert_same_bits,
    bits_of,
    in_16_bits,
    make_params,
    ours,
    params_of,
    theirs,
    train,
    twins,
)
from reference import assert_close, same_bits
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALVES = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
FLOATS = pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)

StateDict = dict[str, Any]


def through_a_file(state_dict: StateDict) -> StateDict:
    """Returns the state dict as ``torch.load`` gives it back with ``weights_only=True``."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def in_dtype(state_dict: StateDict, dtype: torch.dtype) -> StateDict:
    """Returns the state dict with every float32 tensor but ``step`` cast to ``dtype``."""
    result = copy.deepcopy(state_dict)
    for state in result["state"].values():
        for name, value in state.items():
            if name != "step" and value.dtype == F32:
                state[name] = value.to(dtype)
    return result


def trained(optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.optim.Optimizer:
    train([optimizer], steps)
    return optimizer


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@FLOATS
def test_resuming_gives_the_same_bits(device, dtype, name, options):
    straight = trained(ours(name)(make_params(dtype, device), **options))
    file = through_a_file(straight.state_dict())
    resumed = ours(name)(twins(params_of(straight)), lr=123.0)
    resumed.load_state_dict(file)
    assert_same_bits(resumed, straight)
    train([straight, resumed], 3)
    assert_same_bits(resumed, straight)
    assert resumed.state_dict()["param_groups"] == straight.state_dict()["param_groups"]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_training_may_change_to_ours_and_back(device, dtype, name, options):
    other = trained(theirs(name)(make_params(dtype, device), foreach=False, **options))
    mine = ours(name)(twins(params_of(other)), lr=123.0)
    mine.load_state_dict(through_a_file(other.state_dict()))
    train([other, mine], 3)
    back = theirs(name)(twins(params_of(mine)), lr=123.0, foreach=False)
    back.load_state_dict(through_a_file(mine.state_dict()))
    train([other, back], 3)
    for param, twin in zip(params_of(back), params_of(other), strict=True):
        assert_close(param, twin, steps=9)
        for key, tensor in other.state.get(twin, {}).items():
            assert_close(back.state[param][key], tensor, steps=9)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "loop"])
def test_torch_takes_ours_back_with_its_own_switches(device, fused):
    mine = trained(ours("AdamW")(make_params(F32, device), fused=fused))
    other = theirs("AdamW")(twins(params_of(mine)), fused=fused)
    other.load_state_dict(through_a_file(mine.state_dict()))
    train([mine, other], 3)
    for param, twin in zip(params_of(mine), params_of(other), strict=True):
        assert_close(param, twin, steps=3)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@HALVES
def test_a_checkpoint_of_torch_gets_masters_and_wide_states(device, dtype, name, options):
    other = trained(theirs(name)(make_params(dtype, device), **in_16_bits(name), **options))
    file = through_a_file(other.state_dict())
    mine = ours(name)(twins(params_of(other)))
    mine.load_state_dict(file)
    lr, mine.param_groups[0]["lr"] = mine.param_groups[0]["lr"], 0.0
    train([mine], 1)
    assert lr == options["lr"]
    for index, param in enumerate(params_of(mine)):
        state = mine.state[param]
        assert same_bits(state["master_param"], params_of(other)[index].detach().float())
        assert all(tensor.dtype == F32 for tensor in state.values())
        if "step" in file["state"].get(index, {}):
            assert state["step"].item() == 4


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
@HALVES
def test_torch_loads_a_checkpoint_with_masters(dtype, name, options):
    mine = trained(ours(name)(make_params(dtype), **options))
    other = theirs(name)(twins(params_of(mine)), lr=123.0, **in_16_bits(name))
    other.load_state_dict(through_a_file(mine.state_dict()))
    train([other], 1)
    assert other.param_groups[0]["lr"] == options["lr"]
    for param, twin in zip(params_of(mine), params_of(other), strict=True):
        assert set(mine.state[param]) <= set(other.state[twin])


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@pytest.mark.parametrize("file_dtype", [F16, BF16, F64], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_states_return_in_the_configured_dtype(dtype, file_dtype, name, options):
    mine = trained(ours(name)(make_params(dtype), **options))
    file = in_dtype(mine.state_dict(), file_dtype)
    loaded = ours(name)(twins(params_of(mine)), **options)
    loaded.load_state_dict(through_a_file(file))
    for index, param in enumerate(params_of(loaded)):
        for key, tensor in loaded.state[param].items():
            assert tensor.dtype == F32, key
            if key != "master_param":
                assert same_bits(tensor, file["state"][index][key].float()), key
    train([loaded], 1)


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@HALVES
def test_narrow_states_stay_narrow_when_the_file_does_not_say(dtype, name, options):
    other = trained(theirs(name)(make_params(dtype), **in_16_bits(name), **options))
    mine = ours(name)(twins(params_of(other)), **options, **AS_TORCH)
    mine.load_state_dict(through_a_file(other.state_dict()))
    assert mine.param_groups[0]["master_weights"] is False
    assert mine.param_groups[0]["state_dtype"] is None
    train([mine], 1)
    for param in params_of(mine):
        assert "master_param" not in mine.state[param]
        for key in mine.state[param].keys() - {"step"}:
            assert mine.state[param][key].dtype == dtype


STEPS = [
    pytest.param(lambda: 3, id="int"),
    pytest.param(lambda: 3.0, id="float"),
    pytest.param(lambda: torch.tensor(3), id="int64"),
    pytest.param(lambda: torch.tensor(3.0, dtype=F64), id="float64"),
    pytest.param(lambda: torch.tensor([3.0]), id="one-element"),
]


@pytest.mark.parametrize("step", STEPS)
def test_the_step_may_be_any_kind_of_number(device, step):
    straight = trained(ours("AdamW")(make_params(F32, device)))
    file = copy.deepcopy(straight.state_dict())
    for state in file["state"].values():
        state["step"] = step()
    resumed = ours("AdamW")(twins(params_of(straight)))
    resumed.load_state_dict(file)
    train([straight, resumed], 2)
    assert_same_bits(resumed, straight)
    for param in params_of(resumed):
        assert resumed.state[param]["step"].device == param.device


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@FLOATS
def test_loading_copies(dtype, name, options):
    source = trained(ours(name)(make_params(dtype), **options))
    file = source.state_dict()
    kept = copy.deepcopy(file)
    before = bits_of(source)
    loaded = ours(name)(twins(params_of(source)), **options)
    loaded.load_state_dict(file)
    loaded.param_groups[0]["lr"] = 7.0
    train([loaded], 2)
    assert_same_bits(source, before)
    assert file["param_groups"] == kept["param_groups"]
    for index, state in kept["state"].items():
        assert file["state"][index].keys() == state.keys()
        assert all(same_bits(file["state"][index][key], state[key]) for key in state)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_an_empty_state_goes_round(name, options):
    fresh = ours(name)(make_params(BF16), **options)
    loaded = ours(name)(twins(params_of(fresh)))
    loaded.load_state_dict(through_a_file(fresh.state_dict()))
    train([fresh, loaded], 2)
    assert_same_bits(loaded, fresh)


def test_loading_its_own_state_changes_nothing():
    optimizer = trained(ours("AdamW")(make_params(BF16)))
    before = bits_of(optimizer)
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert_same_bits(optimizer, before)


def test_an_empty_state_resets_a_trained_optimizer():
    optimizer = trained(ours("AdamW")(make_params(F32)))
    fresh = ours("AdamW")(twins(params_of(optimizer)))
    optimizer.load_state_dict(fresh.state_dict())
    train([optimizer, fresh], 2)
    assert_same_bits(optimizer, fresh)


def test_parameters_without_a_state_in_the_file_start_anew():
    source = ours("AdamW")(make_params(F32, shapes=[(5,), (3,)]))
    train([source], 1)
    file = source.state_dict()
    del file["state"][1]
    loaded = ours("AdamW")(twins(params_of(source)))
    loaded.load_state_dict(file)
    train([loaded], 1)
    steps = [loaded.state[param]["step"].item() for param in params_of(loaded)]
    assert steps == [2, 1]


def test_groups_of_different_options_go_round():
    def make(params):
        return ours("AdamW")(
            [
                {"params": params[:1], "lr": 0.1, "amsgrad": True},
                {"params": params[1:3], "master_weights": False},
                {"params": params[3:], "state_dtype": None, "betas": (0.5, 0.6)},
            ]
        )

    straight = trained(make(make_params(BF16)))
    resumed = make(twins(params_of(straight)))
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    train([straight, resumed], 2)
    assert_same_bits(resumed, straight)


def test_dampening_from_a_checkpoint_of_torch_is_not_at_its_first_step():
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    other = trained(theirs("SGD")(make_params(F32), foreach=False, **options))
    mine = ours("SGD")(twins(params_of(other)), **options)
    mine.load_state_dict(through_a_file(other.state_dict()))
    train([mine, other], 2)
    for param, twin in zip(params_of(mine), params_of(other), strict=True):
        assert_close(param, twin, steps=2)


def test_momentum_buffers_of_none_are_no_buffers():
    mine, plain = (ours("SGD")(make_params(F32)) for _ in range(2))
    for param, twin in zip(params_of(mine), params_of(plain), strict=True):
        twin.data.copy_(param.data)
    file = mine.state_dict()
    file["state"] = {index: {"momentum_buffer": None} for index in range(5)}
    mine.load_state_dict(file)
    train([mine, plain], 2)
    for param, twin in zip(params_of(mine), params_of(plain), strict=True):
        assert same_bits(param, twin)


@pytest.mark.parametrize("key", ["maximize", "foreach", "fused", "decoupled_weight_decay"])
def test_options_that_old_files_lack_are_filled_in(key):
    for name in ("Adam", "AdamW", "SGD"):
        source = trained(ours(name)(make_params(F32)))
        file = source.state_dict()
        del file["param_groups"][0][key]
        loaded = ours(name)(twins(params_of(source)))
        loaded.load_state_dict(file)
        train([source, loaded], 2)
        assert_same_bits(loaded, source)


def remove(*path):
    """Returns a function that removes what lies at the end of a path of keys."""

    def spoil(file):
        for key in path[:-1]:
            file = file[key]
        del file[path[-1]]

    return spoil


def put(value, *path):
    """Returns a function that puts a value at the end of a path of keys."""

    def spoil(file):
        for key in path[:-1]:
            file = file[key]
        old = file[path[-1]]
        file[path[-1]] = value(old) if callable(value) else value

    return spoil


BAD = [
    pytest.param(remove("param_groups"), "param_groups", id="no-groups"),
    pytest.param(remove("state"), "state", id="no-state"),
    pytest.param(
        put([], "param_groups"),
        "loaded state dict has a different number of parameter groups",
        id="other-groups",
    ),
    pytest.param(
        put([0, 1], "param_groups", 0, "params"),
        "loaded state dict contains a parameter group that doesn't match the size",
        id="fewer-params",
    ),
    pytest.param(remove("state", 1, "exp_avg"), "exp_avg", id="no-exp-avg"),
    pytest.param(remove("state", 4, "exp_avg_sq"), "exp_avg_sq", id="no-exp-avg-sq"),
    pytest.param(remove("state", 1, "max_exp_avg_sq"), "max_exp_avg_sq", id="no-max"),
    pytest.param(remove("state", 1, "step"), "step", id="no-step"),
    pytest.param(put(lambda t: t[:-1], "state", 1, "exp_avg"), "exp_avg", id="exp-avg-shape"),
    pytest.param(put(lambda t: t.t(), "state", 1, "exp_avg"), "exp_avg", id="exp-avg-transposed"),
    pytest.param(
        put(lambda t: t[:-1], "state", 1, "master_param"), "master_param", id="master-shape"
    ),
    pytest.param(put(lambda t: t.int(), "state", 1, "exp_avg"), "exp_avg", id="exp-avg-integer"),
    pytest.param(put("text", "state", 1, "exp_avg"), "exp_avg", id="exp-avg-text"),
    pytest.param(put(None, "state", 1, "exp_avg"), "exp_avg", id="exp-avg-none"),
    pytest.param(put("text", "state", 1, "step"), "step", id="step-text"),
    pytest.param(put(torch.zeros(2), "state", 1, "step"), "step", id="step-shape"),
    pytest.param(
        put(lambda t: t.to_sparse(), "state", 1, "exp_avg"), "exp_avg", id="exp-avg-sparse"
    ),
    pytest.param(remove("param_groups", 0, "lr"), "lr", id="no-lr"),
    pytest.param(remove("param_groups", 0, "betas"), "betas", id="no-betas"),
]


@pytest.mark.parametrize(("spoil", "words"), BAD)
def test_a_bad_checkpoint_is_refused_before_anything_changes(spoil, words):
    target = trained(ours("Adam")(make_params(BF16), lr=0.1, amsgrad=True))
    source = trained(ours("Adam")(twins(params_of(target)), lr=0.2, amsgrad=True))
    file = copy.deepcopy(source.state_dict())
    spoil(file)
    before, groups = bits_of(target), target.state_dict()["param_groups"]
    with pytest.raises((ValueError, RuntimeError, KeyError), match=words):
        target.load_state_dict(file)
    assert_same_bits(target, before)
    assert target.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(("name", "foreign"), [("Adam", "SGD"), ("SGD", "Adam")])
def test_a_checkpoint_of_another_optimizer_is_refused(name, foreign):
    options = {"momentum": 0.9} if name == "SGD" else {}
    target = trained(ours(name)(make_params(F32), **options))
    options = {"momentum": 0.9} if foreign == "SGD" else {}
    for package in (ours, theirs):
        source = trained(package(foreign)(twins(params_of(target)), **options))
        before, groups = bits_of(target), target.state_dict()["param_groups"]
        with pytest.raises((ValueError, RuntimeError), match=r"\w"):
            target.load_state_dict(source.state_dict())
        assert_same_bits(target, before)
        assert target.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_hooks_of_state_dicts_run_in_torchs_order(name, options):
    calls: list[str] = []
    source = trained(ours(name)(make_params(BF16), **options))
    source.register_state_dict_pre_hook(lambda opt: calls.append("save-pre"))
    source.register_state_dict_post_hook(
        lambda opt, state_dict: calls.append("save-post") or state_dict | {"note": 5}
    )
    file = source.state_dict()
    assert calls == ["save-pre", "save-post"]
    assert file["note"] == 5

    loaded = ours(name)(twins(params_of(source)), **options)

    def double_lr(optimizer, state_dict):
        calls.append("load-pre")
        state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] *= 2
        return state_dict

    def look(optimizer):
        calls.append("load-post")
        assert_same_bits(optimizer, source)

    loaded.register_load_state_dict_pre_hook(double_lr)
    loaded.register_load_state_dict_post_hook(look)
    loaded.load_state_dict(file)
    assert calls[2:] == ["load-pre", "load-post"]
    assert loaded.param_groups[0]["lr"] == 2 * options["lr"]


def test_names_of_parameters_are_kept():
    model = torch.nn.Linear(4, 3)
    optimizer = ours("AdamW")(model.named_parameters())
    other = trained(theirs("AdamW")(twins(list(model.parameters()))))
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@pytest.mark.parametrize("full", [True, False], ids=["full", "local"])
def test_distributed_checkpointing_reads_and_writes_the_state(name, options, full):
    models, optimizers = [], []
    for _ in range(2):
        model = torch.nn.Linear(4, 3).to(BF16)
        models.append(model)
        optimizers.append(ours(name)(model.parameters(), **options))
    trained(optimizers[0])
    how = StateDictOptions(full_state_dict=full)
    saved = get_optimizer_state_dict(models[0], optimizers[0], options=how)
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], optimizers[1], saved, options=how)
    assert_same_bits(optimizers[1], optimizers[0])
    train(optimizers, 2)
    assert_same_bits(optimizers[1], optimizers[0])
