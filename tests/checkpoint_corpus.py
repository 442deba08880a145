"""Checkpoints of every class and form, which every later version must load with the same bits.

    python tests/checkpoint_corpus.py --add    # files and results for rows that have none

``data/checkpoints.tar.xz`` has files that Python and torch wrote, and C++ classes of earlier
versions, by row: an optimizer, the dtype of its parameters, and the form of what it keeps.
``data/checkpoints.json`` says what comes of each row in each configuration that loads it, after
five more steps: a hash of the parameters and states, the same whoever wrote the file, or the text
of a refusal. What is in there is never written anew: a file stands for those that users have.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.hashes import Hash, numbers
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext.optim import float32_state_dict

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "data" / "checkpoints.tar.xz"
RESULTS = ROOT / "tests" / "data" / "checkpoints.json"

SHAPES = ((64, 64), (9,))  # with blocks of 32 elements in 8 bits, and without
STEPS_BEFORE, STEPS_AFTER = 3, 5
FLOAT32 = "float32 states"  # the row's result of float32_state_dict

Saved = dict[str, Any]
Options = dict[str, Any]

KINDS: dict[str, tuple[str, Options]] = {
    "adam-amsgrad": ("Adam", {"amsgrad": True, "weight_decay": 0.125, "betas": (0.75, 0.875)}),
    "adamw": ("AdamW", {"weight_decay": 0.125, "betas": (0.75, 0.875)}),
    "sgd": ("SGD", {"weight_decay": 0.125}),
    "sgd-momentum": ("SGD", {"momentum": 0.75, "nesterov": True}),
    "lion": ("Lion", {"betas": (0.75, 0.875)}),
}
STATES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "param-dtype": None,
    "8bit-bf16": "8bit-bf16",
    "8bit": "8bit",
}
MASTERS = {"masters": True, "split": "split", "split8": "split8", "none": False}
# What files of a dtype are loaded into, beside their own configuration.
TARGETS = {
    "float64": ("float32/float32",),
    "float32": ("float32/float32", "float32/8bit", "bfloat16/split-bfloat16", "float64/float64"),
    "bfloat16": (
        "bfloat16/masters-float32",
        "bfloat16/split8-8bit",
        "bfloat16/none-param-dtype",
        "float16/split-8bit-bf16",
        "float32/bfloat16",
    ),
    "float16": (
        "float16/masters-float32",
        "float16/split8-8bit",
        "float16/none-param-dtype",
        "bfloat16/split-8bit-bf16",
        "float32/bfloat16",
    ),
}


def configurations() -> dict[str, Options]:
    """Returns the options that say what is kept, by dtype of the parameters and form."""
    found: dict[str, Options] = {"float64/float64": {}}
    for states, state_dtype in STATES.items():
        found[f"float32/{states}"] = {"state_dtype": state_dtype}
        for masters, master_weights in MASTERS.items():
            options = {"state_dtype": state_dtype, "master_weights": master_weights}
            found[f"bfloat16/{masters}-{states}"] = options
            if masters in ("masters", "none") or state_dtype is not None:  # no float16 states
                found[f"float16/{masters}-{states}"] = options
    return found


CONFIGURATIONS = configurations()


def can_keep(kind: str, configuration: str) -> bool:
    """Returns whether a kind of optimizer has such states: AMSGrad has no codes, SGD no moment."""
    states = configuration.partition("/")[2].rpartition("-")[2]
    coded = "8bit" in configuration
    if kind == "adam-amsgrad":
        return not coded
    return kind != "sgd" or states == "float32" or configuration.startswith("float64")


ROWS = [f"{kind}/{each}" for kind in KINDS for each in CONFIGURATIONS if can_keep(kind, each)]
ROWS_OF_TORCH = [
    f"torch-{kind}/{dtype}"
    for kind, (name, _) in KINDS.items()
    for dtype in ("float32", "bfloat16", "float16")
    if hasattr(torch.optim, name)
]


def parts_of(row: str) -> tuple[str, str]:
    """Returns the kind of a row, and its dtype with its form."""
    kind, _, configuration = row.partition("/")
    return kind.removeprefix("torch-").removeprefix("older-"), configuration


def targets_of(row: str) -> list[str]:
    """Returns the configurations that load a row, its own first."""
    kind, configuration = parts_of(row)
    own = [configuration] if configuration in CONFIGURATIONS else []
    others = TARGETS[configuration.partition("/")[0]]
    return own + [each for each in others if each not in own and can_keep(kind, each)]


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns a matrix of few numbers, of which the file takes little, and a vector."""
    rows, columns = SHAPES[0]
    few = numbers(2 * seed, 2 * columns).view(2, columns).repeat(rows // 2, 1)
    sizes = 2.0 ** -(torch.arange(rows) // 16)
    return [(few * sizes[:, None]).to(dtype), numbers(2 * seed + 1, *SHAPES[1]).to(dtype)]


def plan_of(row: str, configuration: str, path: Path | None = None) -> Saved:
    """Returns what a run does that begins anew, or goes on from a file of the row."""
    kind, _ = parts_of(row)
    name, options = KINDS[kind]
    dtype = getattr(torch, configuration.partition("/")[0])
    steps = range(STEPS_BEFORE) if path is None else range(10, 10 + STEPS_AFTER)
    return {
        "optimizer": name,
        "options": {"lr": 2.0**-6, **options, **CONFIGURATIONS.get(configuration, {})},
        "dtype": configuration.partition("/")[0],
        "params": tensors(0, dtype),
        "grads": [tensors(1 + step, dtype) for step in steps],
        "file": None if path is None else str(path),
    }


def run_in_python(plan: Saved, library: Any = amp_ext.optim) -> Saved:
    """Does what a plan says; returns the checkpoint and, of ours, the states in float32."""
    saved = None if plan["file"] is None else torch.load(plan["file"], weights_only=True)
    dtype = getattr(torch, plan["dtype"])
    params = [Parameter(param.to(dtype)) for param in (plan if saved is None else saved)["params"]]
    optimizer = getattr(library, plan["optimizer"])(params, **plan["options"])
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for grads in plan["grads"]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    written = {"params": [param.detach() for param in params], "optimizer": optimizer.state_dict()}
    if library is amp_ext.optim:
        written[FLOAT32] = float32_state_dict(optimizer)
    return written


def hash_of(written: Saved) -> str:
    """Returns the hash of the parameters and states of a checkpoint."""
    done = Hash()
    done.add(*written["params"])
    for index, state in sorted(written["optimizer"]["state"].items()):
        for key, value in sorted(state.items()):
            done.add(index, key, value)
    return done.short()


def results_in_python(plan: Saved) -> tuple[str, str]:
    """Returns the hashes of what a plan writes and of its float32 states, or twice the error."""
    try:
        written = run_in_python(plan)
    except ValueError as error:
        return str(error), str(error)
    return hash_of(written), hash_of({"params": [], "optimizer": written[FLOAT32]})


# The archive.


@functools.cache
def results() -> dict[str, dict[str, str]]:
    """Returns by row and configuration a hash, or the text of a refusal."""
    return json.loads(RESULTS.read_text())


GROUPS = sorted({row.rpartition("/")[0] for row in results()}) if RESULTS.is_file() else []


def unpack(folder: Path) -> None:
    """Writes the files of the corpus: by writer, and below it by row."""
    with tarfile.open(CORPUS) as corpus:
        # Early releases of Python 3.10 and 3.11 have no filters, and ignore this attribute.
        corpus.extraction_filter = getattr(tarfile, "data_filter", None)
        corpus.extractall(folder)


def files_of(folder: Path, row: str, *writers: str) -> Iterator[Path]:
    """Yields the files of a row that these have written."""
    for writer in writers:
        path = folder / writer / f"{row}.pt"
        if path.is_file():
            yield path


def loads(group: str) -> Iterator[tuple[str, str, str]]:
    """Yields row, configuration and result of all rows of a kind and a dtype."""
    for row, found in results().items():
        if row.rpartition("/")[0] == group:
            for target in found.keys() - {FLOAT32}:
                yield row, target, found[target]


def add(folder: Path) -> None:
    """Writes into a folder the files that rows lack, and the results of what Python loads."""
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    older = [path.relative_to(folder / "python") for path in folder.glob("python/older-*/*/*.pt")]
    for row in [*ROWS, *ROWS_OF_TORCH, *sorted(str(path.with_suffix("")) for path in older)]:
        configuration = parts_of(row)[1]
        if row.startswith("torch-"):
            write_in_python(folder / "torch" / f"{row}.pt", row, configuration, torch.optim)
        elif not row.startswith("older-"):
            write_in_python(folder / "python" / f"{row}.pt", row, configuration, amp_ext.optim)
        known = found.setdefault(row, {})
        path = next(files_of(folder, row, "python", "torch"))
        for target in targets_of(row):
            if target in known:
                continue
            known[target], in_float32 = results_in_python(plan_of(row, target, path))
            known.setdefault(FLOAT32, in_float32)
    RESULTS.write_text(json.dumps(found, indent=0) + "\n")


def write_in_python(path: Path, row: str, configuration: str, library: Any) -> None:
    if path.exists():
        return
    plan = plan_of(row, configuration)
    if library is torch.optim:
        plan["options"] = {"lr": 2.0**-6, **KINDS[parts_of(row)[0]][1]}
    written = run_in_python(plan, library)
    written.pop(FLOAT32, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(written, path)


def main() -> int:
    """Adds to the corpus what it lacks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", action="store_true", required=True)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if CORPUS.is_file():
            unpack(folder)
        add(folder)
        with tarfile.open(CORPUS, "w:xz", preset=9) as corpus:
            for path in sorted(folder.rglob("*.pt")):
                corpus.add(path, path.relative_to(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
