"""Files of ``MixedPrecisionTrainer.save``: whole whenever it is killed, and resumed bit by bit."""

from __future__ import annotations

import argparse
import operator
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import trainer_cases as cases
from harness.optimizer_cases import GONE, group_of_one, spoiled
from harness.reference import same_bits
from harness.rows import rows
from harness.trainer_cases import all_of, grads_of, plain
from torch import nn

import amp_ext
from amp_ext.training import MixedPrecisionTrainer


def guarded_adamw(params: Any) -> amp_ext.optim.AdamW:
    return amp_ext.optim.AdamW(params, norm_guard=amp_ext.optim.NormGuard())


def both_schedules(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [cases.two_schedules(optimizer), cases.falling_decay(optimizer)]


OPTIONS = {"optimizer": guarded_adamw, "average_decay": 0.5, "scheduler": both_schedules}
OPTIONS |= {"gradient_accumulation_steps": 2, "growth_interval": 2}
OF_TORCH = {"optimizer": cases.torchs_adamw, "average_decay": None, "dtype": torch.float32}


def new(device: Any = "cpu", dtype: torch.dtype = torch.float16, **options: Any) -> Any:
    """Returns a trainer of a model that draws random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)).to(device, dtype)
    return cases.new_trainer("fp16", model, **OPTIONS | options)


def train(trainer: MixedPrecisionTrainer, batches: int) -> None:
    device = next(trainer.model.parameters()).device
    for _ in range(batches):
        trainer.train_step(torch.randn(5, 3, device=device), torch.randn(5, 1, device=device))


def trained(batches: int, **options: Any) -> Any:
    trainer = new(**options)
    train(trainer, batches)
    return trainer


# Save and load.


EXTRA = {"epoch": 3, "place": torch.tensor([1, 2]), "more": [1.5, "text", b"2", {3}, (4, 5j)]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("at", [4, 5], ids=["after-a-step", "amid-an-accumulation"])
def test_a_run_that_goes_on_from_a_file_has_the_same_bits(device, dtype, at, tmp_path):
    straight = trained(at, device=device, dtype=dtype)
    straight.save(tmp_path / "run.pt", EXTRA)
    train(straight, 7)
    end, drawn = all_of(straight), torch.randn(3)
    again = trained(2, device=device, dtype=dtype)
    extra = again.load(tmp_path / "run.pt")
    assert plain(extra) == plain(EXTRA)
    train(again, 7)
    assert all_of(again) == end
    assert same_bits(torch.randn(3), drawn)
    assert os.listdir(tmp_path) == ["run.pt"]


def test_files_with_a_guard_and_an_average_and_without_them_are_loaded(tmp_path):
    trainer = trained(3)
    without = trained(3, optimizer=amp_ext.optim.AdamW, average_decay=None)
    trainer.save(tmp_path / "with.pt")
    without.save(tmp_path / "without.pt")
    without.load(tmp_path / "with.pt")
    known = trainer.optimizer.norm_guard.state_dict()
    trainer.load(tmp_path / "without.pt")
    assert trainer.optimizer.norm_guard.state_dict() == known
    assert trainer.average.n_averaged == 0


def test_a_file_is_read_without_running_code_and_without_a_gpu(tmp_path):
    path = tmp_path / "run.pt"
    trained(3).save(path)
    content = torch.load(path, weights_only=True)
    assert content.keys() == {"model", "model_metadata", "trainer", "random", "extra"}
    content["random"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    torch.save(content, path)
    if not torch.cuda.is_available():
        assert new().load(path) is None


class Code:
    """An object that makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_is_refused_and_does_not_run(tmp_path):
    path, folder = tmp_path / "run.pt", tmp_path / "made"
    trained(1).save(path)
    torch.save(torch.load(path) | {"extra": Code(folder)}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        new().load(path)
    assert not folder.exists()


class Versioned(nn.Linear):
    """A layer whose files of the first version held the weight halved."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version") in (None, 1):
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_layer_learns_the_version_of_a_file(tmp_path):
    trainer, again = (cases.new_trainer(model=Versioned(3, 1)) for _ in range(2))
    trainer.save(tmp_path / "run.pt")
    again.load(tmp_path / "run.pt")
    assert same_bits(again.model.weight, trainer.model.weight)


# Where a file is written.


def test_a_link_stays_and_the_file_that_it_names_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run.pt").symlink_to("disk/7.pt")
    trainer = new()
    for extra in (1, 2):  # the first where no file is yet
        trainer.save(tmp_path / "run.pt", extra)
        assert (tmp_path / "run.pt").is_symlink()
        assert os.listdir(tmp_path / "disk") == ["7.pt"]
        assert trainer.load(tmp_path / "run.pt") == extra


@pytest.mark.parametrize("name", ["missing/run.pt", "file/run.pt", "folder"])
def test_where_no_file_can_be_none_is_left(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=name):
        new().save(f"{tmp_path}/{name}")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


# What fails.


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_save_that_fails_leaves_the_old_file(step, error, monkeypatch, tmp_path):
    """The new file takes its name after it is on the disk, so that a power cut leaves one too."""
    calls = []

    def noting(name, call):
        def note(*arguments):
            calls.append(name)
            if name == step:
                raise error
            return call(*arguments)

        return note

    trainer, path = new(), tmp_path / "run.pt"
    trainer.save(path, "old")
    monkeypatch.setattr(torch, "save", noting("write", torch.save))
    monkeypatch.setattr(os, "fsync", noting("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", noting("replace", os.replace))
    with pytest.raises(error):
        trainer.save(path, "new")
    assert ["write", "fsync", "replace"][: len(calls)] == calls
    assert os.listdir(tmp_path) == ["run.pt"]
    assert trainer.load(path) == "old"


REFUSED = {
    "object": (argparse.Namespace(epoch=1), "got argparse.Namespace"),
    "function": (random.random, "got "),
    "class": ({"kinds": [Path]}, "got pathlib"),
}


@pytest.mark.parametrize(("extra", "words"), rows(REFUSED))
def test_what_could_not_be_read_again_is_not_saved(extra, words, tmp_path):
    trainer, path = new(), tmp_path / "run.pt"
    trainer.save(path, "old")
    words = r"^MixedPrecisionTrainer.save: model, trainer and extra must have tensors, .*" + words
    with pytest.raises(ValueError, match=words):
        trainer.save(path, extra)
    assert os.listdir(tmp_path) == ["run.pt"]
    assert trainer.load(path) == "old"


class FullyShardedDataParallel(nn.Linear):
    """Named as the class of torch, whose parameters are plain tensors."""


def test_sharded_parameters_are_refused_with_the_name_of_what_saves_them(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with group_of_one():
        mesh, model = init_device_mesh("cpu", (1,)), nn.Linear(2, 1)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        of_fsdp1 = nn.Sequential(FullyShardedDataParallel(2, 1))
        for sharded, got in ((model, "weight"), (of_fsdp1, "0")):
            trainer = cases.new_trainer(model=sharded)
            words = f"^MixedPrecisionTrainer.save: '{got}' is sharded over ranks. Use torch.dis"
            with pytest.raises(ValueError, match=words):
                trainer.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == []


SCALER = {"scale": 4.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 0}
# The path of keys to what is replaced, by what, and the refusal.
DAMAGED = {
    "another-file": ([], operator.itemgetter("model"), "model"),
    "no-random": (["random"], GONE, "random"),
    "random-entries": (["random"], {}, "cpu"),
    "random-numbers": (["random", "cpu"], [1, 2], "expected a torch.ByteTensor"),
    "random-size": (["random", "cpu"], torch.zeros(3).byte(), "(RNG|GeneratorImpl).* size"),
    "no-gradients": (["trainer", "gradients"], GONE, "gradients"),
    "scaler-lacks-one": (["trainer", "scaler"], SCALER, "growth_factor"),
    "scaler-entry": (["trainer", "scaler", "_growth_tracker"], "text", "."),
    "schedulers": (["trainer", "scheduler"], [], "states of 2 schedulers, got 0"),
    "average": (["trainer", "average", "averages"], [], "averages of 2 parameters .*, got 0"),
    "guard": (["trainer", "norm_guard", "mean"], -1.0, "NormGuard.load_state_dict: mean must be"),
    "no-optimizer": (["trainer", "optimizer"], None, "."),
    "optimizer": (["trainer", "optimizer"], {}, "AdamW.load_state_dict: state_dict must have 's"),
    "optimizer-step": (["trainer", "optimizer", "state", 1, "step"], -1.0, "at least 0, got -1.0"),
    "gradients-kind": (["trainer", "gradients"], None, "."),
    "gradient-shape": (["trainer", "gradients", 0], torch.ones(7), "."),
    "gradient-dtype": (["trainer", "gradients", 1], torch.ones(1).double(), "."),
    "gradient-kind": (["trainer", "gradients", 1], "text", "."),
    "of-torch": (["trainer", "optimizer"], {"averages": []}, "."),
    "scaler-of-torch": (["trainer", "scaler"], {"averages": []}, "."),
    "model-shape": (["model", "1.bias"], torch.ones(7), "size mismatch for 1.bias"),
    "model": (["model"], {}, "Missing key"),
}
ANY = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_does_not_fit_changes_nothing(name, tmp_path):
    where, new, words = DAMAGED[name]
    of_model = where[:1] == ["model"]
    options = {"average_decay": None} if of_model else OF_TORCH if "of-torch" in name else {}
    path = tmp_path / "run.pt"
    trained(5, **options).save(path)
    torch.save(spoiled(torch.load(path), where, new), path)
    trainer, twin = (trained(3, **options) for _ in range(2))
    before, drawn, grads = plain(trainer.state_dict()), torch.get_rng_state(), grads_of(trainer)
    # A model, and an optimizer of torch, may refuse when other parts are loaded already.
    state = torch.load(path)["trainer"] if "of-torch" in name else None
    with pytest.raises(ANY, match=words):
        trainer.load(path) if state is None else trainer.load_state_dict(state)
    assert plain(trainer.state_dict()) == before
    assert same_bits(torch.get_rng_state(), drawn)
    cases.assert_same(grads_of(trainer), grads)
    for each in () if of_model else (trainer, twin):
        torch.manual_seed(1)
        train(each, 4)
    assert of_model or all_of(trainer) == all_of(twin)
