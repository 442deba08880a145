"""Compares other packages' optimizers with ours, before and after we load their checkpoint.

Takes 20 steps with both optimizers, loads their checkpoint into ours, and takes 20 more. Reads the
rows of the table in docs/migration.md, and prints them again as measured here. The functions of
that page convert the checkpoints. Packages that are not installed are left out. The table was made
in an environment with::

    pip install torch==2.13.0 bitsandbytes==0.50.2 torch-optimi==0.3.3 flashoptim==0.1.4 \
        lion-pytorch==0.2.5 pytorch_optimizer==4.1.0 heavyball==3.2.1 deepspeed==0.19.8 ninja \
        timm==1.0.31
    pip install --no-deps torchao==0.18.0
    DS_ACCELERATOR=cpu PYTHONPATH=. python benchmarks/migrations.py
"""

from __future__ import annotations

import importlib
import io
import re
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import amp_ext

PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
SHAPE, STEPS = (64, 128), 20
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
# Maps a package to the module of its optimizers, and options that the table leaves out. The modules
# of timm and DeepSpeed have the name of the optimizer in theirs.
UNCOMPRESSED = {"quantize": False, "master_weight_bits": None, "fused": False}
PACKAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes": ("bitsandbytes.optim", {}),
    "torchao": ("torchao.optim", {}),
    "torch-optimi": ("optimi", {}),
    "flashoptim": ("flashoptim", UNCOMPRESSED),
    "lion-pytorch": ("lion_pytorch", {}),
    "pytorch_optimizer": ("pytorch_optimizer", {}),
    "timm": ("timm.optim.{}", {}),
    "heavyball": ("heavyball", {"compile_step": False}),
    "deepspeed": ("deepspeed.ops.{}", {}),
}


def functions_of_the_page() -> dict[str, Callable[[Any, str], Any]]:
    """Returns the functions of docs/migration.md that convert checkpoints, by name."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if re.search(r"^def of_(?!megatron)", block, re.MULTILINE):
            exec(block, found)  # trusted: code of our own documentation
    return found


def class_of(package: str, name: str) -> Any:
    """Imports a class of a package."""
    of_name = name.removeprefix("DeepSpeedCPU").lower()
    return getattr(importlib.import_module(PACKAGES[package][0].format(of_name)), name)


def call(cell: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options in a cell of the table, such as ``SGD(momentum=0.9)``."""
    name, _, options = cell.strip("`").partition("(")
    return name, eval(f"dict({options.removesuffix(')')})")  # trusted: our own documentation


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


def measured(package: str, their_cell: str, our_cell: str, file_cell: str) -> tuple[str, str]:
    """Returns relative distances of our parameter from theirs, as two cells of the table.

    The first cell is measured after 20 steps. Then our optimizer loads their checkpoint, and the
    second cell is measured after 20 more steps.
    """
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    (their_name, their_options), (our_name, our_options) = call(their_cell), call(our_cell)
    our_class = getattr(amp_ext.optim, our_name)

    def make(kind: Any, at: torch.Tensor, own: dict[str, Any]) -> tuple[torch.nn.Parameter, Any]:
        param = torch.nn.Parameter(at.clone())
        return param, kind([param], **OPTIONS | own)

    hidden = PACKAGES[package][1]
    param, theirs = make(class_of(package, their_name), start, hidden | their_options)
    middle = stepped(param, theirs, 0)
    first = apart(stepped(*make(our_class, start, our_options), 0), middle, start)
    if file_cell == "does not load":
        return first, ""
    file = through_a_file(theirs.state_dict())
    names = re.findall(r"`(\w+)`", file_cell.partition(";")[0])
    if file_cell.startswith("`of_"):
        file = functions_of_the_page()[names[0]](file, our_name)
    elif file_cell.startswith("delete"):
        for group in file["param_groups"]:
            for key in names:
                del group[key]
    loaded, ours = make(our_class, middle, our_options)
    ours.load_state_dict(file)
    if file_cell.endswith("set `weight_decay`"):
        ours.param_groups[0]["weight_decay"] = OPTIONS["weight_decay"]
    return first, apart(stepped(loaded, ours, STEPS), stepped(param, theirs, STEPS), middle)


def main() -> None:
    """Prints the rows of the table whose packages are installed."""
    heading = "| package | theirs | ours | its file | 20 steps | 20 more |"
    print(heading, "|---|---|---|---|---|---|", sep="\n")
    for line in PAGE.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]:
        package, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = package.partition(" ")[0]
        try:
            package = f"{name} {version(name)}"
        except PackageNotFoundError:
            print(f"{cells[0]}: {name} is not installed", file=sys.stderr)
            continue
        print("|", " | ".join([package, *cells[:3], *measured(name, *cells[:3])]), "|", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
