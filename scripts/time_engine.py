"""Times the kernels of the CPU engine alone: one thread, a tensor that stays in cache.

    python scripts/time_engine.py                  # of these sources, each instruction set
    python scripts/time_engine.py --against main   # beside those of a commit, in the same run

What is left is computing, without memory, threads and Python. Sources and instruction sets take
turns, many times, and the least time of each counts. It prints ns an element, and with --against
the time of the commit divided by the present one.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_suffix(".cpp")
ISAS = ("avx512", "avx2", "plain")
SECONDS = 2e-4  # of one measurement: shorter than the pauses of a busy machine are apart


@dataclasses.dataclass(frozen=True)
class Row:
    """An operation and the dtypes of its tensors, as ``time_engine`` in C++ names them."""

    name: str
    operation: str
    param: str = "float32"
    grad: str = "float32"
    buffer: str = "float32"
    master: str = ""
    option: str = ""


F16, BF16, F32, F64 = "float16", "bfloat16", "float32", "float64"
ROWS = [
    Row("AdamW fp32", "Adam2"),
    Row("AdamW fp16 + master", "Adam2", F16, F16, master=F32),
    Row("AdamW bf16 + master", "Adam2", BF16, BF16, master=F32),
    Row("AdamW bf16, fp32 states", "Adam2", BF16, BF16),
    Row("AdamW bf16, bf16 states", "Adam2", BF16, BF16, BF16),
    Row("AdamW fp64", "Adam2", F64, F64, F64),
    Row("AdamW fp32, skip_nonfinite", "Adam2", option="skip-nonfinite"),
    Row("AdamW bf16 + master, write back", "Adam2", BF16, BF16, master=F32, option="write-back"),
    Row("AMSGrad bf16, bf16 states", "Adam3", BF16, BF16, BF16),
    Row("AdamW bf16 + split", "Adam2", BF16, BF16, master="low16"),
    Row("AdamW bf16 + split, bf16 states", "Adam2", BF16, BF16, BF16, "low16", "dither"),
    Row("AdamW bf16 + split8, bf16 states", "Adam2", BF16, BF16, BF16, "low8", "dither"),
    Row("AdamW bf16, bf16 states, dithered", "Adam2", BF16, BF16, BF16, "", "dither"),
    Row(
        "AdamW bf16 + split, 8bit-bf16 states", "Adam2", BF16, BF16, "8bit-bf16", "low16", "dither"
    ),
    Row("AdamW bf16 + split, 8bit states", "Adam2", BF16, BF16, "8bit", "low16", "dither"),
    Row("SGD bf16 + split, 8bit momentum", "Sgd1", BF16, BF16, "8bit", "low16", "dither"),
    Row("Lion fp32", "Lion1"),
    Row("Lion bf16 + master", "Lion1", BF16, BF16, master=F32),
    Row("SGD momentum fp32", "Sgd1"),
    Row("SGD momentum bf16 + master", "Sgd1", BF16, BF16, master=F32),
    Row("SGD fp32", "Sgd0"),
    *(Row(f"look {grad}", "look", grad=grad) for grad in ("float32", F16, BF16)),
    *(Row(f"look with sums {grad}", "look-sums", grad=grad) for grad in ("float32", BF16)),
    *(Row(f"count {grad}", "count", grad=grad) for grad in ("float32", BF16)),
    *(Row(f"multiply {grad}", "multiply", grad=grad) for grad in ("float32", F16, BF16)),
]


def compiled(source: Path, folder: Path) -> ctypes.CDLL:
    """Returns the engine of a source tree as a library, compiled with the flags of the package."""
    flags = json.loads((ROOT / "amp_ext" / "_build_info.json").read_text())["flags"]["cxx"]
    engine = [path for path in source.glob("csrc/cpu/*.cpp") if path.name != "launcher.cpp"]
    objects = []
    running = []
    for path in (PROGRAM, *engine):
        objects.append(folder / f"{path.stem}.o")
        command = [os.environ.get("CXX", "g++"), *flags, "-std=c++17", "-fPIC"]
        command += [f"-I{source}/csrc", f"-I{source}/amp_ext/include"]
        running.append(subprocess.Popen([*command, "-c", path, "-o", objects[-1]]))
    if any(process.wait() for process in running):
        sys.exit("time_engine.py: the engine does not compile")
    library = folder / "engine.so"
    subprocess.run(["g++", "-shared", "-fopenmp", *objects, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.time_engine.restype = ctypes.c_double
    return loaded


def seconds(library: ctypes.CDLL, isa: str, row: Row, numel: int, calls: int) -> float:
    """Returns how long some calls take; negative if the library has no such instructions."""
    texts = (isa, row.operation, row.param, row.grad, row.buffer, row.master, row.option)
    return library.time_engine(
        *(text.encode() for text in texts),
        ctypes.c_int64(numel),
        ctypes.c_int64(calls),
    )


def main() -> None:
    """Compiles, times, and prints a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="times its sources beside these")
    parser.add_argument("--isas", default=",".join(ISAS), help="separated by commas")
    parser.add_argument("--rows", default="", help="those whose name holds this")
    parser.add_argument("--numel", type=int, default=2048, help="elements of the tensor")
    parser.add_argument("--rounds", type=int, default=100, help="measurements of each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = {"": ROOT}
        if arguments.against:
            sources[arguments.against] = Path(folder) / "against"
            sources[arguments.against].mkdir()
            archive = subprocess.run(
                ["git", "archive", arguments.against, "csrc", "amp_ext"],
                cwd=ROOT,
                stdout=-1,
                check=True,
            )
            unpack = ["tar", "-x", "-C", sources[arguments.against]]
            subprocess.run(unpack, input=archive.stdout, check=True)
        libraries = {}
        for index, (name, source) in enumerate(sources.items()):
            objects = Path(folder) / str(index)
            objects.mkdir()
            libraries[name] = compiled(source, objects)
        sides = [(isa, name) for isa in arguments.isas.split(",") for name in libraries]
        print(" | ".join(["ns an element", *(f"{isa} {name}".strip() for isa, name in sides)]))
        for row in ROWS:
            if arguments.rows not in row.name:
                continue
            best = dict.fromkeys(sides, math.inf)
            calls = dict.fromkeys(sides, 1)
            for isa, name in sides:  # warms up, too
                once = seconds(libraries[name], isa, row, arguments.numel, 10) / 10
                calls[isa, name] = max(1, int(SECONDS / abs(once)))
                if once < 0:
                    best[isa, name] = math.nan
            for _ in range(arguments.rounds):
                for side in sides:
                    taken = seconds(libraries[side[1]], side[0], row, arguments.numel, calls[side])
                    best[side] = min(best[side], taken / calls[side] / arguments.numel * 1e9)
            cells = []
            for isa, name in sides:
                cells.append(f"{best[isa, name]:.3f}")
                if name:
                    cells[-1] += f" ({best[isa, name] / best[isa, '']:.2f})"
            print(" | ".join([row.name, *cells]), flush=True)


if __name__ == "__main__":
    main()
