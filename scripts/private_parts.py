"""Prints which private parts of torch, listed in CONTRIBUTING.md, this PyTorch does not have.

A part may be gone, or only have moved to a file that is not searched: then its test still passes.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
Row = tuple[set[str], str, str]


def rows() -> list[Row]:
    """Returns the names, the file that uses them and the test of each row of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Private parts of torch")[2].partition("\n## ")[0]
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    return [
        (set(re.findall(r"`(\w+)`", parts)), file.strip(" `"), test.strip(" `"))
        for parts, file, test in lines
    ]


def missing(rows: Iterable[Row]) -> Iterator[str]:
    """Yields a line for each row whose names are not all in the sources and headers of torch."""
    folder = Path(torch.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("include/c10/core/**/*.h")]
    files += folder.glob("include/torch/csrc/**/*.h")
    for name in ("amp", "distributed", "nn", "optim", "profiler"):
        files += folder.glob(f"{name}/**/*.py")
    of_torch = set(re.findall(r"\w+", "\n".join(file.read_text() for file in files)))
    for names, file, test in rows:
        if names - of_torch:
            yield f"{', '.join(sorted(names - of_torch))}, used by {file}, tested by {test}"


if __name__ == "__main__":
    lines = list(missing(rows()))
    print(
        f"private parts that torch {torch.__version__} does not have: {len(lines)}",
        *lines,
        sep="\n",
    )
