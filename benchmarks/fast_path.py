"""Times optimizer steps on a GPU with the fast-path kernels and with the general kernels.

    python benchmarks/fast_path.py --json results/fast_path.json

Rows with unusual values show the fallback to the general code. The two kinds of kernels run in
separate processes, in turns, because a process reads AMP_EXT_CUDA_FAST_PATH only once. Each row
shows the least time of a step of AdamW, or of the optimizer that the row names, and its bandwidth
relative to a copy.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn import Parameter

import amp_ext
from amp_ext.bench import Program, Step, Work, bytes_of, run_times
from amp_ext.text_table import format_table

ELEMENTS = 2**28
SMALL = 2**25
FORMS = [
    "AdamW bf16 + split8 + 8bit states",
    "AdamW bf16 + split + bf16 states",
    "AdamW bf16 + bf16 states",
    "AdamW bf16 + master",
    "AdamW fp32 + 8bit states",
    "AdamW bf16 + split + 8bit-bf16 states",
    "AdamW bf16 + split",
    "AdamW fp32",
    "AdamW fp16 + master",
    "AdamW fp16 + split8 + 8bit states",
    "Lion bf16 + split8 + 8bit states",
    "SGD bf16 + split8 + 8bit states",
    "SGD bf16 + split + bf16 states",
]
UNUSUAL = FORMS[:3]
Case = tuple[Step, float | None]  # a step, and the bytes that it moves if they are known


def program_of(form: str, *params: Parameter, **more: bool) -> Program:
    """Returns the step of an optimizer that a row of ``FORMS`` names."""
    work = Work(form)
    options = {"master_weights": work.masters, "state_dtype": work.state_dtype}
    options |= {"momentum": 0.9} if work.optimizer == "SGD" else {}
    optimizer = getattr(amp_ext.optim, work.optimizer)(params, lr=1e-3, **options, **more)
    return Program(list(params), optimizer, optimizer.step)


def drawn(form: str, *shape: int) -> Parameter:
    """Returns a random parameter with a gradient, in the dtype of a row of ``FORMS``."""
    dtype = Work(form).dtype
    param = Parameter((torch.randn(shape, device="cuda") * 0.02).to(dtype))
    param.grad = (torch.randn(shape, device="cuda") * 1e-3).to(dtype)
    return param


def copy() -> Case:
    source = torch.randn(ELEMENTS, device="cuda")
    return functools.partial(torch.empty_like(source).copy_, source), 2.0 * source.nbytes


def whole(form: str, **more: bool) -> Case:
    program = program_of(form, drawn(form, ELEMENTS // 1024, 1024), **more)
    program.step()  # creates the states
    return program.step, bytes_of(Work(form), program)[1] * ELEMENTS


def rows_without_gradients(form: str, pruned: bool, steps: int = 2000) -> Case:
    """Makes a step of an embedding; every second row has had no gradient for ``steps`` steps.

    The moments of these rows have decayed to tiny values. If ``pruned``, their weights are 0, too.
    """
    param = drawn(form, SMALL // 1024, 1024)
    program = program_of(form, param)
    for _ in range(20):
        program.step()
    assert param.grad is not None
    param.grad[::2] = 0.0
    for _ in range(steps):
        if pruned:
            param.data[::2] = 0.0
        program.step()
    return program.step, None


def misaligned(form: str) -> Case:
    """Makes a step of a parameter whose memory begins one element after a 16-byte boundary."""
    param = Parameter(drawn(form, SMALL + 1).detach()[1:])
    param.grad = torch.randn(SMALL, device="cuda").mul_(1e-3).to(param.dtype)
    return program_of(form, param).step, None


def many(form: str) -> Case:
    return program_of(form, *(drawn(form, 64) for _ in range(1000))).step, None


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yields for each row its name and a function that returns a step."""
    yield "copy", copy
    for form in FORMS:
        yield form, functools.partial(whole, form)
    for form in UNUSUAL:
        yield f"{form}: cautious", functools.partial(whole, form, cautious_weight_decay=True)
        yield f"{form}: dead rows", functools.partial(rows_without_gradients, form, False)
        yield f"{form}: pruned", functools.partial(rows_without_gradients, form, True)
        yield f"{form}: misaligned", functools.partial(misaligned, form)
        yield f"{form}: 1,000 of 64", functools.partial(many, form)


def measure(seconds: float) -> dict[str, tuple[float, float | None]]:
    """Returns the least milliseconds of each row, and the bytes that it moves if they are known."""
    found = {}
    for name, make in cases():
        torch.manual_seed(0)
        step, moved = make()
        found[name] = (1e3 * min(run_times(step, seconds)), moved)
        print(f"{name}: {found[name][0]:.4f} ms", file=sys.stderr, flush=True)
        del step
        torch.cuda.empty_cache()
    return found


def main() -> int:
    """Measures fast and general kernels in turns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--seconds", type=float, default=0.25, help="for each row and turn")
    parser.add_argument("--side", action="store_true", help="measures one side and prints JSON")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.seconds)))
        return 0
    best: dict[str, dict[str, float]] = {"fast": {}, "general": {}}
    for side, value in 2 * [("fast", "1"), ("general", "0")]:
        done = subprocess.run(
            [sys.executable, __file__, "--side", "--seconds", str(arguments.seconds)],
            env=os.environ | {"AMP_EXT_CUDA_FAST_PATH": value},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        measured = json.loads(done.stdout)
        for name, (time, _) in measured.items():
            best[side][name] = min(time, best[side].get(name, time))
    copied = measured["copy"][1] / min(side["copy"] for side in best.values())
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {amp_ext.__version__}"
    print(f"{about}; a copy moves {copied / 1e6:.0f} GB/s")
    rows = [["", "general, ms", "fast, ms", "ratio", "of a copy"]]
    for name, (_, moved) in measured.items():
        fast, general = best["fast"][name], best["general"][name]
        share = f"{moved / fast / copied:.0%}" if moved else ""
        rows.append([name, f"{general:.4f}", f"{fast:.4f}", f"{fast / general:.2f}", share])
    print(format_table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "milliseconds": best}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
