"""Compares other packages' optimizers with ours, before and after we load their checkpoint.

Takes 20 steps with both optimizers, loads their checkpoint into ours, and takes 20 more. The
functions of docs/migration.md convert the checkpoints, and the table of that page is printed.
Packages that are not installed are left out. The table was made in an environment with::

    pip install torch==2.13.0 bitsandbytes==0.50.2 torch-optimi==0.3.3 flashoptim==0.1.4 \
        lion-pytorch==0.2.5 pytorch_optimizer==4.1.0 heavyball==3.2.1 deepspeed==0.19.8 ninja
    pip install --no-deps torchao==0.18.0 timm==1.0.31
    DS_ACCELERATOR=cpu PYTHONPATH=. python benchmarks/migrations.py
"""

from __future__ import annotations

import importlib
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

import amp_ext

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
SHAPE, STEPS = (64, 128), 20
LOADS = "loads"
UNCOMPRESSED = {"quantize": False, "master_weight_bits": None, "fused": False}
MOMENTUM = {"momentum": 0.9}
DECOUPLED = {"decoupled_weight_decay": True}
IN_8_BITS = {"state_dtype": "8bit"}
OF_OPTIMI = {"betas": (0.9, 0.99), "eps": 1e-6}


class Row(NamedTuple):
    """One optimizer of another package, and the optimizer of ours that replaces it."""

    package: str  # name of the installed distribution
    theirs: str  # full name of their class
    ours: str  # name of our class
    file: str  # how to load: LOADS, "delete KEYS", "does not load", or a function's name
    their_options: Mapping[str, Any] = MappingProxyType({})
    our_options: Mapping[str, Any] = MappingProxyType({})


BNB, OPTIMI, FLASH = "bitsandbytes", "torch-optimi", "flashoptim"
PO, DELETE = "pytorch_optimizer", "delete caution, corrected_weight_decay, max_lr_snapshot"
ROWS = [
    Row(BNB, "bitsandbytes.optim.AdamW", "AdamW", "of_bitsandbytes"),
    Row(BNB, "bitsandbytes.optim.Adam", "AdamW", "of_bitsandbytes"),
    Row(BNB, "bitsandbytes.optim.AdamW8bit", "AdamW", "of_bitsandbytes", {}, IN_8_BITS),
    Row(BNB, "bitsandbytes.optim.Lion", "Lion", "of_bitsandbytes"),
    Row(BNB, "bitsandbytes.optim.Lion8bit", "Lion", "of_bitsandbytes", {}, IN_8_BITS),
    Row(BNB, "bitsandbytes.optim.SGD", "SGD", "of_bitsandbytes", MOMENTUM, MOMENTUM),
    Row(
        BNB, "bitsandbytes.optim.SGD8bit", "SGD", "of_bitsandbytes", MOMENTUM, MOMENTUM | IN_8_BITS
    ),
    Row("torchao", "torchao.optim.AdamW8bit", "AdamW", LOADS, {}, IN_8_BITS),
    Row("torchao", "torchao.optim.Adam8bit", "Adam", LOADS, {}, IN_8_BITS),
    Row("torchao", "torchao.optim.AdamW4bit", "AdamW", LOADS, {}, IN_8_BITS),
    Row("torchao", "torchao.optim.AdamWFp8", "AdamW", LOADS, {}, IN_8_BITS),
    Row(OPTIMI, "optimi.AdamW", "AdamW", "of_optimi", {}, OF_OPTIMI),
    Row(OPTIMI, "optimi.Adam", "Adam", "of_optimi", {}, OF_OPTIMI),
    Row(OPTIMI, "optimi.Lion", "Lion", "of_optimi"),
    Row(OPTIMI, "optimi.SGD", "SGD", "of_optimi", MOMENTUM, MOMENTUM),
    Row(
        OPTIMI,
        "optimi.SGD",
        "SGD",
        "of_optimi",
        MOMENTUM | {"decouple_wd": True},
        MOMENTUM | DECOUPLED,
    ),
    Row(FLASH, "flashoptim.FlashAdamW", "AdamW", "of_flashoptim", UNCOMPRESSED),
    Row(FLASH, "flashoptim.FlashAdam", "Adam", "of_flashoptim", UNCOMPRESSED),
    Row(FLASH, "flashoptim.FlashLion", "Lion", "of_flashoptim", UNCOMPRESSED),
    Row(FLASH, "flashoptim.FlashSGD", "SGD", "of_flashoptim", UNCOMPRESSED | MOMENTUM, MOMENTUM),
    Row(
        FLASH,
        "flashoptim.FlashSGDW",
        "SGD",
        "of_flashoptim",
        UNCOMPRESSED | MOMENTUM,
        MOMENTUM | DECOUPLED,
    ),
    Row("lion-pytorch", "lion_pytorch.Lion", "Lion", LOADS),
    Row(
        "lion-pytorch",
        "lion_pytorch.Lion",
        "Lion",
        "loads; then set weight_decay",
        {"weight_decay": 0.001, "decoupled_weight_decay": True},
    ),
    Row(PO, "pytorch_optimizer.Lion", "Lion", LOADS),
    Row(
        PO,
        "pytorch_optimizer.Lion",
        "Lion",
        LOADS,
        {"weight_decouple": False},
        {"decoupled_weight_decay": False},
    ),
    Row(
        PO,
        "pytorch_optimizer.Lion",
        "Lion",
        "delete fixed_decay; then set weight_decay",
        {"weight_decay": 0.001, "fixed_decay": True},
    ),
    Row(PO, "pytorch_optimizer.SGDW", "SGD", LOADS, MOMENTUM, MOMENTUM | DECOUPLED),
    Row("timm", "timm.optim.lion.Lion", "Lion", DELETE),
    Row("timm", "timm.optim.sgdw.SGDW", "SGD", DELETE, MOMENTUM, MOMENTUM | DECOUPLED),
    Row(
        "heavyball",
        "heavyball.AdamW",
        "AdamW",
        "does not load",
        {"compile_step": False, "betas": (0.9, 0.999), "eps": 0.1},
        {"eps": 0.0, "denominator_floor": 0.01},
    ),
    Row("deepspeed", "deepspeed.ops.adam.DeepSpeedCPUAdam", "AdamW", LOADS),
    Row(
        "deepspeed",
        "deepspeed.ops.lion.DeepSpeedCPULion",
        "Lion",
        LOADS,
        {},
        {"betas": (0.9, 0.999)},
    ),
]


def functions_of_the_page() -> dict[str, Callable[[Any, str], Any]]:
    """Returns the functions of docs/migration.md that convert checkpoints, by name."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if re.search(r"^def of_(?!megatron)", block, re.MULTILINE):
            exec(block, found)  # trusted: code of our own documentation
    return found


def class_of(path: str) -> Any:
    """Imports a class by its full name; imports timm's optimizers without the rest of timm."""
    if path.startswith("timm.") and "timm" not in sys.modules:
        spec = find_spec("timm")
        assert spec is not None
        for name, folders in (("timm", spec.submodule_search_locations), ("timm.models", [])):
            module = ModuleType(name)
            module.__path__ = folders
            module.group_parameters = None
            sys.modules[name] = module
    module_name, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module_name), name)


def stepped(param: torch.Tensor, optimizer: torch.optim.Optimizer, first: int) -> torch.Tensor:
    """Takes 20 steps, with random gradients of seeds from ``first`` on; returns the parameter."""
    for number in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(number)
        param.grad = torch.randn(SHAPE, generator=generator)
        optimizer.step()
    return param.detach().clone()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def apart(ours: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> str:
    distance = ((ours - theirs).norm() / (theirs - start).norm()).item()
    return f"{distance:.0e}" if distance else "0"


def measured(row: Row) -> tuple[str, str]:
    """Returns relative distances of our parameter from theirs, as two cells of the table.

    The first cell is measured after 20 steps. Then our optimizer loads their checkpoint, and the
    second cell is measured after 20 more steps.
    """
    options = {"lr": 1e-2, "weight_decay": 0.1}
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))

    def make(kind: Any, at: torch.Tensor, **own: Any) -> tuple[torch.nn.Parameter, Any]:
        param = torch.nn.Parameter(at.clone())
        return param, kind([param], **options | own)

    their_class, our_class = class_of(row.theirs), getattr(amp_ext.optim, row.ours)
    param, theirs = make(their_class, start, **row.their_options)
    middle = stepped(param, theirs, 0)
    first = apart(stepped(*make(our_class, start, **row.our_options), 0), middle, start)
    if "does not load" in row.file:
        return first, ""
    file = through_a_file(theirs.state_dict())
    converted = file
    if row.file.startswith("of_"):
        converted = functions_of_the_page()[row.file](file, row.ours)
    for key in re.findall(r"\w+_\w+|caution", row.file) if "delete" in row.file else []:
        for group in converted["param_groups"]:
            if key != "weight_decay":
                del group[key]
    loaded, ours = make(our_class, middle, **row.our_options)
    ours.load_state_dict(converted)
    if "set weight_decay" in row.file:
        ours.param_groups[0]["weight_decay"] = options["weight_decay"]
    return first, apart(stepped(loaded, ours, STEPS), stepped(param, theirs, STEPS), middle)


def shown(options: Mapping[str, Any]) -> str:
    without = {"compile_step", *UNCOMPRESSED}
    return ", ".join(f"{key}={value!r}" for key, value in options.items() if key not in without)


def lines() -> Iterator[str]:
    yield "| package | theirs | ours | its file | 20 steps | 20 more |"
    yield "|---|---|---|---|---|---|"
    for row in ROWS:
        try:
            package = f"{row.package} {version(row.package)}"
        except PackageNotFoundError:
            print(f"{row.theirs}: {row.package} is not installed", file=sys.stderr)
            continue
        file = re.sub(r"(\w*_\w+|\bcaution\b)", r"`\1`", row.file)
        theirs, ours = (
            f"`{name}({shown(options)})`" if shown(options) else f"`{name}`"
            for name, options in (
                (row.theirs.rpartition(".")[2], row.their_options),
                (row.ours, row.our_options),
            )
        )
        yield "| " + " | ".join([package, theirs, ours, file, *measured(row)]) + " |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in lines():
        print(line, flush=True)
