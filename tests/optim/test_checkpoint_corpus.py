"""Files and pickles of earlier versions load with the bits of then."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_corpus as corpus
import pytest
import torch
from harness.optimizer_cases import assert_same_bits, group_of_one, ours, params_of
from torch.nn import Parameter

import amp_ext


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("corpus")
    corpus.unpack(found)
    return found


def test_every_row_is_there() -> None:
    assert {*corpus.ROWS, *corpus.ROWS_OF_TORCH} <= corpus.results().keys()
    for row, found in corpus.results().items():
        assert found.keys() - {corpus.FLOAT32} == {*corpus.targets_of(row)}


@pytest.mark.parametrize("group", corpus.GROUPS)
def test_files_load_with_the_bits_of_before(group: str, folder: Path) -> None:
    loaded = 0
    for row, target, wanted in corpus.loads(group):
        is_its_own = target == corpus.targets_of(row)[0]
        # Those of C++ have the same numbers: one load shows that they are read.
        for path in corpus.files_of(folder, row, "python", "torch", *["cpp"] * is_its_own):
            loaded += 1
            result, in_float32 = corpus.results_in_python(corpus.plan_of(row, target, path))
            assert result == wanted, f"{path} into {target}"
            if is_its_own:
                assert in_float32 == corpus.results()[row][corpus.FLOAT32], path
    assert loaded > 0


# Pickles of earlier releases load and train on, so their names keep importing. data/pickles.json
# has one of each class in text: add one with a row in MAKERS and as_text of what it makes. What is
# in the file already is never written anew.


PICKLES = Path(__file__).parent.parent / "data" / "pickles.json"
BF16 = torch.bfloat16


def as_text(value: Any) -> str:
    """Returns the pickle of an object as text of one line."""
    return base64.b64encode(zlib.compress(pickle.dumps(value), 9)).decode()


def loaded(name: str) -> Any:
    """Returns the object that the pickle of this name holds."""
    return pickle.loads(zlib.decompress(base64.b64decode(json.loads(PICKLES.read_text())[name])))


def step(optimizer: torch.optim.Optimizer) -> None:
    """Takes the next step of a loop whose gradients are always the same."""
    for param in params_of(optimizer):
        param.grad = torch.linspace(-1.0, 1.0, param.numel()).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()  # a pickle holds no gradients


def trained(name: str, **options: Any) -> torch.optim.Optimizer:
    optimizer = ours(name)([Parameter(torch.linspace(0.5, 2.0, 3).to(BF16))], lr=0.05, **options)
    for _ in range(2):
        step(optimizer)
    return optimizer


def update(scaler: torch.amp.GradScaler, factor: float = 1.0) -> None:
    """Takes the next iteration of a loop; its gradient is ``factor`` times 1."""
    param = Parameter(torch.ones(2))
    optimizer = ours("SGD")([param], lr=0.5)
    scaler.scale(param.sum()).backward()
    param.grad.mul_(factor)
    scaler.step(optimizer)
    scaler.update()


def scaled(scaler_class: type[torch.amp.GradScaler], **options: Any) -> torch.amp.GradScaler:
    scaler = scaler_class("cpu", init_scale=1024.0, growth_interval=3, **options)
    for factor in (1.0, torch.inf, 1.0, torch.inf, 1.0):
        update(scaler, factor)
    return scaler


def of_fully_sharded() -> torch.amp.GradScaler:
    with group_of_one():
        return scaled(amp_ext.ShardedGradScaler)


MAKERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: trained("Adam", amsgrad=True, weight_decay=0.1, max_grad_norm=1.0),
    "AdamW": lambda: trained("AdamW", state_dtype=None, clip_value=0.5),
    "SGD": lambda: trained("SGD", momentum=0.9, dampening=0.5, skip_nonfinite=True),
    "StepWeightDecay": lambda: amp_ext.optim.StepWeightDecay(
        trained("AdamW", weight_decay=0.5), step_size=1, gamma=0.5
    ),
    "CosineAnnealingWeightDecay": lambda: amp_ext.optim.CosineAnnealingWeightDecay(
        trained("AdamW", weight_decay=0.5), T_max=4
    ),
    "GradScaler": lambda: scaled(
        amp_ext.GradScaler, min_scale=2.0, max_scale=2048.0, hysteresis=2, warn_after=5
    ),
    "ShardedGradScaler": of_fully_sharded,
    "ScalerStats": lambda: scaled(amp_ext.GradScaler).stats(wait=True),
}


def test_every_class_has_its_pickle():
    assert json.loads(PICKLES.read_text()).keys() == MAKERS.keys()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_an_optimizer_from_a_pickle_steps_on(name):
    again, straight = loaded(name), MAKERS[name]()
    assert type(again) is type(straight)
    assert again.defaults.items() <= straight.defaults.items()
    assert again.grad_norm is None
    for _ in range(2):
        assert_same_bits(again, straight)
        step(again)
        step(straight)
    assert_same_bits(again, straight)


@pytest.mark.parametrize("name", ["StepWeightDecay", "CosineAnnealingWeightDecay"])
def test_a_schedule_from_a_pickle_goes_on(name):
    again, straight = loaded(name), MAKERS[name]()
    for schedule in (again, straight):
        step(schedule.optimizer)
        schedule.step()
    decays = [schedule.optimizer.param_groups[0]["weight_decay"] for schedule in (again, straight)]
    assert decays[0] == decays[1]
    assert_same_bits(again.optimizer, straight.optimizer)


@pytest.mark.parametrize("name", ["GradScaler", "ShardedGradScaler"])
def test_a_scaler_from_a_pickle_goes_on(name):
    again, straight = loaded(name), MAKERS[name]()
    assert type(again) is type(straight)
    assert again.state_dict() == straight.state_dict()
    assert again.stats().updates == 0
    if name == "GradScaler":  # the other one needs its ranks for a step
        for factor in (1.0, 1.0, torch.inf, torch.inf):
            update(again, factor)
            update(straight, factor)
            assert again.state_dict() == straight.state_dict()
        assert again.stats(wait=True).skips == 2


def test_what_a_scaler_told_is_the_same_from_a_pickle():
    assert loaded("ScalerStats") == MAKERS["ScalerStats"]()
