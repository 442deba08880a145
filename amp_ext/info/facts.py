"""Collects versions, build, processor and GPUs; works even if the compiled module doesn't load."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import amp_ext
from amp_ext import ops

PACKAGE = Path(amp_ext.__file__).parent
ISA_VARIABLE = "AMP_EXT_CPU_ISA"


def gpus() -> list[tuple[str, str]]:
    """Returns the name and the compute capability, such as "9.0", of each GPU that torch sees."""
    return [
        (
            torch.cuda.get_device_name(index),
            "{}.{}".format(*torch.cuda.get_device_capability(index)),
        )
        for index in range(torch.cuda.device_count())
    ]


def read_build() -> dict[str, Any] | None:
    """Returns the content of ``_build_info.json``, which a build writes, or None without one."""
    file = PACKAGE / "_build_info.json"
    return json.loads(file.read_text()) if file.exists() else None


def describe() -> Iterator[tuple[str, str]]:
    """Yields pairs of a label and a fact about the installation."""
    yield "amp_ext", f"{amp_ext.__version__} in {PACKAGE}"
    yield "torch", f"{torch.__version__}, {_with_cuda(torch.version.cuda)}"
    yield "Python", platform.python_version()
    library = PACKAGE / "lib" / "libamp_ext.so"
    yield "library", str(library) if library.is_file() else "none that programs in C++ could link"
    build = read_build()
    if build is None:
        yield "build", "unknown: no _build_info.json lies beside the compiled module"
    else:
        toolkit = f", CUDA toolkit {build['toolkit']}" if build["toolkit"] else ""
        built_for = f"for torch {build['torch']}, {_with_cuda(build['cuda'])}"
        yield "build", f"{built_for}, Python {build['python']}"
        yield "compiler", f"{build['compiler'] or 'unknown'}{toolkit}"
        yield "commit", build["git"] or "unknown"
        yield "backends", ", ".join([*build["backends"], *build["architectures"]])
    try:
        instructions = ops.cpu_isa()
    except (ImportError, RuntimeError):
        instructions = "unknown"
    variable = f"{ISA_VARIABLE} {os.environ.get(ISA_VARIABLE, 'not set')}"
    counts = f"threads: {torch.get_num_threads()}, cores: {len(os.sched_getaffinity(0))}"
    yield "CPU", f"{instructions} ({variable}), {counts}"
    found = gpus()
    for index, (name, capability) in enumerate(found):
        yield f"GPU {index}", f"{name}, compute capability {capability}"
    if not found:
        yield "GPU", "none that torch sees"


def _with_cuda(version: str | None) -> str:
    return f"CUDA {version}" if version else "without CUDA"
