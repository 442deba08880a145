"""Prints the folder in which CMake finds amp_ext, for programs in C++.

cmake -S . -B build -Damp_ext_DIR="$(python -m amp_ext.cmake)"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_ext.binary import build_folder

_PACKAGE = Path(__file__).parent


def folder() -> Path:
    """Returns the folder of ``amp_extConfig.cmake``, for ``amp_ext_DIR``.

    Raises:
        FileNotFoundError: If the library that programs link against was not built.
    """
    found = _PACKAGE / "share" / "cmake" / "amp_ext"
    library = build_folder() / "lib" / "libamp_ext.so"
    for file in (library, found / "amp_extBuild.cmake"):
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing: amp_ext was not built, or only in part. Build it again."
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the folder. Returns the exit code: 0, or 1 if the library was not built."""
    argparse.ArgumentParser(
        prog="python -m amp_ext.cmake",
        description="Prints the folder that amp_ext_DIR names for find_package(amp_ext).",
    ).parse_args(arguments)
    try:
        print(folder())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
