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
from typing import Any

import torch

import amp_ext

ELEMENTS = 2**28
SMALL = 2**25

# Maps the name of a row to the parameter dtype, the options of the optimizer, and the bytes that a
# step moves per element.
FORMS: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "bf16, split8 masters, 8bit": (
        torch.bfloat16,
        {"master_weights": "split8", "state_dtype": "8bit"},
        12.06,
    ),
    "bf16, split masters, bf16 states": (
        torch.bfloat16,
        {"master_weights": "split", "state_dtype": torch.bfloat16},
        18,
    ),
    "bf16, no masters, bf16 states": (
        torch.bfloat16,
        {"master_weights": False, "state_dtype": torch.bfloat16},
        14,
    ),
    "bf16, float32 masters": (torch.bfloat16, {}, 28),
    "fp32, 8bit": (torch.float32, {"state_dtype": "8bit"}, 16.06),
    "bf16, split masters, 8bit-bf16": (
        torch.bfloat16,
        {"master_weights": "split", "state_dtype": "8bit-bf16"},
        16,
    ),
    "bf16, split masters, float32 states": (torch.bfloat16, {"master_weights": "split"}, 26),
    "fp32": (torch.float32, {}, 28),
    "fp16, float32 masters": (torch.float16, {}, 28),
    "fp16, split8 masters, 8bit": (
        torch.float16,
        {"master_weights": "split8", "state_dtype": "8bit"},
        12.06,
    ),
    "Lion bf16, split8 masters, 8bit": (
        torch.bfloat16,
        {"master_weights": "split8", "state_dtype": "8bit"},
        10.06,
    ),
    "SGD bf16, split8 masters, 8bit": (
        torch.bfloat16,
        {"master_weights": "split8", "state_dtype": "8bit"},
        10.06,
    ),
    "SGD bf16, split masters, bf16 states": (
        torch.bfloat16,
        {"master_weights": "split", "state_dtype": torch.bfloat16},
        14,
    ),
}
OF_ADAM = [name for name in FORMS if not name.startswith(("Lion", "SGD"))]
UNUSUAL = OF_ADAM[:3]


def optimizer_of(form: str, params: list[torch.Tensor]) -> amp_ext.optim.FusedOptimizer:
    """Returns an optimizer of ``params`` with the options of a row of ``FORMS``."""
    _, options, _ = FORMS[form]
    name = form.split()[0] if form.startswith(("Lion", "SGD")) else "AdamW"
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(amp_ext.optim, name)(params, lr=1e-3, **options, **momentum)


def drawn(form: str, *shape: int) -> torch.nn.Parameter:
    """Returns a random parameter with a gradient, in the dtype of a row of ``FORMS``."""
    dtype = FORMS[form][0]
    param = torch.nn.Parameter((torch.randn(shape, device="cuda") * 0.02).to(dtype))
    param.grad = (torch.randn(shape, device="cuda") * 1e-3).to(dtype)
    return param


def copy() -> tuple[Callable[[], Any], int]:
    source = torch.randn(ELEMENTS, device="cuda")
    return functools.partial(torch.empty_like(source).copy_, source), ELEMENTS


def whole(form: str) -> tuple[Callable[[], Any], int]:
    return optimizer_of(form, [drawn(form, ELEMENTS)]).step, ELEMENTS


def rows_without_gradients(form: str, steps: int, pruned: bool) -> tuple[Callable[[], Any], int]:
    """Makes a step of an embedding; every second row has had no gradient for ``steps`` steps.

    The moments of these rows have decayed to tiny values. If ``pruned``, their weights are 0, too.
    """
    param = drawn(form, SMALL // 1024, 1024)
    optimizer = optimizer_of(form, [param])
    for _ in range(20):
        optimizer.step()
    assert param.grad is not None
    param.grad[::2] = 0.0
    for _ in range(steps):
        if pruned:
            with torch.no_grad():
                param[::2] = 0.0
        optimizer.step()
    return optimizer.step, SMALL


def misaligned(form: str) -> tuple[Callable[[], Any], int]:
    """Makes a step of a parameter whose memory begins one element after a 16-byte boundary."""
    values = drawn(form, SMALL + 1)
    param = torch.nn.Parameter(values.detach()[1:])
    param.grad = torch.randn(SMALL, device="cuda").mul_(1e-3).to(param.dtype)
    return optimizer_of(form, [param]).step, SMALL


def many(form: str) -> tuple[Callable[[], Any], int]:
    return optimizer_of(form, [drawn(form, 64) for _ in range(1000)]).step, 64_000


def cases() -> Iterator[tuple[str, Callable[[], tuple[Callable[[], Any], int]]]]:
    """Yields for each row its name and a function that returns a step and its element count."""
    for form in FORMS:
        yield form, lambda form=form: whole(form)
    for form in UNUSUAL:
        yield f"{form}: dead rows", lambda form=form: rows_without_gradients(form, 2000, False)
        yield f"{form}: pruned", lambda form=form: rows_without_gradients(form, 2000, True)
        yield f"{form}: misaligned", lambda form=form: misaligned(form)
        yield f"{form}: 1,000 of 64", lambda form=form: many(form)


def least_time(step: Callable[[], Any], seconds: float) -> float:
    """Returns the least milliseconds per step; CUDA events time groups of steps."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def group(steps: int) -> float:
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / steps

    group(3)
    once = group(3)
    steps = max(1, min(50, int(20 / once)))
    groups = max(3, int(seconds * 1e3 / (once * steps)))
    return min(group(steps) for _ in range(groups))


def measure(seconds: float) -> dict[str, float]:
    """Returns the least milliseconds of each row, and of a copy of ELEMENTS float32 values."""
    found = {}
    for name, make in [("copy", copy), *cases()]:
        torch.manual_seed(0)
        step, elements = make()
        found[name] = least_time(step, seconds)
        print(f"{name}: {found[name]:.4f} ms, {elements} elements", file=sys.stderr, flush=True)
        del step
        torch.cuda.empty_cache()
    return found


def main() -> int:
    """Measures fast and general kernels in turns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=0.25, help="for each row and turn")
    parser.add_argument("--side", action="store_true", help="measures one side and prints JSON")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.seconds)))
        return 0
    best: dict[str, dict[str, float]] = {"fast": {}, "general": {}}
    for _ in range(arguments.rounds):
        for side, value in (("fast", "1"), ("general", "0")):
            done = subprocess.run(
                [sys.executable, __file__, "--side", "--seconds", str(arguments.seconds)],
                env=os.environ | {"AMP_EXT_CUDA_FAST_PATH": value},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for name, time in json.loads(done.stdout).items():
                best[side][name] = min(time, best[side].get(name, time))
    copied = 8 * ELEMENTS / min(side["copy"] for side in best.values())
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {amp_ext.__version__}"
    print(f"{about}; a copy moves {copied / 1e6:.0f} GB/s")
    print(f"{'':50s}{'general, ms':>12s}{'fast, ms':>10s}{'ratio':>7s}{'of a copy':>11s}")
    for name, fast in best["fast"].items():
        if name == "copy":
            continue
        general = best["general"][name]
        bytes_moved = FORMS[name][2] * ELEMENTS if name in FORMS else None
        share = f"{bytes_moved / fast / copied:10.0%}" if bytes_moved else ""
        print(f"{name:50s}{general:12.4f}{fast:10.4f}{fast / general:7.2f}{share:>11s}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "milliseconds": best}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
