"""``torch.distributed.checkpoint`` saves and loads the optimizers, masters included."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_cases import (
    FEW_OPTIMIZERS,
    assert_same_bits,
    bits_of,
    ours,
    params_of,
    theirs,
    train,
)
from reference import same_bits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FLOATS = pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)

WAYS = [
    pytest.param(StateDictOptions(), id="local"),
    pytest.param(StateDictOptions(flatten_optimizer_state_dict=True), id="flat"),
    pytest.param(StateDictOptions(full_state_dict=True), id="full"),
    pytest.param(StateDictOptions(full_state_dict=True, cpu_offload=True), id="full-on-cpu"),
]


@pytest.fixture(params=["alone", "gloo"])
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once without a process group, once in one that is made of this process."""
    if request.param == "alone":
        yield
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def make(
    name: str, dtype: torch.dtype, package: Any = ours, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model with a frozen bias and its optimizer with two groups."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    groups = [
        {"params": model[1].parameters(), "weight_decay": 0.5},
        {"params": model[0].parameters()},
    ]
    return model, package(name)(groups, **options)


def train_trainable(optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for _ in range(steps):
        for params in zip(*map(params_of, optimizers), strict=True):
            grad = torch.randn_like(params[0])
            for param in params:
                param.grad = grad.clone() if param.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()


def steps_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [state["step"].item() for state in optimizer.state.values() if "step" in state]


def save(content: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():  # that there is one process
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(content, checkpoint_id=folder)


def load(content: dict[str, Any], folder: Path, partly: bool = False) -> None:
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partly)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(content, checkpoint_id=folder, planner=planner)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@FLOATS
def test_states_go_through_a_folder_to_a_fresh_optimizer(
    tmp_path, processes, dtype, name, options, how
):
    model, optimizer = make(name, dtype, **options)
    train_trainable([optimizer], 3)
    before = bits_of(optimizer)
    model_state, state = get_state_dict(model, optimizer, options=how)
    save({"model": model_state, "optimizer": state}, tmp_path)
    assert_same_bits(optimizer, before)

    fresh_model, fresh = make(name, dtype, lr=123.0)
    for group in fresh.param_groups:  # states are made for the options of the file
        group.update({key: value for key, value in options.items() if key != "lr"})
    model_state, state = get_state_dict(fresh_model, fresh, options=how)
    content = {"model": model_state, "optimizer": state}
    load(content, tmp_path)
    set_state_dict(
        fresh_model,
        fresh,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=how,
    )
    assert_same_bits(fresh, optimizer)
    assert [group["lr"] for group in fresh.param_groups] == [options["lr"]] * 2
    train_trainable([optimizer, fresh], 2)
    assert_same_bits(fresh, optimizer)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@FLOATS
def test_reading_and_writing_states_moves_no_counter(dtype, name, options, how):
    model, optimizer = make(name, dtype, **options)
    _, plain = make(name, dtype, **options)
    for param, twin in zip(params_of(optimizer), params_of(plain), strict=True):
        twin.data.copy_(param.data)
    optimizer.init_state()
    state = get_optimizer_state_dict(model, optimizer, options=how)
    assert steps_of(optimizer) == [0.0] * 3
    set_optimizer_state_dict(model, optimizer, state, options=how)
    assert steps_of(optimizer) == [0.0] * 3
    train_trainable([optimizer, plain], 2)
    assert steps_of(optimizer) == [2.0] * 3
    assert_same_bits(optimizer, plain)


@pytest.mark.parametrize("package", [ours, theirs], ids=["ours", "theirs"])
def test_without_init_state_torch_counts_a_step_of_its_own(package):
    model, optimizer = make("AdamW", F32, package)
    before = [param.detach().clone() for param in params_of(optimizer)]
    get_optimizer_state_dict(model, optimizer)
    assert steps_of(optimizer) == [1.0] * 3
    assert all(map(same_bits, params_of(optimizer), before))


@FLOATS
def test_plain_sgd_has_nothing_but_masters_to_save(tmp_path, dtype):
    model, optimizer = make("SGD", dtype, lr=0.1)
    train_trainable([optimizer], 2)
    save({"state": get_optimizer_state_dict(model, optimizer)}, tmp_path)
    fresh_model, fresh = make("SGD", dtype, lr=0.2)
    fresh_model.load_state_dict(model.state_dict())
    content = {"state": get_optimizer_state_dict(fresh_model, fresh)}
    load(content, tmp_path)
    set_optimizer_state_dict(fresh_model, fresh, content["state"])
    assert_same_bits(fresh, optimizer)
    assert fresh.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
def test_a_folder_of_torch_is_loaded_and_torch_loads_ours(tmp_path, name, options, how):
    def carry(saver, loader, folder):
        model, optimizer = saver
        save({"state": get_optimizer_state_dict(model, optimizer, options=how)}, folder)
        fresh_model, fresh = loader
        fresh_model.load_state_dict(model.state_dict())
        content = {"state": get_optimizer_state_dict(fresh_model, fresh, options=how)}
        load(content, folder, partly=True)  # each side has options that the other lacks
        set_optimizer_state_dict(fresh_model, fresh, content["state"], options=how)

    other = make(name, F32, theirs, **options)
    train_trainable([other[1]], 2)
    mine = make(name, F32, **options)
    carry(other, mine, tmp_path / "theirs")
    for param, twin in zip(params_of(mine[1]), params_of(other[1]), strict=True):
        for key, tensor in other[1].state.get(twin, {}).items():
            assert same_bits(mine[1].state[param][key], tensor), key
    back = make(name, F32, theirs, **options)
    carry(mine, back, tmp_path / "ours")
    for param, twin in zip(params_of(back[1]), params_of(mine[1]), strict=True):
        for key, tensor in back[1].state[param].items():
            assert same_bits(mine[1].state[twin][key], tensor), key


def test_masters_in_a_folder_keep_their_extra_bits(tmp_path):
    model, optimizer = make("AdamW", BF16, lr=1e-4)
    train_trainable([optimizer], 5)
    param = model[0].weight
    master = optimizer.state[param]["master_param"]
    assert not same_bits(master, param.detach().float())
    save(
        {"model": get_model_state_dict(model), "state": get_optimizer_state_dict(model, optimizer)},
        tmp_path,
    )
    stored = {"state": {"state": {"0.weight": {"master_param": torch.zeros_like(master)}}}}
    load(stored, tmp_path)
    assert same_bits(stored["state"]["state"]["0.weight"]["master_param"], master)


# States that are created ahead of the first step.


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@FLOATS
def test_states_created_ahead_change_no_bit_of_the_training(device, dtype, name, options):
    ahead = ours(name)([nn.Parameter(torch.randn(5, device=device).to(dtype))], **options)
    plain = ours(name)(
        [nn.Parameter(param.detach().clone()) for param in params_of(ahead)], **options
    )
    start = params_of(ahead)[0].detach().clone()
    ahead.init_state()
    assert same_bits(params_of(ahead)[0], start)
    assert steps_of(ahead) == [0.0]
    train([ahead, plain], 3)
    assert_same_bits(ahead, plain)
    before = bits_of(ahead)
    ahead.init_state()
    assert_same_bits(ahead, before)
    train([ahead, plain], 1)
    assert_same_bits(ahead, plain)


def test_states_created_ahead_are_those_of_a_step():
    for row in FEW_OPTIMIZERS:
        name, options = row.values
        _, ahead = make(name, BF16, **options)
        _, stepped = make(name, BF16, **options)
        ahead.init_state()
        train_trainable([stepped], 1)
        for param, twin in zip(params_of(ahead), params_of(stepped), strict=True):
            described = [
                {key: (value.dtype, value.shape) for key, value in optimizer.state[each].items()}
                for optimizer, each in ((ahead, param), (stepped, twin))
                if each in optimizer.state
            ]
            assert len(described) == (2 if param.requires_grad else 0)
            assert described[:1] == described[1:]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(torch.ones(3, dtype=torch.cfloat), "complex64 on cpu", id="complex"),
        pytest.param(torch.ones(3, device="meta"), "float32 on meta", id="meta"),
        pytest.param(torch.ones(3).to(torch.float8_e5m2), "float8_e5m2 on cpu", id="float8"),
    ],
)
def test_states_of_parameters_that_no_step_takes_are_refused(bad, words):
    good = nn.Parameter(torch.ones(3))
    optimizer = ours("AdamW")([{"params": [good]}, {"params": [good.detach().clone(), bad]}])
    bad.requires_grad_()
    with pytest.raises(
        RuntimeError, match=rf"^AdamW.init_state: param of group 1, param 1 must be .*{words}"
    ):
        optimizer.init_state()
    assert not optimizer.state
