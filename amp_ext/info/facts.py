"""Versions, build, processor and GPUs, as far as they can be told without the compiled module."""

from __future__ import annotations

import json
import os
import platform
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
        "build": read_build(),
        "cpu": {
            "instructions": instructions,
            "variable": os.environ.get(ISA_VARIABLE),
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "gpus": [
            {
                "name": torch.cuda.get_device_name(index),
                "capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
            }
            for index in range(gpus)
        ],
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
