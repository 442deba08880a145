"""Times AdamW beside other packages' on the CPU, after it has compared what each does with float64.

python benchmarks/peers.py --quick                  # large tensors and the smallest model
python benchmarks/peers.py --out results/peers      # figures, table and picture go there

What is installed takes part: of DeepSpeed, bitsandbytes, torchao and optimi (`make bench-peers`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import math
import os
import re
import sys
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_ext.bench.measure import describe, make_streaming, measure_row, run_times
from amp_ext.bench.steps import OPTIONS, Program, Step, make_params, make_program, scaled
from amp_ext.bench.work import SIDES, ShapeList, Work, row_name, uniform
from amp_ext.program import run_program

CPU = torch.device("cpu")
SWEEP_ELEMENTS = 16_000_000  # float32: 64 MB, more than the caches of a few cores

# Everything that a step of AdamW may keep for bf16 parameters.
FP32, WIDE, NARROW, MASTER = BESIDE_PEERS = [
    Work("AdamW", torch.float32),
    Work("AdamW", torch.bfloat16, masters=False),
    Work("AdamW", torch.bfloat16, masters=False, state_dtype=None),
    Work("AdamW", torch.bfloat16),
]

NOTE = (
    "Times of a step, each the least of runs in turns in one process, and how many times as long "
    "as ours that is. Per element, with the share of the streaming bandwidth that ours reaches by "
    "the bytes that it cannot avoid; small models per step. Cold caches: 64 MB are read before "
    "each step, uncounted. ≈: not the same work, for it keeps less, or after 50 steps its way is "
    "farther off float64 than rounding explains (off: as a share of the way)."
)


@dataclass(frozen=True)
class Peer:
    """A package with an optimizer of its own.

    Attributes:
        distribution: What pip calls it.
        module: What Python calls it.
        make: Makes its optimizer of the module, the parameters and the work.
        does: What of ``BESIDE_PEERS`` it does as it is asked.
        differs: What it does with less than was asked for: in 8 bits, or without a master.
    """

    distribution: str
    module: str
    make: Callable[..., torch.optim.Optimizer]
    does: Sequence[Work] = ()
    differs: Sequence[Work] = field(default=())


ADAMW = OPTIONS["AdamW"]  # the same for everybody
PEERS = {
    "DeepSpeed": Peer(
        "deepspeed",
        "deepspeed.ops.adam",
        lambda module, params, work: module.DeepSpeedCPUAdam(
            params, **ADAMW, fp32_optimizer_states=work.state_dtype is not None
        ),
        BESIDE_PEERS,  # the last in the loop around masters that its engine has
    ),
    "bitsandbytes": Peer(
        "bitsandbytes",
        "bitsandbytes",
        lambda module, params, work: module.optim.AdamW(params, **ADAMW),
        [FP32, WIDE],
    ),
    "torchao": Peer(
        "torchao",
        "torchao.optim",
        lambda module, params, work: module._AdamW(
            params, **ADAMW, bf16_stochastic_round=work.has_masters
        ),
        [FP32, NARROW],
        [MASTER],  # rounds at random
    ),
    "optimi": Peer(
        "torch-optimi",
        "optimi",
        lambda module, params, work: module.AdamW(params, **ADAMW, kahan_sum=work.has_masters),
        [FP32, NARROW],
        [MASTER],  # a Kahan sum in bf16
    ),
    "bnb 8-bit": Peer(
        "bitsandbytes",
        "bitsandbytes",
        lambda module, params, work: module.optim.AdamW8bit(params, **ADAMW),
        differs=[FP32, NARROW],
    ),
    "torchao 8-bit": Peer(
        "torchao",
        "torchao.optim",
        lambda module, params, work: module.AdamW8bit(
            params, **ADAMW, bf16_stochastic_round=work.has_masters
        ),
        differs=[FP32, NARROW, MASTER],
    ),
}


def find(peer: Peer) -> tuple[str, str | None]:
    """Imports a peer; returns its version, and why it can't take part or None."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for others
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool beside the measurement
    try:
        importlib.import_module(peer.module)
        return importlib.metadata.version(peer.distribution), None
    except Exception as error:
        return "", reason(error)


def reason(error: BaseException | None) -> str:
    """Returns the first lines of an error and of what it came from."""
    texts = []
    while error is not None:
        line = str(error).strip().partition("\n")[0]
        texts.append(f"{type(error).__name__}: {line}" if line else type(error).__name__)
        error = error.__cause__
    return ", from ".join(texts)


def sides_of(work: Work) -> list[str]:
    """Returns who of us and torch does the same work, and in which ways."""
    if work.has_masters:
        return ["ours", "by_hand", "buffered"]
    is_wide = work.dtype != torch.float32 and work.state_dtype is not None
    return ["ours"] if is_wide else ["ours", "fused", "foreach", "default"]


def program_of(side: str, work: Work, params: list[Parameter]) -> Program:
    """Makes the program of one side: of ours, of torch's, or of a peer."""
    if side in SIDES:
        return make_program(side, work, params)
    stepped, peer = params, PEERS.get(side)
    in_loop = work.has_masters and side in ("buffered", "DeepSpeed")
    if in_loop:
        stepped = [Parameter(param.detach().float()) for param in params]
    if peer is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(stepped, **ADAMW, fused=True)
    else:
        optimizer = peer.make(importlib.import_module(peer.module), stepped, work)
    step = scaled(work, stepped, optimizer)
    return Program(params, optimizer, buffered(params, stepped, step) if in_loop else step)


def buffered(params: list[Parameter], masters: list[Parameter], step_masters: Step) -> Step:
    """Returns the loop around masters as quick as torch's Python interface allows."""
    for master in masters:
        master.grad = torch.empty_like(master)

    def step() -> None:
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        step_masters()
        torch._foreach_copy_([p.detach() for p in params], [m.detach() for m in masters])

    return step


# Whether a side does AdamW at all.

STEPS = 50
# The first is large enough for moments in 8 bits, the last is a multiple of no vector.
SHAPES = ShapeList("agreement", ((128, 128), (128,), (1_003,)))
SPREAD = 0.1  # of parameters: large enough that a missing weight decay shows, in 16 bits too

# How far the way of a parameter may lie from that in float64, as a share of it. Roundings to
# float32; to bf16 at the end; to bf16 in each step. A tenth of the weight decay, a rate that is
# 10 % off or a momentum of 0.95 are 6 to 18 %.
TOLERANCES = {FP32: 1e-4, MASTER: 0.005, WIDE: 0.035, NARROW: 0.035}


def deviation(side: str, work: Work) -> float:
    """Returns how far a side's parameters come to lie from float64, as a share of their way."""
    program = program_of(side, work, make_params(work, SHAPES, CPU, SPREAD))
    starts = [param.detach().double() for param in program.params]
    for step in range(STEPS):
        for param, grad in zip(program.params, gradients(step, work.dtype), strict=True):
            param.grad.copy_(grad)  # anew in each step, for some write into it
        program.step()
    ends, shares = reference(work.dtype), []
    for param, start, end in zip(program.params, starts, ends, strict=True):
        shares.append(((param.detach() - end).norm() / (end - start).norm()).item())
    if not all(map(math.isfinite, shares)):
        raise ValueError("its parameters become inf or NaN")
    return max(shares)


@functools.cache
def reference(dtype: torch.dtype) -> list[Tensor]:
    """Returns where torch's AdamW in float64 leads from the same start."""
    start = make_params(Work("AdamW", dtype), SHAPES, CPU, SPREAD)
    params = [Parameter(param.detach().double()) for param in start]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    for step in range(STEPS):
        for param, grad in zip(params, gradients(step, dtype), strict=True):
            param.grad = grad.double()
        optimizer.step()
    return [param.detach() for param in params]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns the random gradients of a step."""
    generator = torch.Generator().manual_seed(step)
    return [(1e-2 * torch.randn(size, generator=generator)).to(dtype) for size in SHAPES.sizes]


def compare(side: str, work: Work) -> dict[str, Any]:
    """Compares a side with float64.

    Returns:
        Its ``deviation``; ``same``: whether it does what the work asks for; and ``why`` it can't be
        measured, or None.
    """
    plain = replace(work, scaler=False)
    row: dict[str, Any] = {"work": work.name, "side": side, "why": None}
    try:
        far = deviation(side, work)
    except Exception as error:
        if side not in PEERS:
            raise
        return row | {"why": reason(error)}
    does = side not in PEERS or plain in PEERS[side].does
    return row | {"deviation": far, "same": does and far <= TOLERANCES[plain]}


# What is timed.


def small_model(layers: int, width: int) -> ShapeList:
    """Returns some linear layers of one width, each with a weight and a bias."""
    return ShapeList(f"{layers} layers of {width}", ((width, width), (width,)) * layers, True)


def choose_rows(quick: bool) -> list[tuple[Work, ShapeList, bool]]:
    """Returns some work on some parameters, and whether the caches are emptied before each step."""
    large, small = [uniform(4, 8_000_000), uniform(300, 100_000)], [small_model(3, 128)]
    if quick:
        return [(work, shapes, False) for shapes in (large[0], small[0]) for work in BESIDE_PEERS]
    rows = [(work, shapes, False) for shapes in large for work in BESIDE_PEERS]
    for shapes in [*small, small_model(10, 256)]:
        cold = replace(shapes, name=f"{shapes.name}, cold caches")
        rows += [(work, shapes, False) for work in BESIDE_PEERS]
        rows += [(replace(work, scaler=True), shapes, False) for work in BESIDE_PEERS]
        rows += [(work, cold, True) for work in BESIDE_PEERS]
    return rows


def cold_times(step: Step, sweep: Step, seconds: float) -> list[float]:
    """Returns the seconds of single steps, each after a sweep of the caches that is not counted."""
    times: list[float] = []
    end = timeit.default_timer() + seconds
    while not times or timeit.default_timer() < end:
        sweep()
        start = timeit.default_timer()
        step()
        times.append(timeit.default_timer() - start)
    return times


def measure_all(rows: list[tuple[Work, ShapeList, bool]], seconds: float) -> dict[str, Any]:
    """Compares and times all sides of some rows.

    Returns:
        ``surroundings``, ``methods`` from :func:`compare`, ``rows`` from ``measure_row``, with the
        sides whose work is not the same in ``unequal``, and who is ``left_out``.
    """
    about, found = describe(CPU), {side: find(peer) for side, peer in PEERS.items()}
    versions = {
        PEERS[side].distribution: version for side, (version, why) in found.items() if not why
    }
    about += [", ".join(f"{name} {version}" for name, version in versions.items())] * bool(versions)
    left_out = [f"{side}: {why}" for side, (_, why) in found.items() if why]
    methods: dict[Work, list[dict[str, Any]]] = {}
    for work in dict.fromkeys(work for work, *_ in rows):
        plain, sides = replace(work, scaler=False), sides_of(work)
        sides += [
            side
            for side, peer in PEERS.items()
            if not found[side][1] and plain in (*peer.does, *peer.differs)
        ]
        print(f"{work.name}, beside float64", file=sys.stderr)
        methods[work] = [compare(side, work) for side in sides]
        left_out += [f"{m['side']} in {work.name}: {m['why']}" for m in methods[work] if m["why"]]
    streaming, sweep, measured = make_streaming(CPU), torch.ones(SWEEP_ELEMENTS), []
    for work, shapes, cold in rows:
        name = row_name(work, shapes)
        print(name, file=sys.stderr)
        programs = {}
        for method in methods[work]:
            side = method["side"]
            try:
                if not method["why"]:
                    program = program_of(side, work, make_params(work, shapes, CPU))
                    program.step()
                    programs[side] = program
            except Exception as error:
                if side not in PEERS:
                    raise
                left_out.append(f"{side} in {name}: {reason(error)}")
        run = functools.partial(run_times, seconds=seconds)
        if cold:
            run = functools.partial(cold_times, sweep=sweep.sum, seconds=seconds)
        row = measure_row(work, shapes, programs, streaming, run)
        unequal = [m["side"] for m in methods[work] if m["side"] in programs and not m["same"]]
        measured.append({**row, "unequal": unequal})
    every = [method for compared in methods.values() for method in compared]
    return {"surroundings": about, "methods": every, "rows": measured, "left_out": left_out}


# How it is shown.


def markdown(result: dict[str, Any]) -> str:
    """Returns a paragraph, a table with a column for each kind of work, and who is absent."""
    rows = result["rows"]
    kinds = list(dict.fromkeys(kind(row) for row in rows))
    sections: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        about = f"{row['shapes']}: {row['tensors']} tensors, {row['elements'] / 1e6:.3g}M elements"
        title = about + " + scaler" * ("scaler" in row["work"])
        for side in row["sides"]:
            sections.setdefault(title, {}).setdefault(side, {})[kind(row)] = cell(row, side)
    for method in result["methods"]:
        if not method["why"]:
            text = f"{method['deviation']:.1g} off{' ≈' * (not method['same'])}"
            distances = sections.setdefault("Distance from float64", {})
            distances.setdefault(method["side"], {}).setdefault(kind(method), text)
    lines = [f"{'; '.join(result['surroundings'])}. {NOTE}", ""]
    lines += ["| | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for title, sides in sections.items():
        lines.append(f"| **{title}** |" + " |" * len(kinds))
        for side, texts in sides.items():
            cells = " | ".join(texts.get(kind, "") for kind in kinds)
            lines.append(f"| {SIDES.get(side, side)} | {cells} |")
    return "\n".join([*lines, "", *(f"* left out: {line}" for line in result["left_out"])])


def kind(row: dict[str, Any]) -> str:
    """Returns the column of a row."""
    return row["work"].replace(" + scaler", "")


def cell(row: dict[str, Any], side: str) -> str:
    """Returns the time of a side, beside ours."""
    figures = row["sides"][side]
    time = f"{digits(figures['ns_per_element'])} ns"
    if row["many_small"]:
        time = f"{digits(1e6 * figures['seconds'])} µs"
    if side == "ours":
        share = figures["share_of_streaming"]
        return f"{time} ({share:.0%})" if share else time
    return f"{time} · {digits(row['ratios'][side])}{' ≈' * (side in row['unequal'])}"


def digits(value: float) -> str:
    """Returns a positive number with three digits, or all before the point."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes the files that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="large tensors, the smallest model")
    parser.add_argument("--filter", default="", help="regular expression on 'work, shapes'")
    parser.add_argument("--out", type=Path, help="takes peers.json, peers.md and peers.png")
    options = parser.parse_args(arguments)
    rows = [
        row
        for row in choose_rows(options.quick)
        if re.search(options.filter, row_name(*row[:2]), re.IGNORECASE)
    ]
    if not rows:
        parser.error(f"--filter {options.filter!r} matches no row")
    with contextlib.redirect_stdout(sys.stderr):  # packages talk, and tables may go to a file
        result = measure_all(rows, 0.05 if options.quick else 0.15)
    print(markdown(result))
    if options.out:
        from plot import draw

        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "peers.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "peers.md").write_text(markdown(result) + "\n")
        draw(result, options.out / "peers.png")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
