"""What all programs of the package share: whatever their output goes to, none ends in a traceback.

A character that the encoding of the output lacks is replaced by a similar one. What a program is to
write is tried before it works.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_folder", "check_output", "make_console", "parse_json", "run_program"]

# One for each, which leaves columns where they are.
_SIMILAR = {"✓": "v", "✗": "x", "→": ">", "×": "x", "÷": "/", "µ": "u", "…": ".", "≥": ">"}
_SIMILAR |= {"−": "-", "±": "~", "–": "-"}


def run_program(main: Callable[[], int]) -> int:
    """Runs a program; to be called with the whole process: ``sys.exit(run_program(main))``.

    Args:
        main: Returns the exit code, or raises SystemExit.

    Returns:
        The exit code of the program. 141 if nobody reads its output any more and 130 after Ctrl-C,
        as of other tools; 1, after a line that says why, if something can't be written.
    """
    _open_what_is_closed()
    codecs.register_error("amp_ext.similar", _similar)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="amp_ext.similar")
    try:
        try:
            code = main()
        except SystemExit as error:  # of argparse
            code = error.code if isinstance(error.code, int) else 0
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = 128 + getattr(signal, "SIGPIPE", 13)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except OSError as error:
        _say(f"{_name()}: error: {_reason(error)}")
        code = 1
    else:
        return code
    _drop_what_is_left()
    return code


def make_console() -> Console:
    """Returns rich's console for tables, which are not squeezed into 80 columns of a file or pipe.

    Texts are shown as they are: paths and names may look like rich's markup. To be called where
    rich is installed.
    """
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for `run_program`: rich would exit with 1

    width = None if sys.stdout.isatty() else 150
    return _Console(width=width, highlight=False, markup=False, emoji=False)


def check_output(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Exits with a line unless a file can be written; makes the folders above it.

    Args:
        parser: That of the program, which says why.
        option: Its name on the command line.
        path: The file. What it holds stays; a pipe or a device is not opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        if is_new or path.is_file() or path.is_dir():
            with path.open("ab"):
                pass
        if is_new:
            path.unlink()
    except OSError as error:
        parser.error(f"{option}: {_reason(error, path)}")


def check_folder(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Exits with a line unless files can be written into a folder, which is made if need be.

    Args:
        parser: That of the program, which says why.
        option: Its name on the command line.
        path: The folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        parser.error(f"{option}: {_reason(error, path)}")


def parse_json(text: str, source: str) -> Any:
    """Returns what a JSON text holds.

    Args:
        text: From a user.
        source: What messages call it.

    Raises:
        ValueError: If it is not JSON, or lists in lists too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply") from None
    except ValueError as error:  # also of a number with too many digits
        raise ValueError(f"{source} is not JSON: {error}") from error


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    return "".join(_SIMILAR.get(character, "?") for character in found), error.end


def _open_what_is_closed() -> None:
    """Opens the null device for an output that the caller closed.

    A file that is opened later would take its number, and what is printed would go there.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _drop_what_is_left() -> None:
    """Lets what could not be written go nowhere: Python tries once more when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # there may be no place left to say it
        print(line, file=sys.stderr)


def _name() -> str:
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def _reason(error: OSError, path: Path | None = None) -> str:
    if path is None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"can't write {path or 'the output'}: {error.strerror or error}"
