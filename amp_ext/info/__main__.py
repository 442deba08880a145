"""The command line that shows how amp_ext is installed and whether it works.

python -m amp_ext.info            # versions, build, processor, GPUs, and problems
python -m amp_ext.info --check    # also compares a few real steps on each device with torch's
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import amp_ext
from amp_ext import ops
from amp_ext.binary import REBUILD, build_folder, build_info
from amp_ext.info.check import DTYPES, check, check_division

PACKAGE = Path(amp_ext.__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints facts about the installation and its problems; returns 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.info",
        description="Says what this amp_ext is, whether it works, and what to do if not.",
    )
    parser.add_argument("--check", action="store_true", help="takes real steps on each device")
    options = parser.parse_args(arguments)
    build = build_info()
    gpus = range(torch.cuda.device_count())
    capabilities = ["{}.{}".format(*torch.cuda.get_device_capability(index)) for index in gpus]
    problems = []
    try:
        instructions = ops.cpu_isa()
    except (ImportError, RuntimeError) as error:
        instructions, problems = "unknown", [str(error).splitlines()[0]]
    for label, text in _facts(build, instructions, capabilities):
        print(f"{label:<18}{text}")
    if capabilities and build and "cuda" not in build["backends"]:
        problems += ["this amp_ext was built without CUDA.", *_how_to_build_cuda()]
    if options.check and not problems:
        for device in ("cpu", *(f"cuda:{index}" for index in gpus)):
            problems += _check_device(torch.device(device))
    if any("no kernel image" in problem for problem in problems):
        listed = ";".join(sorted(set(capabilities)))
        problems.append(f"Rebuild amp_ext with TORCH_CUDA_ARCH_LIST='{listed}'.")
    if problems:
        print("\nProblem:", *problems, sep="\n    ")
        return 1
    loads = "It loads; --check takes real steps on each device."
    print(f"\n{'It works.' if options.check else loads}")
    return 0


def _facts(
    build: dict[str, Any], instructions: str, capabilities: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yields pairs of a label and a fact about the installation."""
    yield "amp_ext", f"{amp_ext.__version__} in {PACKAGE}"
    yield "torch", f"{torch.__version__}, {_with_cuda(torch.version.cuda)}"
    yield "Python", platform.python_version()
    library = build_folder() / "lib" / "libamp_ext.so"
    yield "library", str(library) if library.is_file() else "none that programs in C++ could link"
    if build:
        toolkit = f", CUDA toolkit {build['toolkit']}" if build["toolkit"] else ""
        built_for = f"for torch {build['torch']}, {_with_cuda(build['cuda'])}"
        yield "build", f"{built_for}, Python {build['python']}"
        yield "compiler", f"{build['compiler'] or 'unknown'}{toolkit}"
        yield "commit", build["git"] or "unknown"
        yield "backends", ", ".join([*build["backends"], *build["architectures"]])
    else:
        yield "build", "unknown: no _build_info.json lies beside the compiled module"
    variable = os.environ.get("AMP_EXT_CPU_ISA", "not set")
    counts = f"threads: {torch.get_num_threads()}, cores: {len(os.sched_getaffinity(0))}"
    yield "CPU", f"{instructions} (AMP_EXT_CPU_ISA {variable}), {counts}"
    for index, each in enumerate(capabilities):
        yield f"GPU {index}", f"{torch.cuda.get_device_name(index)}, compute capability {each}"
    if not capabilities:
        yield "GPU", "none that torch sees"


def _with_cuda(version: str | None) -> str:
    return f"CUDA {version}" if version else "without CUDA"


def _how_to_build_cuda() -> list[str]:
    """Returns the lines that setup.py and ``csrc/devices/dispatch.cpp`` print, too."""
    version = torch.version.cuda or ""
    install = f"To install nvcc: pip install 'cuda-toolkit[nvcc,nvvm,cccl]=={version}.*'"
    if version.startswith("12."):
        install = f"Install the toolkit of CUDA {version}, and set CUDA_HOME to its folder."
    return [install, f"To rebuild amp_ext: AMP_EXT_CUDA=1 {REBUILD}"]


def _check_device(device: torch.device) -> list[str]:
    """Takes real steps on a device, prints whether they work, and returns the problems."""
    told, problems = [], []
    for dtype in DTYPES:
        name, error = str(dtype).removeprefix("torch."), check(device, dtype)
        told.append(f"{name} {'fails' if error else 'works'}")
        if error:
            problems.append(f"steps on {device} in {name}: {error}")
    print(f"{f'steps on {device}':<18}{', '.join(told)}")
    error = check_division(device) if device.type == "cuda" and not problems else None
    return problems + ([f"division on {device}: {error}"] if error else [])


if __name__ == "__main__":
    sys.exit(main())
