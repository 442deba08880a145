"""Helpers for the command line programs, so that none of them ends with a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence

__all__ = ["format_table", "run_program"]


def run_program(main: Callable[[], int]) -> int:
    """Runs the main function of a program. Usage: ``sys.exit(run_program(main))``.

    Returns:
        The exit code of `main`; or 141 if the reader of the output has closed it, 130 after Ctrl-C,
        and 1 if something can't be written, with a message on stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # unencodable characters become "?"
    try:
        try:
            code = main()
        except SystemExit as error:  # raised by argparse
            code = error.code if isinstance(error.code, int) else 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = 141
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        what = error.filename or "can't write the output"
        print(f"amp_ext: error: {what}: {error.strerror or error}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # otherwise Python would flush again at exit, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def format_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Returns a table as text, with aligned columns.

    Args:
        rows: The rows of cells, all of the same length; the first row holds the headings.
        left: Indices of the columns that are aligned to the left; the others are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(cells)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
