"""Checks that comments and docstrings open with their subject, not with a pronoun.

Lists the texts that open with a word of ``OPENING``, prints their share by folder, and exits with 1
if the total share is above 3 %. ``--sample SEED`` instead prints a random sample of comments,
docstrings, errors and one page, for a human reader.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LARGEST_SHARE = 0.03
OPENING = re.compile(
    r"(Of|Those|That|What|Which|Whose|Who|Whoever|The same|Likewise|All that|As|It|They|These"
    r"|None|Such|Others?)\b",
    re.IGNORECASE,
)
CXX_COMMENT = re.compile(r"""((?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?)//+(.*)""")
CXX_ERROR = re.compile(r"(?:TORCH_CHECK\w*|throw py::\w+)\((.*?)\);$", re.DOTALL | re.MULTILINE)
MARK = re.compile("namespace|noqa|type: ignore|fmt:|clang-format")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
FILES = ["*.py", "*.cpp", "*.h", "*.cu", "*.cuh", ":!tests", ":!docs"]
Lines = Iterator[tuple[int, str, str]]


class Text(NamedTuple):
    place: str
    is_docstring: bool
    text: str

    def code(self) -> str:
        """Returns the line of code that the text belongs to, without a comment."""
        file, line = self.place.split(":")
        lines = Path(file).read_text().splitlines()[int(line) - 1 :]
        marks = ("#", "//", "template") if not self.is_docstring else ('"""',)
        code = next((each for each in lines if not each.strip().startswith(marks)), "")
        return re.split(r"  ?(?:#|//+) ", code)[0].strip()


def python_comments(path: Path) -> Lines:
    """Yields for each comment its line number, the code before it in this line, and its text."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.line[: token.start[1]], token.string.lstrip("#:")


def cxx_comments(path: Path) -> Lines:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := CXX_COMMENT.match(line):
            yield number, found[1], found[2]


def comments(path: Path) -> Iterator[Text]:
    """Yields each block of comment lines, and each trailing comment of at least 15 characters."""
    start = last = 0
    block: list[str] = []
    reader = python_comments if path.suffix == ".py" else cxx_comments
    for number, code, comment in [*reader(path), (0, "", "")]:
        if block and (code.strip() or number != last + 1):
            yield Text(f"{path}:{start}", False, " ".join(block))
            block = []
        if code.strip():
            if len(comment.strip()) >= 15:
                yield Text(f"{path}:{number}", False, comment.strip())
        else:
            start, last = number if not block else start, number
            block.append(comment.strip())


def docstrings(path: Path) -> Iterator[Text]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line = getattr(node, "lineno", 1)
            yield Text(f"{path}:{line}", True, ast.get_docstring(node) or "")


def python_errors(path: Path) -> Iterator[str]:
    """Yields the message of each ``raise``, with "…" in place of inserted values."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)


def cxx_errors(path: Path) -> Iterator[str]:
    """Yields the message of each check, with "…" in place of inserted values."""
    for call in CXX_ERROR.findall(re.sub(r"(?m)^ *//.*", "", path.read_text())):
        _, *pieces = STRING.split(call)  # strings, each followed by the code after it
        text = "".join(
            "…" * bool(piece.strip(", \n")) if index % 2 else piece
            for index, piece in enumerate(pieces)
        )
        yield f"…{text}" if text[:1] in (" ", ":", ".") else text


def source_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *FILES], capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.split()]


def all_texts() -> list[Text]:
    """Returns all comments and docstrings outside tests and docs with more than 20 characters.

    Marks for tools and the names of closed namespaces do not count.
    """
    paths = source_files()
    found = [text for path in paths for text in comments(path)]
    found += [text for path in paths if path.suffix == ".py" for text in docstrings(path)]
    return [text for text in found if len(text.text) > 20 and not MARK.match(text.text)]


def print_sample(texts: list[Text], seed: int) -> None:
    """Prints 10 comments, 5 docstrings, 5 errors and the name of a page."""
    draw = random.Random(seed)
    chosen = draw.sample([text for text in texts if not text.is_docstring], 10)
    chosen += draw.sample([text for text in texts if text.is_docstring], 5)
    for text in chosen:
        print(f"--- {text.place}\n{text.code()}\n    {text.text}")
    product = [path for path in source_files() if path.parts[0] in ("amp_ext", "csrc")]
    errors = [
        error
        for path in product
        for error in (python_errors if path.suffix == ".py" else cxx_errors)(path)
        if len(error) > 20
    ]
    print("--- errors", *draw.sample(errors, 5), sep="\n")
    print("--- page", draw.choice(sorted(Path("docs").glob("*.md"))), sep="\n")


def print_shares(texts: list[Text]) -> None:
    """Prints the texts that open with a pronoun, and their share by folder."""
    folders: dict[str, list[bool]] = {}
    for text in texts:
        is_wrong = OPENING.match(text.text) is not None
        folders.setdefault(str(Path(text.place).parent), []).append(is_wrong)
        if is_wrong:
            print(f"{text.place}: {text.text[:80]}")
    for folder, inside in folders.items():
        print(f"{folder}: {sum(inside)} of {len(inside)}, {sum(inside) / len(inside):.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", action="store_true", help="print them also if all is well")
    parser.add_argument("--sample", type=int, metavar="SEED")
    arguments = parser.parse_args()
    texts = all_texts()
    if arguments.sample is not None:
        print_sample(texts, arguments.sample)
        return 0
    share = sum(1 for text in texts if OPENING.match(text.text)) / len(texts)
    if arguments.shares or share > LARGEST_SHARE:
        print_shares(texts)
        print(f"all: {share:.1%} of {len(texts)}, at most {LARGEST_SHARE:.0%} are allowed")
    return int(share > LARGEST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
