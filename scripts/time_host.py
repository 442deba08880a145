"""Times host overhead and CPU kernels of this checkout against another commit, in one thread.

    python scripts/time_host.py --against main          # builds main once, in build/time_host/
    python scripts/time_host.py --installed FOLDER      # against an existing build in place
    python scripts/time_host.py --against main --quick --rows 'AdamW, 6 '
    AMP_EXT_CPU_ISA=avx2 python scripts/time_host.py --rows kernel      # another instruction set
    python scripts/time_host.py --rows kernel --elements 2048,16777216  # faster cache, main memory

Run `make build` first: the build in place of this checkout is timed. The rows are steps of AdamW,
also with bfloat16 parameters, and of SGD with momentum, on tensors of 64 elements: plain, with
`max_grad_norm`, and under our or torch's scaler (`scale`, `step` and `update`). Every step gets new
gradients, which are not timed. Other rows time
CPU kernels on one tensor of `--elements` (by default 2^18, which fits a cache).

Each commit runs in two processes, which take turns and are restarted many times. The least time of
each process counts. The column "itself" is the larger ratio between two processes of the same
commit: a smaller difference between the commits is noise.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter_ns
from timeit import timeit
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
F16, BF16 = torch.float16, torch.bfloat16
OPTIMIZERS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "AdamW": (torch.float32, {}),
    "AdamW bf16 + master": (BF16, {}),
    "AdamW bf16 + split": (BF16, {"master_weights": "split", "state_dtype": BF16}),
    "SGD": (torch.float32, {"momentum": 0.9}),
}
COUNTS = (2, 6, 20, 200, 1000)
FORMS = ("plain", "clipping", "our scaler", "torch's scaler")
ROWS = [
    f"{optimizer}, {count} tensors, {form}"
    for optimizer, count, form in product(OPTIMIZERS, COUNTS, FORMS)
]
NUMEL = 64  # elements of a parameter
IN_CACHE = 2**18  # elements
WIDTH = 128  # columns of the matrix that a kernel steps; only a matrix has 8-bit second moments
AS_LONG = 2**18  # least number of elements in one timing of a kernel, in one or several calls

OPERATIONS = ("check_finite_", "count_nonfinite", "unscale_")
KEPT = {"bf16 + split": "split", "bf16 + split8": "split8", "bf16": False}
NARROW = {"bf16": BF16, "8bit-bf16": "8bit-bf16", "8bit": "8bit"}
F32, MOMENTUM = torch.float32, {"momentum": 0.9}
# Maps a row that times a kernel to the dtype, an optimizer class or operation, and its options.
KERNELS: dict[str, tuple[torch.dtype, str, dict[str, Any]]] = {
    "AdamW fp32": (F32, "AdamW", {}),
    "AdamW fp64": (torch.float64, "AdamW", {}),
    "AdamW fp16 + master": (F16, "AdamW", {}),
    "AdamW bf16 + master": (BF16, "AdamW", {}),
    "AdamW bf16 + master, clipped": (BF16, "AdamW", {"max_grad_norm": 1.0}),
    "AMSGrad bf16 + master": (BF16, "AdamW", {"amsgrad": True}),
    **{
        f"AdamW {kept}, {states} states": (
            BF16,
            "AdamW",
            {"master_weights": KEPT[kept], "state_dtype": NARROW[states]},
        )
        for kept, states in product(KEPT, NARROW)
    },
    "AdamW fp32, 8bit states": (F32, "AdamW", {"state_dtype": "8bit"}),
    "SGD fp32": (F32, "SGD", {}),
    "SGD momentum fp32": (F32, "SGD", MOMENTUM),
    "SGD momentum bf16 + master, 8bit states": (BF16, "SGD", MOMENTUM | {"state_dtype": "8bit"}),
    "Lion fp32": (F32, "Lion", {}),
    "Lion bf16 + master": (BF16, "Lion", {}),
    **{
        f"{name} {dtype}": (dtype, name, {})
        for name, dtype in product(OPERATIONS, (F32, F16, BF16))
    },
}
SIDES = ("before", "after", "before again", "after again")


def make_kernel(row: str) -> Callable[[], float]:
    """Returns a function that runs the kernel of a row and returns the time in µs."""
    import amp_ext

    kernel, elements = row.removeprefix("kernel: ").split(" x ")
    dtype, name, options = KERNELS[kernel]
    param = torch.nn.Parameter(torch.ones(int(elements) // WIDTH, WIDTH, dtype=dtype))
    repeats = max(1, AS_LONG // int(elements))
    param.grad = torch.full_like(param, 0.5)
    if name in OPERATIONS:
        one, found_inf = torch.ones(()), torch.zeros(())
        operation = getattr(amp_ext.ops, name)
        arguments = {"check_finite_": [found_inf], "unscale_": [one, found_inf]}.get(name, [])
        timed = partial(operation, [param.grad], *arguments)
    else:
        timed = getattr(amp_ext.optim, name)([param], lr=1e-3, **options).step

    return lambda: timeit(timed, number=repeats) / repeats * 1e6


def make_step(row: str) -> Callable[[], float]:
    """Returns a function that takes the step of a row and returns the time in µs."""
    import amp_ext

    name, size, form = row.split(", ")
    dtype, options = OPTIMIZERS[name]
    params = [
        torch.nn.Parameter(torch.ones(NUMEL, dtype=dtype)) for _ in range(int(size.split()[0]))
    ]
    source = [torch.randn(NUMEL, dtype=dtype) for _ in params]
    if form == "clipping":
        options = {**options, "max_grad_norm": 1.0}
    optimizer = getattr(amp_ext.optim, name.split()[0])(params, lr=1e-3, **options)
    loss = torch.ones(())
    scaler_class = amp_ext.GradScaler if form == "our scaler" else torch.amp.GradScaler
    scaler = scaler_class("cpu", init_scale=1.0, growth_interval=2**30)

    def step() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    timed = step if "scaler" in form else optimizer.step

    def take() -> float:
        optimizer.zero_grad()
        for param, grad in zip(params, torch._foreach_add(source, 0.0), strict=True):
            param.grad = grad
        start = perf_counter_ns()
        timed()
        return (perf_counter_ns() - start) / 1e3

    return take


def serve() -> None:
    """Prints the folder of amp_ext; then reads rows from stdin and prints their microseconds."""
    torch.set_num_threads(1)
    import amp_ext

    print(Path(amp_ext.__file__).parent.parent, flush=True)
    steps: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        row = line.rstrip("\n")
        if row not in steps:
            is_kernel = row.startswith("kernel: ")
            steps[row] = make_kernel(row) if is_kernel else make_step(row)
            steps[row]()  # creates the optimizer states
        # Takes few steps at a time, because a busy machine interrupts long runs. One untimed step
        # refills the caches.
        tensors = 1 if row.startswith("kernel: ") else int(row.split(", ")[1].split()[0])
        times = [steps[row]() for _ in range(1 + max(2, 40 // tensors))][1:]
        print(sum(times) / len(times), flush=True)


def build(commit: str) -> Path:
    """Builds a commit in place, unless it is built already, and returns its folder."""
    name = subprocess.check_output(["git", "rev-parse", f"{commit}^0"], cwd=ROOT, text=True).strip()
    folder = ROOT / "build" / "time_host" / name
    if not (folder / "amp_ext" / "_build_info.json").is_file():  # the last file of a build
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            f"git archive {name} | tar -x -C '{folder}'", shell=True, cwd=ROOT, check=True
        )
        print(f"building {name[:12]} in {folder}", flush=True)
        with (folder / "build.log").open("w") as log:
            command = [sys.executable, "setup.py", "build_ext", "--inplace"]
            if subprocess.run(command, cwd=folder, stdout=log, stderr=log).returncode:
                sys.exit(f"time_host.py: {commit} does not build: {log.name}")
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    """Starts a process that runs :func:`serve` with the package in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--serve"]
    server = subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True)
    found = answer(server)
    if Path(found).resolve() != folder.resolve():
        sys.exit(f"time_host.py: amp_ext of {folder} was asked for, and {found} was imported")
    return server


def answer(server: subprocess.Popen[str], row: str = "") -> str:
    """Sends a row to a server, unless it is empty, and returns the next line of its output."""
    if row:
        server.stdin.write(f"{row}\n")
        server.stdin.flush()
    return server.stdout.readline().rstrip("\n") or sys.exit(
        "time_host.py: a package fails, see above"
    )


def measure(before: Path, rows: list[str], rounds: int, turns: int) -> dict[str, dict[str, float]]:
    """Returns for each row the least microseconds of each process, keyed by ``SIDES``.

    Each round starts new processes, which measure every row ``turns`` times.
    """
    best = {row: dict.fromkeys(SIDES, math.inf) for row in rows}
    for number in range(rounds):
        order = SIDES[number % 4 :] + SIDES[: number % 4]
        servers = {side: start(before if "before" in side else ROOT) for side in order}
        for row in rows * turns:
            for side, server in servers.items():
                best[row][side] = min(best[row][side], float(answer(server, row)))
        for server in servers.values():
            server.communicate()
    return best


def main() -> None:
    """Builds the other commit, times both sides, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", default="HEAD", help="builds and times it")
    parser.add_argument("--installed", metavar="FOLDER", type=Path, help="times this one instead")
    parser.add_argument("--rows", default="", help="regular expression that a row's name matches")
    parser.add_argument(
        "--elements", metavar="COUNTS", default=str(IN_CACHE), help="of the kernels' tensor: a,b,c"
    )
    parser.add_argument("--quick", action="store_true", help="one round of three turns")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve()
    sizes = [int(size) for size in arguments.elements.split(",")]
    kernels = [f"kernel: {name} x {size}" for size in sizes for name in KERNELS]
    rows = [row for row in [*ROWS, *kernels] if re.search(arguments.rows, row)]
    effort = (1, 3) if arguments.quick else (8, 6)
    times = measure(arguments.installed or build(arguments.against), rows, *effort)
    print("| µs a step | before | after | ratio | itself |\n|---|---|---|---|---|")
    for row, of_row in times.items():
        befores, afters = ([of_row[side], of_row[f"{side} again"]] for side in ("before", "after"))
        ratio = min(afters) / min(befores)
        itself = max(max(pair) / min(pair) for pair in (befores, afters))
        slower = " slower" if ratio > max(1.02, itself) else ""
        least = f"{min(befores):.1f} | {min(afters):.1f}"
        print(f"| {row} | {least} | {ratio:.3f}{slower} | {itself:.3f} |")


if __name__ == "__main__":
    main()
