"""Loads the compiled module, or explains at its first use why it can't be loaded.

``_C`` holds the bindings and links ``lib/libamp_ext.so``, which holds everything else. Symbol
versions make the loader reject a ``_C`` and a library from different builds.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

_REBUILD = (
    "pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir <amp_ext's folder>"
)


class _BrokenBinary:
    """A stand-in for a module that can't be loaded: importing works, the first use raises."""

    def __init__(self, reason: str, cause: ImportError | None = None) -> None:
        self._reason = reason
        self._cause = cause

    def __getattr__(self, name: str) -> NoReturn:
        raise ImportError(self._reason) from self._cause


def _build_info() -> dict[str, Any]:
    """Returns the build information stored next to the binary; empty if it can't be read."""
    try:
        info = json.loads(Path(__file__).with_name("_build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _interface(version: str) -> str:
    """Returns the minor release of a torch version, which determines its C++ interface.

    Other versions, such as nightly builds, are returned whole and match only themselves.
    """
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return release[1] if release else version


def _fits(built: dict[str, Any]) -> bool:
    """Returns True if the running torch has the C++ interface and CUDA version of a build."""
    cuda = built.get("cuda") and built["cuda"].split(".")[0]
    found = torch.version.cuda and torch.version.cuda.split(".")[0]
    version = built.get("torch", torch.__version__)
    return _interface(version) == _interface(torch.__version__) and cuda in (None, found)


def _installed_elsewhere(package: Path) -> Path | None:
    """Returns the folder of another, built amp_ext on ``sys.path``, or None."""
    for entry in sys.path:
        found = Path(entry or ".").resolve() / "amp_ext"
        if found != package.resolve() and any(found.glob("_C.*.so")):
            return found
    return None


def load_binary() -> Any:
    """Imports and returns the compiled module, or a stand-in whose first use raises ImportError."""
    built = _build_info()
    built_for = f"torch {built.get('torch')} and Python {built.get('python')}"
    running = f"torch {torch.__version__} and Python {platform.python_version()}"
    if not _fits(built):
        return _BrokenBinary(
            f"amp_ext was built for {built_for}; you run {running}. Rebuild: {_REBUILD}"
        )
    if importlib.util.find_spec("amp_ext._C") is None:
        package = Path(__file__).parent
        if (package.parent / "setup.py").is_file() and not any(package.glob("_C.*.so")):
            installed = _installed_elsewhere(package)
            if installed is not None:
                return _BrokenBinary(
                    f"amp_ext was imported from its sources in {package.parent}, where it is not "
                    f"built, and not from {installed.parent}. Start Python in another folder."
                )
            sources, python = map(shlex.quote, (str(package.parent), sys.executable))
            return _BrokenBinary(
                f"amp_ext was imported from its sources in {package.parent}, where it is not "
                "built, and is not installed for this Python. Build it: "
                f"cd {sources} && {python} setup.py build_ext --inplace"
            )
        return _BrokenBinary(
            "amp_ext's compiled module amp_ext._C is not there for this Python "
            f"({running}{f'; it was built for {built_for}' if built else ''}). Build it: {_REBUILD}"
        )
    try:
        from amp_ext import _C
    except ImportError as error:
        was = f"It was built for {built_for}; you run {running}" if built else f"You run {running}"
        return _BrokenBinary(f"{_reason_of(error)}: {error}. {was}. Rebuild: {_REBUILD}", error)
    return _C


def _reason_of(error: ImportError) -> str:
    """Returns the reason why the module can't be loaded, found in the loader's message."""
    if "libamp_ext.so: cannot open" in str(error):
        return "amp_ext's library lib/libamp_ext.so is not there"
    if "version `AMP_EXT_" in str(error):
        return "amp_ext's library lib/libamp_ext.so is of another build than its compiled module"
    return "amp_ext's compiled module does not load"
