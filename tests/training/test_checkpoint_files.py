"""Files of ``MixedPrecisionTrainer.save``: whole whenever it is killed, and resumed bit by bit."""

from __future__ import annotations

import argparse
import errno
import operator
import os
import pickle
import random
import re
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import trainer_cases as cases
from harness.disk import Disk
from harness.optimizer_cases import GONE, spoiled
from harness.reference import same_bits
from harness.rows import rows
from harness.trainer_cases import all_of, plain
from torch import nn

import amp_ext
from amp_ext.training import MixedPrecisionTrainer, checkpoint_file

OPTIONS = {"optimizer": amp_ext.optim.AdamW, "scheduler": cases.halving}
OPTIONS |= {"gradient_accumulation_steps": 2, "growth_interval": 2}


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


def read(path: Path) -> str:
    return plain(torch.load(path, weights_only=True))


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


def versioned() -> Any:
    model = nn.Sequential(Versioned(3, 1)).half()
    return cases.new_trainer("fp16", model, **OPTIONS)


def test_a_layer_learns_the_version_of_a_file(tmp_path):
    trainer = versioned()
    trainer.save(tmp_path / "run.pt")
    again = versioned()
    again.load(tmp_path / "run.pt")
    assert same_bits(again.model[0].weight, trainer.model[0].weight)


# Where a file is written.


save = partial(checkpoint_file.write_checkpoint, "text")


def test_links_stay_and_what_they_name_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    for name, target in (("run.pt", "disk/last.pt"), ("disk/last.pt", "7.pt")):
        (tmp_path / name).symlink_to(target)
    for _ in range(2):  # the first where no file is yet
        save(tmp_path / "run.pt")
        assert sorted(os.listdir(tmp_path / "disk")) == ["7.pt", "last.pt"]
        files = [path for path in tmp_path.rglob("*.pt") if not path.is_symlink()]
        assert files == [tmp_path / "disk" / "7.pt"]
        assert torch.load(tmp_path / "run.pt") == "text"


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o666, 0o444])
def test_a_file_keeps_its_mode(mode, tmp_path):
    path = tmp_path / "run.pt"
    path.touch()
    path.chmod(mode)
    save(path)
    assert path.stat().st_mode & 0o777 == mode
    assert torch.load(path) == "text"


def test_a_file_is_written_under_a_name_of_its_own(tmp_path):
    (tmp_path / "run.pt.tmp").write_text("mine")
    save(tmp_path / "run.pt")
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.tmp"]
    assert (tmp_path / "run.pt.tmp").read_text() == "mine"
    modes = {(tmp_path / name).stat().st_mode for name in ("run.pt", "run.pt.tmp")}
    assert len(modes) == 1  # the mode that new files get


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, make_socket])
def test_what_is_no_file_is_refused(make):
    with tempfile.TemporaryDirectory() as folder:  # a short path, as those of sockets must be
        path = Path(folder) / "run.pt"
        make(path)
        before = path.stat()
        words = f"save: path must be of a file, or of nothing yet, got {path}, which is a folder, "
        for given in (path, f"{folder}/gone/"):
            with pytest.raises(ValueError, match=re.escape(words.replace(str(path), str(given)))):
                save(given)
        assert path.stat() == before
        assert os.listdir(folder) == ["run.pt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing/run.pt", "No such file or directory: '/.*missing/run.pt"),
        ("file/run.pt", "Not a directory: .*file/run.pt"),
    ],
)
def test_an_error_names_the_file_and_leaves_none(name, words, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=words):
        save(f"{tmp_path}/{name}")
    assert sorted(os.listdir(tmp_path)) == ["file"]


# What fails.


MANY_CALLS = 1000  # a save makes fewer


class Killed(BaseException):
    """Stands for the end of the process."""


def full(patch: pytest.MonkeyPatch) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ctrl_c(patch: pytest.MonkeyPatch) -> None:
    raise KeyboardInterrupt


def killed(patch: pytest.MonkeyPatch) -> None:
    """Lets nothing that comes after it reach the disk."""
    for name in ("fsync", "replace", "unlink"):
        patch.setattr(os, name, lambda *_: None)
    patch.setattr(checkpoint_file, "open", None)
    raise Killed


@pytest.mark.parametrize("power", ["on", "cut"])
@pytest.mark.parametrize(
    ("end", "error"), [(full, OSError), (ctrl_c, KeyboardInterrupt), (killed, Killed)]
)
def test_a_save_that_ends_anywhere_leaves_the_old_file_or_the_new_one(end, error, power, tmp_path):
    """Of a file that is not synchronised, nothing is there after a power cut."""
    trainer, path = new(), tmp_path / "run.pt"
    trainer.save(path, "old")
    trainer.save(tmp_path / "new.pt", "new")
    old, later = read(path), read(tmp_path / "new.pt")
    (tmp_path / "new.pt").unlink()
    for at in range(1, MANY_CALLS):
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(at, partial(end, patch), forgets=power == "cut").put_in_place(patch)
            try:
                trainer.save(path, "new")
            except error:
                assert len(disk.calls) == at - 1
            else:
                break
        abandoned = [*tmp_path.glob("*.tmp")]
        assert len(abandoned) == (end is killed and "replace" not in disk.calls)
        for each in abandoned:
            each.unlink()
        assert os.listdir(tmp_path) == ["run.pt"]
        assert read(path) == (later if "replace" in disk.calls else old)
    assert disk.calls[-3:] == ["flush", "fsync", "replace"]
    assert disk.calls.count("write") > 20


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
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), nn.Linear(2, 1)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        of_fsdp1 = nn.Sequential(FullyShardedDataParallel(2, 1))
        for sharded, got in ((model, "weight"), (of_fsdp1, "0")):
            trainer = cases.new_trainer(model=sharded)
            words = f"^MixedPrecisionTrainer.save: '{got}' is sharded over ranks. Use torch.dis"
            with pytest.raises(ValueError, match=words):
                trainer.save(tmp_path / "run.pt")
    finally:
        destroy_process_group()
    assert os.listdir(tmp_path) == []


SCALER = {"scale": 4.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 0}
# The path of keys to what is replaced, by what, and the refusal.
DAMAGED = {
    "another-file": ([], operator.itemgetter("model"), r"the file lacks \['model', 'model_met"),
    "no-random": (["random"], GONE, r"the file lacks \['random'\] and has \['model', 'model_m"),
    "random-entries": (["random"], {}, "cpu"),
    "random-of-gpus": (["random", "cuda"], GONE, "cuda"),
    "random-of-a-gpu": (["random", "cuda"], 1, "not iterable"),
    "random-numbers": (["random", "cpu"], [1, 2], "expected a torch.ByteTensor"),
    "random-size": (["random", "cpu"], torch.zeros(3).byte(), "(RNG|GeneratorImpl).* size"),
    "no-scaler": (["trainer", "scaler"], GONE, "scaler"),
    "no-gradients": (["trainer", "gradients"], GONE, "gradients"),
    "scaler-lacks-one": (["trainer", "scaler"], SCALER, "growth_factor"),
    "scaler-entry": (["trainer", "scaler", "_growth_tracker"], "text", "."),
    "scheduler-kind": (["trainer", "scheduler"], [1], r"states of 1 schedulers, got \['int'\]"),
    "no-optimizer": (["trainer", "optimizer"], None, "."),
    "optimizer": (["trainer", "optimizer"], {}, "AdamW.load_state_dict: state_dict must have 's"),
    "optimizer-step": (["trainer", "optimizer", "state", 1, "step"], -1.0, "at least 0, got -1.0"),
    "gradients-kind": (["trainer", "gradients"], None, "."),
    "gradient-shape": (["trainer", "gradients", 0], torch.ones(7), "."),
    "gradient-dtype": (["trainer", "gradients", 1], torch.ones(1).double(), "."),
    "gradient-kind": (["trainer", "gradients", 1], "text", "."),
    "loss": (["trainer", "loss"], "text", "."),
}
ANY = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


@pytest.mark.parametrize(("where", "new", "words"), rows(DAMAGED))
def test_a_file_that_does_not_fit_changes_nothing(where, new, words, tmp_path):
    path = tmp_path / "run.pt"
    trained(5).save(path)
    torch.save(spoiled(torch.load(path), where, new), path)
    trainer = trained(1)
    before, grads = all_of(trainer), cases.grads_of(trainer)
    with pytest.raises(ANY, match=words):
        trainer.load(path)
    assert all_of(trainer) == before
    cases.assert_same(cases.grads_of(trainer), grads)


@pytest.mark.parametrize(
    ("where", "new", "words"),
    [
        (["model", "1.bias"], torch.ones(7), "size mismatch for 1.bias"),
        (["model"], {}, "Missing key"),
    ],
)
def test_a_model_that_does_not_fit_changes_nothing_else(where, new, words, tmp_path):
    path = tmp_path / "run.pt"
    trained(5).save(path)
    torch.save(spoiled(torch.load(path), where, new), path)
    trainer = trained(1)
    before, drawn = plain(trainer.state_dict()), torch.get_rng_state()
    with pytest.raises(RuntimeError, match=words):
        trainer.load(path)
    assert plain(trainer.state_dict()) == before
    assert same_bits(torch.get_rng_state(), drawn)


class Graph(torch.nn.Module):
    """Keeps a matrix as a buffer."""

    def __init__(self, adjacency: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: Any) -> Any:
        return self.adjacency @ self.layer(x)


LAYOUTS: dict[str, Any] = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda matrix: matrix.to_sparse_bsr((2, 2)),
    "bsc": lambda matrix: matrix.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")
def test_a_model_with_a_sparse_buffer_is_saved_and_loaded(layout, tmp_path):
    def make(factor: float) -> Any:
        model = Graph(LAYOUTS[layout](factor * torch.eye(4)))
        if layout in ("bsr", "bsc"):  # torch doesn't multiply by BSC
            model.forward = model.layer.forward
        return cases.new_trainer("fp32", model=model)

    saved, loaded = make(2.0), make(1.0)
    saved.train_step(torch.ones(4, 4), torch.zeros(4, 4))
    saved.save(tmp_path / "run.pt")
    loaded.load(tmp_path / "run.pt")
    assert torch.equal(loaded.model.adjacency.to_dense(), 2.0 * torch.eye(4))
    cases.assert_same(cases.params_of(loaded), cases.params_of(saved))
