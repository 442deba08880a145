"""Shared libraries that stand in the place of others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def library_of_c(source: str, library: Path, *options: str) -> Path:
    """Compiles a library from C, in the place of another if there is one."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    file = library.with_suffix(".c")
    file.write_text(source)
    library.unlink(missing_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, file, *options], check=True)
    return library
