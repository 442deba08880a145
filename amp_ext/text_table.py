"""Formats tables for the command line programs."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
