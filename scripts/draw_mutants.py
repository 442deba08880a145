"""Draws faults in the Python of amp_ext and writes them to mutants_drawn.json.

Every statement is as likely as any other, and so is every fault of a statement. A fault is stored
by the text of its line, the function around it and which of the equal lines there it is, so that
it is found again after the code has moved. The seed is fixed, but another tree gives another draw:
draw anew only to replace the list.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from mutants import DRAWN, ROOT, lines_within

COUNT = 200
SEED = 20

LEFT_OUT = ("bench",)  # folders: programs that measure
LOGGING = ("_LOGGER", "warnings", "print")
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
}

# Where a fault begins in a text, what stands there, and what instead.
Fault = tuple[int, str, str]


class Source:
    """A file and the offsets of its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        encoded = self.text[start : self._starts[line]].encode()
        return start + len(encoded[:column].decode())

    def begin(self, node: ast.AST) -> int:
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.AST) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        return self.text[self.begin(node) : self.end(node)]

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Fault]:
        """Yields the change of an operator between two operands."""
        begin, end = self.end(left), self.begin(right)
        at = self.text.find(old, begin, end)
        if at >= 0 and "#" not in self.text[begin:end]:
            yield at, old, new


def children(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yields the expressions of a statement, without annotations and statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                left_out = (ast.stmt, ast.JoinedStr, ast.excepthandler, ast.match_case)
                if isinstance(child, ast.AST) and not isinstance(child, left_out):
                    waiting.append(child)
                    yield child


def faults_of_expression(source: Source, node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            yield from source.between(left, right, *OPERATORS[type(operator)])
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from source.between(left, right, *OPERATORS[type(node.op)])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield from source.between(node.left, node.right, *OPERATORS[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.begin(node), "not ", ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        old = source.of(node)
        new = str(not node.value) if isinstance(node.value, bool) else f"({old} + 1)"
        yield source.begin(node), old, new
    elif isinstance(node, ast.IfExp):
        yield source.begin(node.test), source.of(node.test), f"not ({source.of(node.test)})"


def faults_of(source: Source, statement: ast.stmt) -> Iterator[Fault]:
    """Yields the faults that a statement can have."""
    for decorator in getattr(statement, "decorator_list", []):
        yield source.begin(decorator) - 1, "@" + source.of(decorator), ""
    whole = source.begin(statement), source.of(statement)
    if isinstance(statement, (ast.Raise, ast.Continue, ast.Break)):
        yield *whole, "pass"
        return
    calls = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    if calls and source.of(statement).startswith(LOGGING):
        return
    if calls or isinstance(statement, ast.AugAssign):
        yield *whole, "pass"
    if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name):
        yield *whole, "pass"
    if isinstance(statement, ast.Return) and source.of(statement) not in ("return", "return None"):
        yield *whole, "return None"
    if isinstance(statement, (ast.If, ast.While)):
        test = source.of(statement.test)
        yield source.begin(statement.test), test, f"not ({test})"
    for node in children(statement):
        yield from faults_of_expression(source, node)


def is_left_out(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
        return True
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields all statements below a node, without those that are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            if is_left_out(child):
                continue
            yield child
        yield from statements(child)


def row_of(file: str, source: Source, fault: Fault) -> dict[str, object]:
    """Returns a fault as it is stored."""
    at, old, new = fault
    number = source.text.count("\n", 0, at)
    lines = list(lines_within(source.text))
    bare, name, offset = lines[number]
    same = [where for text, within, where in lines if (text, within) == (bare, name)]
    return {
        "file": file,
        "within": name,
        "line": bare,
        "occurrence": same.index(offset),
        "column": at - offset,
        "old": old,
        "new": new,
    }


def main() -> int:
    """Writes the list."""
    choices: list[tuple[str, Source, list[Fault]]] = []
    for path in sorted((ROOT / "amp_ext").rglob("*.py")):
        if path.parent.name in LEFT_OUT:
            continue
        source = Source(path.read_text())
        for statement in statements(source.tree):
            if faults := sorted(set(faults_of(source, statement))):
                choices.append((str(path.relative_to(ROOT)), source, faults))
    draw = random.Random(SEED)
    drawn = draw.sample(choices, COUNT)
    rows = [row_of(file, source, draw.choice(faults)) for file, source, faults in drawn]
    Path(DRAWN).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(rows)} of {len(choices)} statements drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
