"""Checks that results are still bit-identical, by hashes of 50 steps of every optimizer.

    python scripts/hash_steps.py --check                    # compares with scripts/hash_steps.json
    python scripts/hash_steps.py --check --engines plain    # the plain CPU engine only
    python scripts/hash_steps.py --check --engines cuda --workers 8    # on a GPU
    python scripts/hash_steps.py --write                    # after an intended change
    python scripts/hash_steps.py --write --only 'edges/*'   # only cases with such names

A case combines an optimizer, dtypes and an option, or is about a scaler or an operation on
gradients. The data are integers times a power of two, the same everywhere. All engines (CPU
instruction sets, CUDA) give the same bits, so the file has one hash per case; all NaNs hash alike.
Only cases with a sum of squares have a second hash, because CUDA adds in another order.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".json")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harness.edge_numbers import edge_cases  # noqa: E402
from harness.engine_results import results_of  # noqa: E402
from harness.hashes import Hash, numbers  # noqa: E402
from harness.optimizer_cases import CLASSES  # noqa: E402

import amp_ext  # noqa: E402
from amp_ext import ops  # noqa: E402

STEPS = 50
SCALE = 2.0**10
SHAPES = ((1,), (37,), (1025,), (0,))
TRANSPOSED = (8, 6)  # shape of a further tensor, which is transposed in memory
LR = 2.0**-6
INF, NAN = float("inf"), float("nan")

# Environment variables of each engine, which a process chooses only once.
ENGINES = {
    "plain": {"AMP_EXT_CPU_ISA": "plain"},
    "avx2": {"AMP_EXT_CPU_ISA": "avx2"},
    "avx512": {"AMP_EXT_CPU_ISA": "avx512"},
    "emulated": {},
    "cuda": {},
}
CUDA_ENGINES = ("emulated", "cuda")

ADAM = {"betas": (0.8, 0.95), "eps": 1e-6}
OPTIMIZERS = {name.lower(): (name, dict[str, Any]()) for name in CLASSES} | {
    "adam": ("Adam", ADAM),
    "adam-amsgrad": ("Adam", ADAM | {"amsgrad": True}),
    "adamw": ("AdamW", ADAM),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "sgd-nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "sgd-dampening": ("SGD", {"momentum": 0.9, "dampening": 0.25}),
    "lion": ("Lion", {"betas": (0.8, 0.95)}),
    "lion-coupled": ("Lion", {"betas": (0.8, 0.95), "decoupled_weight_decay": False}),
}


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NO_MASTERS = {"master_weights": False}
TO_NEAREST = NO_MASTERS | {"rounding": "nearest"}
NARROW_STATES = {"state_dtype": torch.bfloat16}
AS_TORCH = {"master_weights": False, "state_dtype": None}
# Each entry has the dtypes of parameters and gradients, and options for masters and states.
DTYPES: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, F32, {}),
    "fp32-grads-fp16": (F32, F16, {}),
    "fp32-grads-bf16": (F32, BF16, {}),
    "fp64": (F64, F64, {}),
    "fp64-grads-fp32": (F64, F32, {}),
    "fp16-masters": (F16, F16, {}),
    "fp16-masters-states-fp16": (F16, F16, {"state_dtype": None}),
    "fp16-masters-grads-fp32": (F16, F32, {}),
    "fp16-states-fp32": (F16, F16, TO_NEAREST),
    "fp16-as-torch": (F16, F16, AS_TORCH),
    "bf16-masters": (BF16, BF16, {}),
    "bf16-masters-states-bf16": (BF16, BF16, {"state_dtype": None}),
    "bf16-masters-grads-fp32": (BF16, F32, {}),
    "bf16-states-fp32": (BF16, BF16, TO_NEAREST),
    "bf16-as-torch": (BF16, BF16, AS_TORCH),
    "fp32-states-bf16": (F32, F32, NARROW_STATES),
    "fp16-dithered": (F16, F16, AS_TORCH | {"rounding": "dither"}),
    "bf16-dithered": (BF16, BF16, NO_MASTERS | NARROW_STATES),
}


@dataclasses.dataclass(frozen=True)
class Option:
    """Arguments of the optimizer, and conditions under which it takes its steps.

    Attributes:
        arguments: Keyword arguments. Optimizers that lack one of them skip this case.
        scaled: Whether the steps run under a GradScaler; some of them overflow.
        bad_elements: Whether some gradients have inf and NaN: in every third step, or in every
            eleventh step under a scaler.
        tensor_lr: Whether the learning rate is a tensor that changes.
        groups: Whether the later parameters are in a group with its own options.
    """

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    scaled: bool = False
    bad_elements: bool = False
    tensor_lr: bool = False
    groups: bool = False


DECAY = {"weight_decay": 2.0**-4}
CLIPPED = {"max_grad_norm": 0.5, "clip_value": 2.0**-5}
WRITTEN = {"write_back_grads": True}
OPTIONS = {
    "plain": Option(),
    "weight-decay": Option(DECAY),
    "decoupled": Option(DECAY | {"decoupled_weight_decay": True}),
    "maximize": Option(DECAY | {"maximize": True}),
    "scaler": Option(scaled=True),
    "max-grad-norm": Option({"max_grad_norm": 0.5}),
    "max-grad-norm-scaler": Option({"max_grad_norm": 0.5}, scaled=True),
    "clip-value": Option({"clip_value": 2.0**-5}),
    "skip-nonfinite": Option({"skip_nonfinite": True}, bad_elements=True),
    "skip-nonfinite-clipped": Option(CLIPPED | {"skip_nonfinite": True}, bad_elements=True),
    "bad-elements": Option(bad_elements=True),
    "denominator-floor": Option({"denominator_floor": 2.0**-8}),
    "tensor-lr": Option(DECAY, tensor_lr=True),
    "write-back": Option(CLIPPED | WRITTEN, scaled=True),
    "groups": Option(groups=True),
    "everything": Option(
        DECAY | CLIPPED | WRITTEN | {"maximize": True, "skip_nonfinite": True},
        scaled=True,
        bad_elements=True,
        tensor_lr=True,
        groups=True,
    ),
}

SCALERS: dict[str, dict[str, Any]] = {
    "default": {},
    "growth": {"growth_interval": 3, "growth_factor": 4.0},
    "odd-factors": {"growth_interval": 2, "growth_factor": 1.7, "backoff_factor": 0.3},
    "hysteresis": {"growth_interval": 3, "hysteresis": 3},
    "limits": {"growth_interval": 2, "min_scale": 2.0**9, "max_scale": 1.5 * SCALE},
    "static": {"dynamic": False, "growth_interval": 2},
    "everything": {
        "growth_interval": 2,
        "hysteresis": 2,
        "min_scale": 2.0**9,
        "max_scale": 2.0**12,
    },
}

GRADIENT_OPERATIONS = ("unscale_", "check_finite_", "count_nonfinite")
GRADIENT_OPERATIONS += ("clip_grad_norm_1", "clip_grad_norm_1e+06")

# Maps a name to the inf and NaN that are written into the gradients of an operation.
BAD_NUMBERS: dict[str, tuple[float, ...]] = {"finite": (), "inf": (INF,), "nan": (NAN, -INF)}


def tensors(seed: int, dtype: torch.dtype, factor: float, device: str) -> list[Tensor]:
    """Returns tensors of unusual sizes, one of them transposed in memory."""
    shapes = [*SHAPES, TRANSPOSED]
    made = []
    for index, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        values = (numbers(10 * seed + index, count) * factor).to(dtype).to(device)
        transposed = shape == TRANSPOSED
        made.append(values.view(shape[::-1]).t() if transposed else values.view(shape))
    return made


def set_bad_elements(grads: list[Tensor], values: tuple[float, ...]) -> None:
    """Writes values into the third gradient, at elements that are 511 apart."""
    for index, value in enumerate(values):
        grads[2][5 + 511 * index] = value


def hash_of_steps(optimizer: str, dtypes: str, option: Option, device: str) -> str:
    """Takes the steps of a case; returns the hash of parameters, states and other results."""
    class_name, own = OPTIMIZERS[optimizer]
    param_dtype, grad_dtype, of_dtypes = DTYPES[dtypes]
    params = [torch.nn.Parameter(param) for param in tensors(1, param_dtype, 1.0, device)]
    arguments = {"lr": LR, **own, **of_dtypes, **option.arguments}
    if option.tensor_lr:
        arguments["lr"] = torch.tensor(LR, device=device)
    groups: list[Any] = [{"params": params}]
    if option.groups:
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 2 * LR, "weight_decay": 0.1}]
    stepped = getattr(amp_ext.optim, class_name)(groups, **arguments)
    scaler = amp_ext.GradScaler(
        device, init_scale=SCALE, growth_interval=7, enabled=option.scaled, hysteresis=2
    )
    done = Hash()
    for step in range(STEPS):
        scale = scaler.scale(torch.ones((), device=device)).item()
        grads = tensors(2 + step, grad_dtype, 2.0**-3 * scale, device)
        # Fewer under a scaler, which skips all of these steps.
        if option.bad_elements and step % (11 if option.scaled else 3) == 1:
            set_bad_elements(grads, (INF, NAN))
        if option.scaled and step in (4, 17, 18, 40):
            set_bad_elements(grads, (INF,))
        for param, grad in zip(params, grads, strict=True):
            param.grad_dtype = grad_dtype
            param.grad = grad
        if option.tensor_lr:
            arguments["lr"].fill_(LR * (1 + step % 3))
        scaler.step(stepped)
        scaler.update()
        if "max_grad_norm" in option.arguments:
            done.add(stepped.grad_norm)
        if "write_back_grads" in option.arguments:
            done.add(*grads)
    done.add(*params)
    for param in params:
        done.add(*(value for _, value in sorted(stepped.state[param].items())))
    return done.short()


def hash_of_scales(arguments: dict[str, Any], device: str) -> str:
    """Feeds a scaler a fixed sequence of overflows; returns the hash of its scales and states."""
    arguments = {"init_scale": SCALE, "warn_after": 1000} | arguments
    scaler = amp_ext.GradScaler(device, **arguments)
    param = torch.nn.Parameter(torch.zeros(3, device=device))
    optimizer = amp_ext.optim.SGD([param], lr=LR)
    overflows = (numbers(3, 4 * STEPS) < -0.75).tolist()
    done = Hash()
    for overflow in overflows:
        scaler.scale(torch.ones((), device=device))
        param.grad = torch.full((3,), INF if overflow else 1.0, device=device)
        scaler.step(optimizer)
        scaler.update()
        done.add(scaler.get_scale(), sorted(scaler.state_dict().items()))
    done.add(param)
    return done.short()


def hash_of_operations(dtype: torch.dtype, bad: tuple[float, ...], device: str) -> dict[str, str]:
    """Returns a dict from each operation on gradients to the hash of its results."""

    def grads() -> list[Tensor]:
        made = tensors(5, dtype, 16.0, device)
        set_bad_elements(made, bad)
        return made

    def zero(of: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=of, device=device)

    def hash_of(*values: Tensor) -> str:
        done = Hash()
        done.add(*values)
        return done.short()

    hashes = {}
    found_inf, first = zero(F32), torch.full((), 2**62, dtype=torch.int64, device=device)
    written = grads()
    ops.unscale_(written, torch.tensor(0.3, device=device), found_inf, first_nonfinite=first)
    hashes["unscale_"] = hash_of(*written, found_inf, first)

    found_inf, sum_of_squares = zero(F32), zero(F64)
    first.fill_(2**62)
    ops.check_finite_(grads(), found_inf, sum_of_squares=sum_of_squares, first_nonfinite=first)
    hashes["check_finite_"] = hash_of(found_inf, sum_of_squares, first)
    hashes["count_nonfinite"] = hash_of(ops.count_nonfinite(grads()))

    for max_norm in (1.0, 1e6):
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads()]
        for param, grad in zip(params, grads(), strict=True):
            param.grad = grad
        norm = amp_ext.clip_grad_norm_(params, max_norm)
        hashes[f"clip_grad_norm_{max_norm:g}"] = hash_of(norm, *(param.grad for param in params))
    return hashes


def hash_of_results(name: str, case: Callable[[torch.device], Any], device: str) -> str:
    """Returns the hash of the results of a test case."""
    done = Hash()
    for key, tensor in sorted(results_of(name, case, torch.device(device)).items()):
        done.add(key, tensor)
    return done.short()


def all_cases(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the name of every case, and a function that computes its hash."""
    for optimizer, (class_name, _) in OPTIMIZERS.items():
        known = inspect.signature(getattr(amp_ext.optim, class_name)).parameters
        for dtypes in DTYPES:
            for option_name, option in OPTIONS.items():
                if all(name in known for name in option.arguments):
                    name = f"{optimizer}/{dtypes}/{option_name}"
                    yield name, functools.partial(hash_of_steps, optimizer, dtypes, option, device)
    for name, arguments in SCALERS.items():
        yield f"GradScaler/{name}", functools.partial(hash_of_scales, arguments, device)
    for dtype in (F16, BF16, F32, F64):
        for name, bad in BAD_NUMBERS.items():
            # The function is cached, because one call computes the hashes of all operations.
            hashes = functools.cache(functools.partial(hash_of_operations, dtype, bad, device))
            for operation in GRADIENT_OPERATIONS:
                case = f"{operation}/{str(dtype).removeprefix('torch.')}/{name}"
                yield case, functools.partial(lambda run, key: run()[key], hashes, operation)
    for name, case in edge_cases():
        yield name, functools.partial(hash_of_results, name, case, device)


def all_hashes(device: str, only: str, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Returns the hashes of every ``parts``-th case among the cases that match ``only``."""
    cases = [each for each in all_cases(device) if fnmatch.fnmatchcase(each[0], only)]
    return {name: compute() for name, compute in cases[part::parts]}


def depends_on_a_sum(name: str) -> bool:
    """Returns whether the bits of a case depend on the order of a sum of squares."""
    operation, *_, option = name.split("/")
    if operation.startswith(("check_finite_", "clip_grad_norm_")):
        return True
    return option in OPTIONS and "max_grad_norm" in OPTIONS[option].arguments


@contextlib.contextmanager
def kernels_of(engine: str) -> Iterator[str]:
    """Makes the operations use the kernels of an engine; yields the device for its tensors."""
    if engine == "emulated":
        from conftest import emulated_cuda

        with emulated_cuda():
            yield "cpu"
    else:
        yield "cuda" if engine == "cuda" else "cpu"


def hashes_of(engine: str, only: str, workers: int = 1) -> dict[str, str]:
    """Returns the hashes of an engine, computed by ``workers`` processes in parallel."""
    command = [sys.executable, __file__, "--print", engine, "--only", only]
    processes = [
        subprocess.Popen(
            [*command, "--part", f"{part}/{workers}"],
            env=os.environ | ENGINES[engine],
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(workers)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{engine}: a process failed")
    return {name: value for text in printed for name, value in json.loads(text).items()}


def report(engine: str, hashes: dict[str, str], expected: dict[str, str]) -> int:
    """Prints the cases of an engine that differ from the expected hashes; returns their number."""
    rows = {
        "moved": [name for name in hashes if expected.get(name, hashes[name]) != hashes[name]],
        "new": [name for name in hashes if name not in expected],
        "gone": [name for name in expected if name not in hashes],
    }
    for what, names in rows.items():
        for name in names:
            print(f"{engine}: {what}: {name}")
    print(f"{engine}: {len(hashes)} cases, {', '.join(f'{len(n)} {w}' for w, n in rows.items())}")
    return sum(len(names) for names in rows.values())


def expected_of(found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the file's content: hashes of the first engine, and hashes of CUDA that differ."""
    first, *rest = found.items()
    different = {
        name: value
        for engine, hashes in rest
        if engine in CUDA_ENGINES
        for name, value in hashes.items()
        if value != first[1][name] and depends_on_a_sum(name)
    }
    return {"all": first[1], "cuda": different}


def main() -> int:
    """Checks or writes the file of hashes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file (default)")
    parser.add_argument("--write", action="store_true", help="write the file, of all engines")
    parser.add_argument("--print", choices=ENGINES, help="print the hashes of one engine as JSON")
    parser.add_argument(
        "--engines", default="plain,avx2,avx512,emulated", help="separated by commas"
    )
    parser.add_argument("--only", default="*", help="cases whose names match this pattern")
    parser.add_argument("--part", default="0/1", help="print one of so many parts of the hashes")
    parser.add_argument("--workers", type=int, default=1, help="processes of an engine")
    arguments = parser.parse_args()
    only = arguments.only
    if arguments.print:
        part, parts = map(int, arguments.part.split("/"))
        with kernels_of(arguments.print) as device:
            print(json.dumps(all_hashes(device, only, part, parts)))
        return 0
    engines = arguments.engines.split(",")
    found = {engine: hashes_of(engine, only, arguments.workers) for engine in engines}
    known: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    expected = known
    if arguments.write:
        written = expected_of(found)
        expected = {
            part: written[part]
            if only == "*"
            else {n: h for n, h in known[part].items() if not fnmatch.fnmatchcase(n, only)}
            | written[part]
            for part in known
        }
    wrong = 0
    for engine, hashes in found.items():
        others = expected["cuda"] if engine in CUDA_ENGINES else {}
        wanted = {
            n: h for n, h in (expected["all"] | others).items() if fnmatch.fnmatchcase(n, only)
        }
        wrong += report(engine, hashes, wanted)
    if arguments.write:
        FILE.write_text(json.dumps(expected, indent=0) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
