"""Versions, build, processor and GPUs, as far as they can be told without the compiled module."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import amp_ext
from amp_ext import ops

PACKAGE = Path(amp_ext.__file__).parent
ISA_VARIABLE = "AMP_EXT_CPU_ISA"


def describe() -> dict[str, Any]:
    """Returns all facts, as ``--json`` prints them.

    Returns:
        ``versions``; ``folder`` of the package; ``library``, its file for programs in C++, None
        where there is none; ``build``, None where the build left no file; ``cpu``, whose
        ``instructions`` is None if the compiled module does not load; ``gpus``.
    """
    build = read_build()
    try:
        instructions = ops.cpu_isa()
    except (ImportError, RuntimeError):
        instructions = None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    library = PACKAGE / "lib" / "libamp_ext.so"
    return {
        "versions": {
            "amp_ext": amp_ext.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "folder": str(PACKAGE),
        "library": str(library) if library.is_file() else None,
        "build": build,
        "cpu": {
            "instructions": instructions,
            "variable": os.environ.get(ISA_VARIABLE),
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "gpus": [_describe_gpu(index, build) for index in range(gpus)],
    }


def read_build() -> dict[str, Any] | None:
    """Returns what the build noted beside the binary, or None if there is no note.

    ``commit`` is None where no git was at hand; ``uncommitted_changes`` says whether files differed
    from it. ``architectures`` are sm_90 for machine code, compute_90 for PTX.
    """
    file = PACKAGE / "_build_info.json"
    if not file.exists():
        return None
    noted = json.loads(file.read_text())
    commit, dirty, _ = (noted.get("git") or "").partition("-dirty")
    return {
        **{name: noted.get(name) for name in ("torch", "python", "compiler", "cuda", "toolkit")},
        "backends": noted.get("backends", []),
        "architectures": noted.get("architectures", []),
        "commit": commit or None,
        "uncommitted_changes": bool(dirty) if commit else None,
    }


def _describe_gpu(index: int, build: dict[str, Any] | None) -> dict[str, Any]:
    capability = torch.cuda.get_device_capability(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": "{}.{}".format(*capability),
        "code": None if build is None else code_for(capability, build["architectures"]),
    }


def code_for(capability: tuple[int, int], architectures: Sequence[str]) -> str | None:
    """Returns the architecture of a binary that a GPU takes, or None if it can take none.

    Machine code runs on GPUs of its major version from its minor version on; PTX is compiled by the
    driver for any later GPU. Names that end in ``a`` hold for one GPU alone, those in ``f`` for its
    family.

    Args:
        capability: Of the GPU, (9, 0).
        architectures: What the binary holds, ``["sm_80", "compute_90"]``.

    Reference:
        CUDA C++ Programming Guide, "Compute capabilities" and "Application compatibility".
    """
    fitting = []
    for name in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if parts is None:
            continue
        kind, made_for, only_for = parts[1], (int(parts[2]), int(parts[3])), parts[4]
        is_of_family = made_for[0] == capability[0] or (kind == "compute" and not only_for)
        is_later = made_for <= capability and is_of_family and only_for != "a"
        if is_later or made_for == capability:
            fitting.append((kind == "sm", made_for, name))
    return max(fitting)[2] if fitting else None
