"""Loads the compiled module, or explains at its first use why it can't be loaded.

``_C`` holds the bindings and links ``lib/libamp_ext.so``, which links the kernels. Symbol versions
make the loader reject files from different builds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

REBUILD = (
    "pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir <amp_ext's folder>"
)


class _BrokenBinary:
    """A stand-in for a module that can't be loaded: importing works, the first use raises."""

    def __init__(self, reason: str, cause: ImportError | None = None) -> None:
        self._reason = reason
        self._cause = cause

    def __getattr__(self, name: str) -> NoReturn:
        raise ImportError(self._reason) from self._cause


def _interface(version: str, cuda: str | None) -> tuple[str, str]:
    """Returns what decides about the C++ interface of a torch: its minor release, and CUDA's major.

    Other versions, such as nightly builds, are returned whole and match only themselves.
    """
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return release[1] if release else version, (cuda or "").split(".")[0]


def build_folder() -> Path:
    """Returns the folder of the files that were compiled for the torch that runs.

    A wheel for several releases of torch has such a folder for each of them, for example
    ``torch2.14``. Otherwise it is the folder of the package.
    """
    package = Path(__file__).parent
    own = package / f"torch{_interface(torch.__version__, None)[0]}"
    return own if own.is_dir() else package


def build_info() -> dict[str, Any]:
    """Returns what the build wrote about itself, or nothing if that is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads((build_folder() / "_build_info.json").read_text()))
    return {}


def load_binary() -> Any:
    """Imports and returns the compiled module, or a stand-in whose first use raises ImportError."""
    package, folder = Path(__file__).parent, build_folder()
    inside = sorted(each.name.removeprefix("torch") for each in package.glob("torch[0-9]*"))
    if inside and folder == package:
        return _BrokenBinary(
            f"this amp_ext was built for torch {', '.join(inside)}; you run torch "
            f"{torch.__version__}. Install one of these, or build amp_ext for yours: {REBUILD}"
        )
    built = {"torch": torch.__version__, "cuda": None, "python": "unknown", **build_info()}
    builds = (
        f"amp_ext was built for torch {built['torch']} and Python {built['python']}; you run "
        f"torch {torch.__version__} and Python {platform.python_version()}. Rebuild: {REBUILD}"
    )
    cuda = torch.version.cuda if built["cuda"] else None  # a build without CUDA fits any
    if _interface(built["torch"], built["cuda"]) != _interface(torch.__version__, cuda):
        return _BrokenBinary(builds)
    if inside:
        sys.modules["amp_ext"].__path__.append(str(folder))  # where Python looks for amp_ext._C
    try:
        return importlib.import_module("amp_ext._C")
    except ImportError as error:
        return _BrokenBinary(
            f"amp_ext's compiled module does not load: {error}. If amp_ext is installed, start "
            f"Python outside the folder of its sources. {builds}",
            error,
        )
