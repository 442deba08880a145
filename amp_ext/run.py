"""Runs an unchanged program with our scaler and, on request, our optimizers in place of torch's.

python -m amp_ext.run train.py --epochs 3            # torch.amp.GradScaler is ours
python -m amp_ext.run --optimizers -m pkg.train      # Adam, AdamW and SGD of torch.optim too

The program runs as ``__main__`` and sees its own ``sys.argv``, ``sys.path[0]`` and ``__file__``;
its exit code and its tracebacks are what they are without the launcher. What is replaced is said
in :func:`amp_ext.patch_torch`.

Processes that the program starts are not patched unless they fork: under ``multiprocessing``'s
"spawn" and "forkserver", call :func:`amp_ext.patch_torch` in the function that they run. With
torchrun, each rank starts the launcher: ``torchrun --nproc-per-node 2 -m amp_ext.run train.py``.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from amp_ext.patch import patch_torch

_LAUNCHER = (__file__, "<frozen ")  # where code runs before the program does


def main(arguments: Sequence[str] | None = None) -> None:
    """Patches torch, then runs the program until it ends.

    Args:
        arguments: Those of the command line, or None for the process's own.

    Raises:
        SystemExit: With code 2 if there is no such program, with code 1 if the compiled module
            does not load, and as the program raises it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = next((i + 1 for i, word in enumerate(given) if not word.startswith("-")), len(given))
    parser = _parser()
    options = parser.parse_args(given[:own])
    try:
        patch_torch(optimizers=options.optimizers)
    except (ImportError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\npython -m amp_ext.info says what to do.\n")

    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    try:
        load = _load_module if options.module else _load_script
        code = load(options.program, module)
        if options.module:
            sys.argv = [str(module.__file__), *given[own:]]
        else:
            sys.argv = given[own - 1 :]
            if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
                sys.path[0] = os.path.dirname(os.path.realpath(options.program))
        # For good: threads and exit handlers that outlive the program find its names there.
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except _NoProgramError as error:
        parser.error(str(error))
    except BaseException as error:
        _hide_launcher(error)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.run",
        usage="%(prog)s [-h] [--optimizers] (script.py | -m module) [argument ...]",
        description="Runs a program with amp_ext's scaler in place of torch's.",
        epilog="All that follows the script or the module goes to the program.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--optimizers", action="store_true", help="replaces Adam, AdamW and SGD of torch.optim too"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="runs a module by its name")
    parser.add_argument("program", metavar="script.py or module", help="what to run")
    return parser


class _NoProgramError(Exception):
    """There is nothing to run under the name that was given."""


def _load_script(name: str, module: ModuleType) -> CodeType:
    """Compiles a script; names its file in the module that it will run in."""
    path = os.path.abspath(name)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        raise _NoProgramError(f"can't open script {name!r}: {error.strerror}") from error
    module.__file__, module.__loader__ = path, loader
    return loader.source_to_code(source, path)


def _load_module(name: str, module: ModuleType) -> CodeType:
    """Compiles a module, or the ``__main__`` of a package; gives its spec to the one it runs in."""
    if not name or name.startswith("."):
        raise _NoProgramError(f"a module must be given by its full name, got {name!r}")
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above it is there and misses something else
        spec = None
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(name) if hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise _NoProgramError(f"no module {name!r} of Python code can be found")
    module.__file__, module.__loader__, module.__spec__ = spec.origin, loader, spec
    module.__package__ = spec.parent
    return code


def _hide_launcher(error: BaseException) -> None:
    """Lets an error that ends the process be shown from the program's own first frame on."""
    start, show = error.__traceback__, sys.excepthook
    while start is not None and start.tb_frame.f_code.co_filename.startswith(_LAUNCHER):
        start = start.tb_next

    def show_the_program(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if value is error:
            value, trace = value.with_traceback(start), start
        show(kind, value, trace)

    sys.excepthook = show_the_program


if __name__ == "__main__":
    main()
