"""``torch.distributed.checkpoint`` saves and loads the optimizers, masters included."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32
from harness.reference import same_bits
from harness.rows import rows
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.api import CheckpointException

import amp_ext

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning")

WAYS = rows(
    {
        "local": of_torch.StateDictOptions(),
        "flat": of_torch.StateDictOptions(flatten_optimizer_state_dict=True),
        "full": of_torch.StateDictOptions(full_state_dict=True),
        "full-on-cpu": of_torch.StateDictOptions(full_state_dict=True, cpu_offload=True),
    }
)


def coded(code: str) -> tuple[str, dict[str, Any], torch.dtype]:
    return "AdamW", {"lr": 0.01, "state_dtype": code}, F32


# Plain SGD has nothing but masters to save. Each in every dtype, and every dtype in each way.
each_dtype_in_each_way = pytest.mark.parametrize(
    ("name", "options", "dtype", "how"),
    [
        pytest.param(*row.values, dtype, *way.values, id=f"{row.id}-{dtype}-{way.id}")
        # The 3 keeps plain SGD in float32, which has no state, from a full one: torch can't set it.
        for number, row in enumerate([*cases.optimizers_named("sgd"), *cases.FEW_OPTIMIZERS], 3)
        for place, dtype in enumerate((F16, BF16, F32))
        for way in [WAYS[(number + place) % len(WAYS)]]
    ]
    + [
        pytest.param(*coded(code), *way.values, id=f"{code}-{way.id}")
        for number, code in enumerate(("8bit-bf16", "8bit"))
        for way in WAYS[number::2]
    ],
)


@pytest.fixture(params=["alone", "gloo"])
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once without a process group, once in one that is made of this process."""
    with cases.group_of_one() if request.param == "gloo" else contextlib.nullcontext():
        yield


def make(
    name: str, dtype: torch.dtype, package: Any = cases.ours, **options: Any
) -> tuple[nn.Module, cases.Optimizer]:
    """Returns a model with a frozen bias and its optimizer with two groups."""
    model = nn.Sequential(nn.Linear(32, 130), nn.Linear(130, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    groups = [
        {"params": model[1].parameters(), "weight_decay": 0.5},
        {"params": model[0].parameters()},
    ]
    return model, package(name)(groups, **options)


def train_trainable(optimizers: list[cases.Optimizer], steps: int) -> None:
    for _ in range(steps):
        for params in zip(*map(cases.params_of, optimizers), strict=True):
            grad = torch.randn_like(params[0])
            for param in params:
                param.grad = grad.clone() if param.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()


def steps_of(optimizer: cases.Optimizer) -> list[float]:
    return [state["step"].item() for state in optimizer.state.values() if "step" in state]


def load(content: dict[str, Any], folder: Path, lacks_options: bool = False) -> None:
    planner = amp_ext.LoadPlanner() if lacks_options else dcp.DefaultLoadPlanner()
    dcp.load(content, checkpoint_id=folder, planner=planner)


@each_dtype_in_each_way
def test_states_go_through_a_folder_to_a_fresh_optimizer(
    tmp_path, processes, name, options, dtype, how
):
    model, optimizer = make(name, dtype, **options)
    train_trainable([optimizer], 3)
    before = cases.bits_of(optimizer)
    model_state, state = of_torch.get_state_dict(model, optimizer, options=how)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path)
    cases.assert_same_bits(optimizer, before)

    fresh_model, fresh = make(name, dtype, lr=123.0)
    for group in fresh.param_groups:  # states are made for the options of the file
        group.update({key: value for key, value in options.items() if key != "lr"})
    model_state, state = of_torch.get_state_dict(fresh_model, fresh, options=how)
    content = {"model": model_state, "optimizer": state}
    load(content, tmp_path)
    loaded = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
    of_torch.set_state_dict(fresh_model, fresh, **loaded, options=how)
    cases.assert_same_bits(fresh, optimizer)
    assert [group["lr"] for group in fresh.param_groups] == [options["lr"]] * 2
    train_trainable([optimizer, fresh], 2)
    cases.assert_same_bits(fresh, optimizer)


@each_dtype_in_each_way
def test_reading_and_writing_states_moves_no_counter(name, options, dtype, how):
    (model, optimizer), (_, plain) = (make(name, dtype, **options) for _ in range(2))
    counters = 3 if cases.counts_steps(name, options) else 0
    for param, twin in zip(cases.params_of(optimizer), cases.params_of(plain), strict=True):
        twin.data.copy_(param.data)
    optimizer.init_state()
    state = of_torch.get_optimizer_state_dict(model, optimizer, options=how)
    assert steps_of(optimizer) == [0.0] * counters
    of_torch.set_optimizer_state_dict(model, optimizer, state, options=how)
    assert steps_of(optimizer) == [0.0] * counters
    train_trainable([optimizer, plain], 2)
    assert steps_of(optimizer) == [2.0] * counters
    cases.assert_same_bits(optimizer, plain)


# Files that lack some options of ours.


PLAIN_AND_FLAT = pytest.mark.parametrize("how", WAYS[:2])


def without(state: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns a state dict without some options of groups, or keys of states, flattened or not."""
    if "state" not in state:
        return {key: state[key] for key in state if key.rpartition(".")[2] not in names}

    def cut(each: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in each.items() if key not in names}

    states = {key: cut(each) for key, each in state["state"].items()}
    return {"state": states, "param_groups": [cut(group) for group in state["param_groups"]]}


def carried(
    saver: tuple[nn.Module, cases.Optimizer],
    loader: tuple[nn.Module, cases.Optimizer],
    folder: Path,
    how: of_torch.StateDictOptions,
    missing: Collection[str] = (),
    lacks_options: bool = True,
) -> cases.Optimizer:
    """Loads what one side saves, less some keys, into another, which it returns."""
    loader[0].load_state_dict(saver[0].state_dict())
    state = of_torch.get_optimizer_state_dict(*saver, options=how)
    dcp.save({"o": without(state, missing)}, checkpoint_id=folder)
    content = {"o": of_torch.get_optimizer_state_dict(*loader, options=how)}
    load(content, folder, lacks_options)
    of_torch.set_optimizer_state_dict(*loader, content["o"], options=how)
    return loader[1]


@pytest.mark.parametrize("how", WAYS)
@cases.each_class_in_torch
def test_a_folder_of_torch_is_loaded_and_torch_loads_ours(tmp_path, name, options, how):
    kept = {"max_grad_norm": 2.0, "rounding": "nearest"}
    sides = [make(name, F32, package, **options) for package in (cases.theirs, cases.theirs)]
    train_trainable([sides[0][1]], 2)
    mine = make(name, F32, **options, **kept)
    carried(sides[0], mine, tmp_path / "theirs", how)
    carried(mine, sides[1], tmp_path / "ours", how, lacks_options=False)
    for left, right in ((sides[0], mine), (mine, sides[1])):
        for twin, param in zip(*map(cases.params_of, (left[1], right[1])), strict=True):
            state = right[1].state.get(param, {})
            for key, tensor in left[1].state.get(twin, {}).items():
                assert same_bits(state[key], tensor), key
    for group in mine[1].param_groups:
        assert {key: group[key] for key in kept} == kept


MISSING = rows(
    {
        "moment": ("AdamW", "exp_avg_sq"),
        "counter": ("AdamW", "step"),
        "master": ("AdamW", "master_param"),
        "option-of-torch": ("AdamW", "betas"),
        "decay-of-torchs-adam": ("Adam", "decoupled_weight_decay"),
    }
)


@PLAIN_AND_FLAT
@pytest.mark.parametrize(("name", "missing"), MISSING)
def test_all_else_that_a_folder_lacks_is_an_error(tmp_path, name, missing, how):
    saver, loader = make(name, BF16), make(name, BF16)
    train_trainable([saver[1]], 2)
    loader[0].load_state_dict(saver[0].state_dict())
    loader[1].init_state()
    before = cases.bits_of(loader[1])
    with pytest.raises(CheckpointException, match=rf"Missing key .*\.{missing}\."):
        carried(saver, loader, tmp_path, how, {missing, "rounding"})
    cases.assert_same_bits(loader[1], before)


@pytest.mark.parametrize("package", [cases.theirs, cases.ours])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_group_without_parameters_keeps_its_options(tmp_path, place, package):
    """Of flattened ones torch can't be asked: it takes the name of each group's first parameter."""

    def side(package: Any, lr: float) -> tuple[nn.Module, cases.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        groups = [{"params": list(part.parameters()), "lr": lr + 1.0} for part in model]
        groups.insert(place, {"params": []})
        return model, package("AdamW")(groups, lr)

    saver, loader = side(package, 0.25), side(cases.ours, 0.5)
    train_trainable([saver[1]], 2)
    loaded = carried(saver, loader, tmp_path, of_torch.StateDictOptions())
    rates = [group["lr"] for group in loaded.param_groups]
    assert rates.pop(place) == (0.25 if place == 2 else 0.5)  # torch loses it before the others
    assert rates == [1.25, 1.25]
    assert loaded.param_groups[place].keys() == loaded.param_groups[place - 1].keys()
    train_trainable([loaded], 1)


# States that are created ahead of the first step.


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.cfloat), ("meta", F32), ("cpu", torch.float8_e5m2)], ids=str
)
def test_states_of_parameters_that_no_step_takes_are_refused(device, dtype):
    good, bad = nn.Parameter(torch.ones(3)), torch.ones(3, device=device).to(dtype)
    optimizer = cases.ours("AdamW")([{"params": [good]}, {"params": [good.detach().clone(), bad]}])
    bad.requires_grad_()
    words = rf"param of group 1, param 1 must be .*{str(dtype)[6:]} on {device}"
    with pytest.raises(RuntimeError, match=f"^AdamW.init_state: {words}"):
        optimizer.init_state()
    assert not optimizer.state
