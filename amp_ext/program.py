"""What all programs share: none ends in a traceback, whatever its output goes to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["make_console", "parse_json", "run_program"]


def run_program(main: Callable[[], int]) -> int:
    """Runs a program; to be called with the whole process: ``sys.exit(run_program(main))``.

    Returns:
        The exit code of `main`. 141 if nobody reads its output any more and 130 after Ctrl-C, as of
        other tools; 1, after a line that says why, if something can't be written.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # what the encoding of the output lacks
    try:
        try:
            code = main()
        except SystemExit as error:  # of argparse
            code = error.code if isinstance(error.code, int) else 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = 141
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        spec = sys.modules["__main__"].__spec__
        name = (
            f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
        )
        what = error.filename or "can't write the output"
        print(f"{name}: error: {what}: {error.strerror or error}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def make_console() -> Any:
    """Returns rich's console for tables, which shows texts as they are, and files whole lines."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for `run_program`: rich would exit with 1

    width = None if sys.stdout.isatty() else 150
    return _Console(width=width, highlight=False, markup=False, emoji=False)


def parse_json(text: str, source: str) -> Any:
    """Returns what a JSON text of a user holds; a ValueError says what is wrong with its source."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
