"""Maps errors of the compiled module to their causes, and to the command that repairs each."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from amp_ext.info.facts import ISA_VARIABLE, PACKAGE


class Cause(NamedTuple):
    """A cause of errors, and the command that repairs it.

    Attributes:
        signs: A regular expression that matches the error messages of this cause.
        text: A description of the cause.
        setting: An environment variable with its value, if a plain rebuild does not help.
        command: A command to run instead of a rebuild.
    """

    signs: str
    text: str
    setting: str = ""
    command: str = ""

    def line(self, capabilities: Sequence[str]) -> str:
        """Returns the command that repairs the installation.

        Args:
            capabilities: The compute capabilities of the GPUs, such as ["9.0"].
        """
        return self.command or rebuild_line(self.setting.format(";".join(capabilities)))


_IN_CONDA = (Path(sys.prefix) / "conda-meta").is_dir()

# Causes of errors whose messages don't name them. `recognise` takes the first match, so certain
# causes come before likely ones.
CAUSES = (
    Cause(
        f"{ISA_VARIABLE} must be",
        f"{ISA_VARIABLE} names no instruction set, or one that this processor lacks",
        command=f"unset {ISA_VARIABLE}",
    ),
    Cause(
        "where it is not built, and not from",
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
    """Returns the first cause that matches, or a cause without text if none matches.

    Args:
        seen: The text of an error, or a description of another problem.
    """
    found = (cause for cause in CAUSES if re.search(cause.signs, seen))
    return next(found, Cause("", ""))


def rebuild_line(setting: str = "") -> str:
    """Returns the command that rebuilds the extension for this Python.

    The command builds in place if the package is in its source folder, and otherwise calls pip.

    Args:
        setting: An environment variable to set for the build, such as ``AMP_EXT_CUDA=1``.
    """
    setting, python = setting and f"{setting} ", shlex.quote(sys.executable)
    if (PACKAGE.parent / "Makefile").is_file():
        return f"{setting}make -C {shlex.quote(str(PACKAGE.parent))} clean build PYTHON={python}"
    return (
        f"{setting}{python} -m pip install --no-build-isolation --force-reinstall --no-deps "
        "--no-cache-dir <the source folder of amp_ext>"
    )
