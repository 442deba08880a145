"""What all programs share: none ends in a traceback, whatever its output goes to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence

__all__ = ["format_table", "run_program"]


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
        what = error.filename or "can't write the output"
        print(f"amp_ext: error: {what}: {error.strerror or error}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def format_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Returns rows of equal length as lines of columns.

    Args:
        rows: The headings, and what stands below them.
        left: The columns that begin at their left end; the others end at their right.
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
