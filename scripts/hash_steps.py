"""Checks that results are still bit-identical, by one hash for each kernel and number format.

    python scripts/hash_steps.py --check                    # compares with scripts/hash_steps.json
    python scripts/hash_steps.py --check --engines plain    # the plain CPU engine only
    python scripts/hash_steps.py --check --engines cuda --workers 8    # on a GPU
    python scripts/hash_steps.py --write                    # after an intended change
    python scripts/hash_steps.py --check --only 'adam fp16 *'    # only rows with such names

A row of steps is an optimizer kernel with the formats of parameter, gradient, master and states. It
takes 52 steps of tensors of awkward sizes, with another option in each step. Other rows take steps
over numbers at the edges of the formats, or are about the scaler and operations on gradients. The
data are integers times a power of two, the same everywhere. All engines (CPU instruction sets,
CUDA) must give the same bits; all NaNs hash alike.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".json")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harness.edge_numbers import edge_cases  # noqa: E402
from harness.engine_results import results_of  # noqa: E402
from harness.hashes import Hash, numbers  # noqa: E402
from harness.optimizer_cases import CLASSES  # noqa: E402

import amp_ext  # noqa: E402
from amp_ext import ops  # noqa: E402

# CPU instruction sets, which a process chooses only once, the emulator and a GPU.
ENGINES = ("plain", "avx2", "avx512", "emulated", "cuda")
# The second last shape is transposed in memory; the last one is large enough for 8-bit moments.
SHAPES = ((1,), (37,), (1025,), (0,), (8, 6), (131, 32))
SCALE, LR, INF, NAN = 2.0**10, 2.0**-6, float("inf"), float("nan")

BETAS = {"betas": (0.8, 0.95)}
DECAY = {"weight_decay": 2.0**-4}
CAUTIOUS = DECAY | {"decoupled_weight_decay": True, "cautious_weight_decay": True}
# The kernels of csrc/kernels.h by optimizer and options. AdamW has those of Adam.
KERNELS = {name.lower(): (name, dict[str, Any]()) for name in CLASSES if name != "AdamW"} | {
    "adam": ("Adam", BETAS | {"eps": 1e-6}),
    "adam cautious": ("Adam", BETAS | CAUTIOUS | {"eps": 1e-6}),
    "adam amsgrad": ("Adam", BETAS | {"eps": 1e-6, "amsgrad": True}),
    "lion": ("Lion", BETAS),
    "sgd momentum": ("SGD", {"momentum": 0.9}),
}
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAMES = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64"}
CODES = ("8bit-bf16", "8bit")
# Formats of states that a kernel lacks, or that are the same as another format.
ABSENT = {
    "adam amsgrad": CODES,
    "lion": CODES[:1],
    "sgd": (BF16, None, *CODES),
    "sgd momentum": CODES[:1],
}

# Each step has the next of these options. An optimizer leaves out the options that it lacks.
STEPS: list[dict[str, Any]] = [
    {},
    DECAY,
    DECAY | {"decoupled_weight_decay": True},
    DECAY | {"maximize": True},
    {"clip_value": 2.0**-5},
    {"max_grad_norm": 0.5},
    {"max_grad_norm": 0.5, "clip_value": 2.0**-5, "write_back_grads": True},
    {"skip_nonfinite": True},
    {"denominator_floor": 2.0**-8},
    {"nesterov": True},
    {"dampening": 0.25},
    {"rounding": "nearest"},
    {"write_back_grads": True, "maximize": True},
] * 4
OVERFLOWS = (4, 17, 18, 40)  # steps that the scaler skips
SCALERS: list[dict[str, Any]] = [
    {},
    {"growth_interval": 3, "growth_factor": 4.0},
    {"growth_interval": 2, "growth_factor": 1.7, "backoff_factor": 0.3},
    {"growth_interval": 3, "hysteresis": 3},
    {"growth_interval": 2, "min_scale": 2.0**9, "max_scale": 1.5 * SCALE},
    {"dynamic": False, "growth_interval": 2},
    {"growth_interval": 2, "hysteresis": 2, "min_scale": 2.0**9, "max_scale": 2.0**12},
]


def formats() -> Iterator[tuple[torch.dtype, torch.dtype, Any, Any]]:
    """Yields dtypes of parameter and gradient, and options of masters and states."""
    masters, states = (False, True, "split", "split8"), (F32, BF16)
    yield from itertools.product([F64], [F64, F32], [False], [F32])
    yield from itertools.product([F32], [F32, F16, BF16], [False], states)
    yield from itertools.product([F32], [F32], [False], CODES)
    for param in (F16, BF16):
        yield from itertools.product([param], [param, F32], masters, states)
        yield from itertools.product([param], [param], masters, CODES)
    yield from itertools.product([F16], [F16, F32], [False, True], [None])


def tensors(seed: int, dtype: torch.dtype, factor: float, bits: int = 23) -> list[Tensor]:
    """Returns tensors of awkward sizes, with integers of ``bits`` bits times a power of two.

    Sums of their squares are exact with few bits, so that they do not depend on the order.
    """
    made = []
    for index, shape in enumerate(SHAPES):
        values = numbers(10 * seed + index, torch.Size(shape).numel())
        values = ((values * 2**bits).round() * (factor / 2**bits)).to(dtype)
        made.append(values.view(shape[::-1]).t() if shape == (8, 6) else values.view(shape))
    return made


def spoil(grads: list[Tensor], *values: float) -> None:
    """Writes values into the third gradient, at elements that are 511 apart."""
    for index, value in enumerate(values):
        grads[2][5 + 511 * index] = value


def add_steps(done: Hash, device: str, kernel: str, format: tuple[Any, ...]) -> None:
    """Takes the steps of a kernel with its formats, every other one under a scaler."""
    name, own = KERNELS[kernel]
    param, grad, master, state = format
    params = [Parameter(each.to(device)) for each in tensors(1, param, 1.0)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 2 * LR}]
    options = {**own, "master_weights": master, "state_dtype": state}
    optimizer = getattr(amp_ext.optim, name)(groups, lr=LR, **options)
    usual = [dict(group) for group in optimizer.param_groups]
    scaler = amp_ext.GradScaler(device, init_scale=SCALE, growth_interval=7, hysteresis=2)
    for step, changed in enumerate(STEPS):
        for group, before in zip(optimizer.param_groups, usual, strict=True):
            known = {key: value for key, value in changed.items() if key in before}
            lr = before["lr"] * (1 + step % 3)
            lr = torch.tensor(lr, device=device) if step % 5 == 0 else lr
            group.update({key: before[key] for key in before if key != "params"})
            group.update(known, lr=lr)
        is_scaled = step % 2 == 0 or step in OVERFLOWS
        scale = scaler.scale(torch.ones((), device=device)).item() if is_scaled else 1.0
        grads = tensors(2 + step, grad, 2.0**-3 * scale, 4 if "max_grad_norm" in changed else 23)
        if step in OVERFLOWS:
            spoil(grads, INF)
        elif "skip_nonfinite" in changed or step == len(STEPS) - 1:
            spoil(grads, *((INF, NAN) if not is_scaled else ()))
        grads = [each.to(device) for each in grads]
        for each, its_grad in zip(params, grads, strict=True):
            each.grad_dtype = grad
            each.grad = its_grad
        if is_scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if "max_grad_norm" in changed:
            done.add(optimizer.grad_norm)
        if "write_back_grads" in changed:
            done.add(*grads)
    done.add(*params)
    for each in params:
        done.add(*(value for _, value in sorted(optimizer.state[each].items())))


def add_scales(done: Hash, device: str) -> None:
    """Feeds each scaler a fixed sequence of overflows, and hashes its scales and states."""
    for arguments in SCALERS:
        scaler = amp_ext.GradScaler(device, **{"init_scale": SCALE, "warn_after": 1000} | arguments)
        param = Parameter(torch.zeros(3, device=device))
        optimizer = amp_ext.optim.SGD([param], lr=LR)
        for overflow in (numbers(3, 200) < -0.75).tolist():
            scaler.scale(torch.ones((), device=device))
            param.grad = torch.full((3,), INF if overflow else 1.0, device=device)
            scaler.step(optimizer)
            scaler.update()
            done.add(scaler.get_scale(), sorted(scaler.state_dict().items()))
        done.add(param)


def add_operations(done: Hash, device: str, dtype: torch.dtype) -> None:
    """Hashes the results of the operations on gradients that are finite, or have inf and NaN."""
    for bad in ((), (INF,), (NAN, -INF)):

        def grads(bits: int, bad: tuple[float, ...] = bad) -> list[Tensor]:
            made = tensors(5, dtype, 16.0, bits)
            spoil(made, *bad)
            return [each.to(device) for each in made]

        found_inf, sum_of_squares = (torch.zeros((), dtype=d, device=device) for d in (F32, F64))
        first = torch.full((), 2**62, dtype=torch.int64, device=device)
        written, scale = grads(23), torch.tensor(0.3, device=device)
        ops.unscale_(written, scale, found_inf, first_nonfinite=first)
        done.add(*written, found_inf, first, ops.count_nonfinite(grads(23)))
        first.fill_(2**62)
        ops.check_finite_(
            grads(4), found_inf.zero_(), sum_of_squares=sum_of_squares, first_nonfinite=first
        )
        done.add(found_inf, sum_of_squares, first)
        for max_norm in (1.0, 1e6):
            params = [Parameter(torch.zeros_like(grad)) for grad in grads(4)]
            for param, grad in zip(params, grads(4), strict=True):
                param.grad = grad
            done.add(amp_ext.clip_grad_norm_(params, max_norm), *(param.grad for param in params))


def add_edges(done: Hash, device: str, cases: list[tuple[str, Callable[..., Any]]]) -> None:
    """Hashes steps over numbers at the edges of a format, with every setting."""
    for name, case in cases:
        for key, tensor in sorted(results_of(name, case, torch.device(device)).items()):
            done.add(key, tensor)


@functools.cache
def all_rows() -> dict[str, Callable[[Hash, str], None]]:
    """Returns a function that adds to a hash what an engine computes, by the name of a row."""
    rows: dict[str, Callable[[Hash, str], None]] = {"GradScaler": add_scales}
    for dtype, name in NAMES.items():
        rows[f"gradients {name}"] = functools.partial(add_operations, dtype=dtype)
    for kernel, each in itertools.product(KERNELS, formats()):
        if each[3] not in ABSENT.get(kernel, ()):
            name = " ".join(str(NAMES.get(part, part)) for part in (kernel, *each))
            rows[name] = functools.partial(add_steps, kernel=kernel, format=each)
    for form, cases in itertools.groupby(edge_cases(), lambda case: case[0].rpartition("/")[0]):
        rows[form] = functools.partial(add_edges, cases=list(cases))
    return rows


def hash_of(name: str, engine: str) -> str:
    """Returns the hash of a row. The process must have chosen the engine."""
    torch.set_num_threads(1)  # more threads gain nothing with such small tensors
    done = Hash()
    with contextlib.ExitStack() as stack:
        if engine == "emulated":
            from conftest import emulated_cuda

            stack.enter_context(emulated_cuda())
        all_rows()[name](done, "cuda" if engine == "cuda" else "cpu")
    return done.short()


def hashes_of(engine: str, names: list[str], workers: int) -> dict[str, str]:
    """Returns the hashes of an engine by the names of the rows, computed in new processes."""
    if engine in ("plain", "avx2", "avx512"):
        os.environ["AMP_EXT_CPU_ISA"] = engine
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        hashes = pool.map(functools.partial(hash_of, engine=engine), names, 4)
    os.environ.pop("AMP_EXT_CPU_ISA", None)
    return dict(zip(names, hashes, strict=True))


def main() -> int:
    """Checks or writes the file of hashes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file (default)")
    parser.add_argument("--write", action="store_true", help="write the file, of the first engine")
    parser.add_argument(
        "--engines", default="plain,avx2,avx512,emulated", help="separated by commas"
    )
    parser.add_argument("--only", default="*", help="rows whose names match this pattern")
    parser.add_argument("--workers", type=int, default=1, help="processes of an engine")
    arguments = parser.parse_args()
    names = fnmatch.filter(all_rows(), arguments.only)
    expected: dict[str, str] = json.loads(FILE.read_text())
    is_wrong = False
    for number, engine in enumerate(arguments.engines.split(",")):
        if engine not in ENGINES:
            parser.error(f"--engines: {engine} is not one of {', '.join(ENGINES)}")
        hashes = hashes_of(engine, names, arguments.workers)
        if arguments.write and number == 0:
            gone = set(fnmatch.filter(expected, arguments.only)) - hashes.keys()
            expected = {name: expected[name] for name in expected if name not in gone} | hashes
            FILE.write_text(json.dumps(expected, indent=0) + "\n")
        listed = fnmatch.filter(expected, arguments.only)
        rows = {
            "moved": [n for n in hashes if n in expected and hashes[n] != expected[n]],
            "new": [n for n in hashes if n not in expected],
            "gone": [n for n in listed if n not in hashes],
        }
        for what, moved in rows.items():
            print("".join(f"{engine}: {what}: {name}\n" for name in moved), end="")
        counts = ", ".join(f"{len(found)} {what}" for what, found in rows.items())
        print(f"{engine}: {len(hashes)} rows, {counts}", flush=True)
        is_wrong |= any(rows.values())
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
