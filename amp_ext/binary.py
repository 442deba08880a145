"""Finds the compiled module, and explains at its first use what keeps it from loading.

``_C`` holds the bindings and links ``lib/libamp_ext.so``, which has all the rest. The loader takes
only the library of the same build, whose name is the version of all that it exports.
"""

from __future__ import annotations

import importlib.util
import json
import platform
from pathlib import Path
from typing import Any, NoReturn

import torch

_REBUILD = (
    "pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir <amp_ext's folder>"
)


class _BrokenBinary:
    """Stands for a compiled module that does not load: importing works, the first use explains."""

    def __init__(self, reason: str, cause: ImportError | None = None) -> None:
        self._reason = reason
        self._cause = cause

    def __getattr__(self, name: str) -> NoReturn:
        raise ImportError(self._reason) from self._cause


def _build_info() -> dict[str, Any]:
    """Returns what the build has noted beside the binary; nothing if that can't be read."""
    try:
        info = json.loads(Path(__file__).with_name("_build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def load_binary() -> Any:
    """Imports the compiled module, unless it was built for another torch."""
    built = _build_info()
    built_for = f"torch {built.get('torch')} and Python {built.get('python')}"
    running = f"torch {torch.__version__} and Python {platform.python_version()}"
    if built.get("torch", torch.__version__) != torch.__version__:
        return _BrokenBinary(
            f"amp_ext was built for {built_for}; you run {running}. Rebuild: {_REBUILD}"
        )
    if importlib.util.find_spec("amp_ext._C") is None:
        return _BrokenBinary(
            "amp_ext's compiled module amp_ext._C is not there for this Python "
            f"({running}{f'; it was built for {built_for}' if built else ''}). Build it: {_REBUILD}"
        )
    try:
        from amp_ext import _C
    except ImportError as error:
        was = f"It was built for {built_for}; you run {running}" if built else f"You run {running}"
        return _BrokenBinary(f"{_told(error)}: {error}. {was}. Rebuild: {_REBUILD}", error)
    return _C


def _told(error: ImportError) -> str:
    """Returns what keeps the module from loading, as far as the loader's text tells."""
    if "libamp_ext.so: cannot open" in str(error):
        return "amp_ext's library lib/libamp_ext.so is not there"
    if "version `AMP_EXT_" in str(error):
        return "amp_ext's library lib/libamp_ext.so is of another build than its compiled module"
    return "amp_ext's compiled module does not load"
