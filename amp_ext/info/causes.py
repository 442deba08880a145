"""Why a compiled module does not work: a table of causes, how each is recognised, and its cure."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from amp_ext.info.facts import ISA_VARIABLE, PACKAGE


class Cause(NamedTuple):
    """One row of the table: a cause and its cure.

    Attributes:
        signs: Regular expression that finds the cause in an error's text.
        text: The cause in words.
        setting: Environment variable to set for a rebuild, where a plain rebuild does not help.
        command: Line to type instead of a rebuild.
    """

    signs: str
    text: str
    setting: str = ""
    command: str = ""

    def line(self, capabilities: Sequence[str]) -> str:
        """Returns the line to type.

        Args:
            capabilities: Compute capabilities of the GPUs, ["9.0"].
        """
        return self.command or rebuild_line(self.setting.format(";".join(capabilities)))


_IN_CONDA = (Path(sys.prefix) / "conda-meta").is_dir()

# Causes that a message does not name itself. The first one whose signs are seen counts, so certain
# causes stand before likely ones.
CAUSES = (
    Cause(
        f"{ISA_VARIABLE} must be",
        f"{ISA_VARIABLE} names no instruction set, or one that this processor lacks",
        command=f"unset {ISA_VARIABLE}",
    ),
    Cause(
        "hide the amp_ext that is installed",
        "Python was started in the folder of the sources, which come first on its path",
        command=f"cd / && {shlex.quote(sys.executable)} -m amp_ext.info --check",
    ),
    Cause(
        r"lib(cu\w+|nv\w+|c10_cuda|torch_cuda)\.so\S*: cannot open shared object",
        "it was built for another major version of CUDA, or for CUDA, which this torch lacks",
    ),
    Cause(
        "version `(GLIBCXX|CXXABI)_",
        "its compiler is newer than the C++ library that Python loads",
        command="conda install -c conda-forge libstdcxx-ng" if _IN_CONDA else "",
    ),
    Cause("version `GLIBC_", "it was built on a newer system"),
    Cause(
        "undefined symbol",
        "it was built against another torch, another C++ ABI, or older files of amp_ext",
    ),
    Cause("cannot open shared object file", "a library that it was linked with is not installed"),
    Cause(
        "built without CUDA",
        "there is a GPU, and it was built for the CPU alone",
        setting="AMP_EXT_CUDA=1",
    ),
    Cause(
        "no kernel image is available",
        "it holds no code for this GPU",
        setting="TORCH_CUDA_ARCH_LIST='{}'",
    ),
)


def recognise(seen: str) -> Cause:
    """Returns the first cause whose signs are seen, or one without a text if there is none.

    Args:
        seen: Text of an error, with other facts that were found.
    """
    found = (cause for cause in CAUSES if re.search(cause.signs, seen))
    return next(found, Cause("", ""))


def rebuild_line(setting: str = "") -> str:
    """Returns the line that builds the extension anew for this Python.

    The line builds in place if the package lies in its source folder, and otherwise calls pip.

    Args:
        setting: Environment variable to set, ``AMP_EXT_CUDA=1``.
    """
    setting, python = setting and f"{setting} ", shlex.quote(sys.executable)
    if (PACKAGE.parent / "Makefile").is_file():
        return f"{setting}make -C {shlex.quote(str(PACKAGE.parent))} clean build PYTHON={python}"
    return (
        f"{setting}{python} -m pip install --no-build-isolation --force-reinstall --no-deps "
        "--no-cache-dir <the source folder of amp_ext>"
    )
