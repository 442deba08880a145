"""Uses the scaler and the optimizers in libraries that have their own training loop.

Each library has one module, which imports it: :mod:`amp_ext.integrations.accelerate` (for
Transformers too), :mod:`amp_ext.integrations.lightning`, :mod:`amp_ext.integrations.timm`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any


def import_client(module: str, *, at_least: str, below: str) -> Any:
    """Imports a module of a library, if the library has a version that is known to work.

    Args:
        module: Name of the module; its first part is the name of the library.
        at_least: Oldest supported version.
        below: First version that is not supported.

    Returns:
        The module.

    Raises:
        ImportError: If the library is missing, too old or too new.
    """
    library = module.partition(".")[0]
    try:
        found = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found == "none" or not _numbers(at_least) <= _numbers(found) < _numbers(below):
        wanted = f"{library}>={at_least},<{below}"
        raise ImportError(
            f'amp_ext.integrations.{library} needs {wanted}, found {found}: pip install "{wanted}"',
            name=library,
        )
    return importlib.import_module(module)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the release numbers of a version: (2, 6, 6) for "2.6.6.dev1"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
