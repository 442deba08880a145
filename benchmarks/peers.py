"""Times AdamW of amp_ext and of other packages.

python benchmarks/peers.py --quick                  # large tensors and the smallest model
python benchmarks/peers.py --out results/peers      # figures, table and picture go there
python benchmarks/peers.py --device cuda --seconds 150 --out results/peers    # on a GPU

Compares with the installed packages among DeepSpeed (CPU), flashoptim (GPU), bitsandbytes, torchao,
optimi and heavyball. `make bench-peers` installs all of them. The output files are rewritten after
each row, so an interrupted run keeps its results.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import (
    CPU,
    add_files,
    buffered,
    digits,
    label_of,
    make_parser,
    markdown_rows,
    new_result,
    notes,
    reason,
    run_and_store,
)
from torch.nn import Parameter

from amp_ext.bench import (
    OPTIONS,
    Program,
    ShapeList,
    Work,
    make_params,
    make_program,
    make_streaming,
    measure_row,
    row_name,
    scaled,
    uniform,
)

# Work that other packages can do, too: float32 parameters (FP32), and bf16 parameters with float32
# states (WIDE), bf16 states (NARROW), or float32 masters and states (MASTER).
FP32, WIDE, NARROW, MASTER = BESIDE_PEERS = [
    Work("AdamW fp32"),
    Work("AdamW bf16 + 32-bit states"),
    Work("AdamW bf16 + 16-bit states"),
    Work("AdamW bf16 + master"),
]

# Work in little memory: bf16 parameters with split masters, 10 or 7 bytes per parameter in all
# (SPLIT, SPLIT8), and float32 parameters with 8-bit moments.
SPLIT, SPLIT8, FP32_8BIT = LOW_MEMORY = [
    Work("AdamW bf16 + split + bf16 states"),
    Work("AdamW bf16 + split8 + 8bit states"),
    Work("AdamW fp32 + 8bit states"),
]

KINDS = {work.name: work for work in (*BESIDE_PEERS, *LOW_MEMORY)}

NOTE = (
    "Times of a step, each the least of runs in turns in one process, and how many times as long "
    "as ours that is. Per element, with the share of the streaming bandwidth that ours reaches by "
    "the bytes that it cannot avoid; small models per step. ≈: not the same work, for it keeps "
    'less, or loses the decay by rounding. "in float32" is our step with float32 masters and '
    "moments."
)


@dataclass(frozen=True)
class Peer:
    """A package that has an AdamW of its own.

    Attributes:
        distribution: The name of the package for pip.
        module: The name of the module to import.
        optimizer: The name of the package's optimizer in that module.
        does: The work of ``BESIDE_PEERS`` and ``LOW_MEMORY`` that the package does exactly.
        differs: The work that the package does with less precision, such as in 8 bits or without
            masters.
        options: Returns the options of the optimizer for a kind of work, besides ``ADAMW``.
        devices: The device types on which the package runs.
    """

    distribution: str
    module: str
    optimizer: str
    does: Sequence[Work]
    differs: Sequence[Work] = field(default=())
    options: Callable[[Work], dict[str, Any]] = lambda work: {}
    devices: Sequence[str] = ("cpu", "cuda")

    def make(self, params: list[Parameter], work: Work) -> torch.optim.Optimizer:
        """Returns the package's optimizer."""
        optimizer = getattr(importlib.import_module(self.module), self.optimizer)
        return optimizer(params, **ADAMW, **self.options(work))


ADAMW = OPTIONS["AdamW"]  # hyperparameters of all packages
PEERS = {
    "DeepSpeed": Peer(
        "deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam",
        BESIDE_PEERS,  # with MASTER, copies to and from masters, as DeepSpeed's engine does
        options=lambda work: {"fp32_optimizer_states": work.state_dtype is not None},
        devices=["cpu"],
    ),
    "flashoptim": Peer(
        "flashoptim", "flashoptim", "FlashAdamW", [FP32, NARROW, *LOW_MEMORY],
        options=lambda work: {
            "quantize": work.state_dtype == "8bit",
            "master_weight_bits": {"split": 32, "split8": 24}.get(work.masters),
        },
        devices=["cuda"],
    ),
    "bitsandbytes": Peer("bitsandbytes", "bitsandbytes.optim", "AdamW", [FP32, WIDE]),
    "torchao": Peer(
        "torchao", "torchao.optim", "_AdamW", [FP32, NARROW],
        [MASTER],  # uses stochastic rounding instead of a master
        lambda work: {"bf16_stochastic_round": work.masters is True},
    ),
    "optimi": Peer(
        "torch-optimi", "optimi", "AdamW", [FP32, NARROW],
        [MASTER],  # uses Kahan summation in bf16 instead of a master
        lambda work: {"kahan_sum": work.masters is True},
    ),
    "heavyball": Peer(
        "heavyball", "heavyball", "AdamW", [FP32],
        [NARROW],  # uses stochastic rounding
        lambda work: {
            "storage_dtype": str(work.state_dtype or torch.bfloat16).removeprefix("torch."),
            "consume_grad": False,
        },
    ),
    "bnb 8-bit": Peer(
        "bitsandbytes", "bitsandbytes.optim", "AdamW8bit", [FP32_8BIT], [NARROW]
    ),
    "torchao 8-bit": Peer(
        "torchao", "torchao.optim", "AdamW8bit", [FP32_8BIT],
        [NARROW, SPLIT8],  # uses stochastic rounding instead of a master
        lambda work: {"bf16_stochastic_round": work.masters == "split8"},
    ),
}  # fmt: skip


def find(peer: Peer) -> tuple[str, str | None]:
    """Imports a package; returns its version, and why the import fails, or None if it works."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would search for other devices
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # worker processes disturb timing
    try:
        with contextlib.redirect_stdout(sys.stderr):  # keeps its messages out of the table
            importlib.import_module(peer.module)
        return importlib.metadata.version(peer.distribution), None
    except Exception as error:
        return "", reason(error)


def sides_of(work: Work, device: torch.device = CPU) -> list[str]:
    """Returns the sides (implementations) of amp_ext and torch that do a kind of work."""
    if work in LOW_MEMORY:
        return ["ours", "in_float32"]
    if work.masters is True:
        return ["ours", "by_hand", "buffered"]
    is_wide = work.dtype != torch.float32 and work.state_dtype is not None
    # torch's default on a GPU is foreach, which is a side already.
    by_default = ["default"] if device.type == "cpu" else []
    return ["ours"] if is_wide else ["ours", "fused", "foreach", *by_default]


def program_of(side: str, work: Work, params: list[Parameter]) -> Program:
    """Makes the timed program of one side: amp_ext's, torch's or another package's."""
    if side not in PEERS and side != "buffered":
        return make_program(side, work, params)
    stepped, peer = params, PEERS.get(side)
    in_loop = work.masters is True and side in ("buffered", "DeepSpeed")
    if in_loop:
        stepped = [Parameter(param.detach().float()) for param in params]
    if peer is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(stepped, **ADAMW, fused=True)
    else:
        optimizer = peer.make(stepped, work)
    step = scaled(work, stepped, optimizer)
    return Program(params, optimizer, buffered(params, stepped, step) if in_loop else step)


def differs(side: str, work: Work) -> bool:
    """Returns whether a side does other work, or the same with more roundings.

    Each operation of torch's loops and of optimi rounds to bfloat16, in which
    ``1 - lr * weight_decay`` is 1, so that the decay is lost.
    """
    loops = work == NARROW and side in ("foreach", "default", "optimi")
    return loops or (side in PEERS and work not in PEERS[side].does)


# Timing.


def small_model(layers: int, width: int) -> ShapeList:
    """Returns the shapes of ``layers`` linear layers of one width, with weights and biases."""
    return ShapeList(f"{layers} layers of {width}", ((width, width), (width,)) * layers, True)


def choose_rows(quick: bool, device: torch.device = CPU) -> list[tuple[Work, ShapeList]]:
    """Returns the rows: pairs of work and shapes."""
    if device.type == "cuda":  # the most important rows first, because time may run out
        large, many, small = uniform(4, 16_000_000), uniform(600, 100_000), small_model(10, 256)
        rows = [(work, large) for work in (SPLIT8, FP32, MASTER, FP32_8BIT, SPLIT)]
        if not quick:
            rows += [(work, many) for work in (SPLIT8, FP32, MASTER)]
            rows += [(work, large) for work in (NARROW, WIDE)]
            rows += [(work, small) for work in (FP32, MASTER)]
        return rows
    large, small = [uniform(4, 8_000_000), uniform(300, 100_000)], small_model(3, 128)
    if quick:
        return [(work, shapes) for shapes in (large[0], small) for work in BESIDE_PEERS]
    rows = [(work, shapes) for shapes in large for work in KINDS.values()]
    for shapes in [small, small_model(10, 256)]:
        rows += [(work, shapes) for work in BESIDE_PEERS]
        rows += [(Work(f"{work.name} + scaler"), shapes) for work in BESIDE_PEERS]
    return rows


def make_programs(
    work: Work,
    shapes: ShapeList,
    sides: list[str],
    device: torch.device,
    left_out: list[str],
) -> dict[str, Program]:
    """Makes the programs of all sides, and takes a step of each.

    If a package fails, its error is appended to ``left_out``.
    """
    programs = {}
    for side in sides:
        try:
            program = program_of(side, work, make_params(work, shapes, device))
            program.step()
            programs[side] = program
        except Exception as error:
            if side not in PEERS:
                raise
            left_out.append(f"{side} in {row_name(work, shapes)}: {reason(error)}")
    return programs


# Tables.


def markdown(result: dict[str, Any]) -> str:
    """Formats a note, a table with a column for each kind of work, and what was left out."""
    rows = result["rows"]
    kinds = list(dict.fromkeys(kind(row) for row in rows))
    sections: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        about = f"{row['shapes']}: {row['tensors']} tensors, {row['elements'] / 1e6:.3g}M elements"
        title = about + " + scaler" * ("scaler" in row["work"])
        for side in row["sides"]:
            sections.setdefault(title, {}).setdefault(side, {})[kind(row)] = cell(row, side)
    table = [["", *kinds]]
    for title, sides in sections.items():
        table.append([f"**{title}**", *("" for _ in kinds)])
        for side, texts in sides.items():
            table.append([label_of(side), *(texts.get(kind, "") for kind in kinds)])
    about = f"{'; '.join(result['surroundings'])}. {NOTE}"
    return "\n".join([about, "", *markdown_rows(table), "", *notes(result)])


def kind(row: dict[str, Any]) -> str:
    """Returns the kind of work of a row, which is the heading of its column."""
    return row["work"].replace(" + scaler", "")


def cell(row: dict[str, Any], side: str) -> str:
    """Formats the time of a side, with its ratio to ours."""
    figures = row["sides"][side]
    time = f"{digits(1e9 * figures['seconds'] / row['elements'])} ns"
    if row["many_small"]:
        time = f"{digits(1e6 * figures['seconds'])} µs"
    if side == "ours":
        share = figures["share_of_streaming"]
        return f"{time} ({share:.0%})" if share else time
    return f"{time} · {digits(row['ratios'][side])}{' ≈' * (side in row['unequal'])}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the chosen rows, prints the table, and writes the files of ``--out``."""
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="large tensors, the smallest model")
    parser.add_argument("--filter", default="", help="regular expression on 'work, shapes'")
    add_files(parser, "peers")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows = [
        row
        for row in choose_rows(options.quick, device)
        if re.search(options.filter, row_name(*row), re.IGNORECASE)
    ]
    if not rows:
        parser.error(f"--filter {options.filter!r} matches no row")
    found = {side: find(peer) for side, peer in PEERS.items() if device.type in peer.devices}
    versions = {PEERS[side].distribution: v for side, (v, why) in found.items() if not why}
    result = new_result(device, rows=[])
    if versions:
        result["surroundings"].append(", ".join(map(" ".join, versions.items())))
    result["left_out"] += [f"{side}: {why}" for side, (_, why) in found.items() if why]
    streaming = make_streaming(device)

    def measure(work: Work, shapes: ShapeList) -> None:
        plain = KINDS[work.name.replace(" + scaler", "")]
        sides = sides_of(plain, device)
        for side, (_, why) in found.items():
            if not why and plain in (*PEERS[side].does, *PEERS[side].differs):
                sides.append(side)
        with contextlib.redirect_stdout(sys.stderr):
            programs = make_programs(work, shapes, sides, device, result["left_out"])
            row = measure_row(work, shapes, programs, streaming)
        unequal = [side for side in programs if differs(side, plain)]
        result["rows"].append({**row, "unequal": unequal})

    runs = ((row_name(*row), functools.partial(measure, *row)) for row in rows)
    return run_and_store("peers", options, result, runs, markdown)


if __name__ == "__main__":
    sys.exit(main())
