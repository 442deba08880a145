"""Counts the code of the product, the tests and the tools.

Prints for each of them the lines of code, without comments, docstrings and blank lines, and the
number of functions and classes. Then follow the ten longest functions of the product. With
``--files`` the lines of each file of the product are printed, too. Only the Python and C++
sources that git tracks are counted.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

PARTS = {
    "product": ("amp_ext/", "csrc/"),
    "tests": ("tests/",),
    "tools": ("scripts/", "benchmarks/", "examples/"),
}
CPP = (".cpp", ".h", ".cu", ".cuh")
TEXT_OR_COMMENT = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])*'", re.DOTALL
)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
Functions = list[tuple[int, str]]  # the lines and the name of each


def count_python(text: str) -> tuple[set[int], Functions, int]:
    """Returns the lines of code, the functions and the number of classes of a Python source."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.string:
            code.update(range(token.start[0], token.end[0] + 1))
    functions: Functions = []
    classes = 0
    definitions = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                code.difference_update(range(first.lineno, first.end_lineno + 1))
            classes += isinstance(node, ast.ClassDef)
            if not isinstance(node, (ast.Module, ast.ClassDef)):
                definitions.append(node)
    for node in definitions:
        lines = code.intersection(range(node.lineno, node.end_lineno + 1))
        functions.append((len(lines), node.name))
    return code, functions, classes


def count_cpp(text: str) -> tuple[set[int], Functions, int]:
    """Returns the lines of code, the functions and the number of classes of a C++ source.

    A function is a block with parameters outside of other functions, so lambdas do not count.
    """
    blanked = TEXT_OR_COMMENT.sub(
        lambda found: "\n" * found[0].count("\n") + ("" if found[0][0] == "/" else '""'), text
    )
    code = {number for number, line in enumerate(blanked.split("\n"), 1) if line.strip()}
    bare = re.sub(
        r"^[ \t]*#(.*\\\n)*.*", lambda found: "\n" * found[0].count("\n"), blanked, flags=re.M
    )
    functions: Functions = []
    classes, inside = 0, 0  # inside: the depth of braces in the present function
    scopes: list[tuple[str, str, int]] = []
    header, line, start = "", 1, 1
    for char in bare:
        line += char == "\n"
        if inside:
            inside += (char == "{") - (char == "}")
            if not inside:
                _, name, first = scopes.pop()
                functions.append((len(code.intersection(range(first, line + 1))), name))
                header = ""
            continue
        if char not in "{};":
            start = line if not header.strip() else start
            header += char
            continue
        if char == "{":
            name = re.search(r"([\w:~]+|operator[^\w\s]+)\s*\(", header)
            if re.search(r"\b(class|struct|union|enum)\b[^()]*$", header) and "=" not in header:
                classes += "enum" not in header
                scopes.append(("class", "", line))
            elif re.search(r"\bnamespace\b|\bextern\b", header) or name is None:
                scopes.append(("other", "", line))
            else:
                scopes.append(("function", name[1], start))
                inside = 1
        elif char == "}" and scopes:
            scopes.pop()
        header = ""
    return code, functions, classes


def main() -> None:
    """Counts and prints."""
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    longest: Functions = []
    for part, folders in PARTS.items():
        lines = definitions = 0
        for name in tracked.stdout.splitlines():
            if not name.startswith(folders) or not name.endswith((".py", ".pyi", *CPP)):
                continue
            text = Path(name).read_text()
            count = count_cpp if name.endswith(CPP) else count_python
            code, functions, classes = count(text)
            lines += len(code)
            definitions += len(functions) + classes
            if part == "product":
                longest += [(length, f"{each} ({name})") for length, each in functions]
                if "--files" in sys.argv:
                    print(f"{len(code):6} {name}")
        print(f"{part:8} {lines:6} lines of code, {definitions:5} functions and classes")
    for length, where in sorted(longest, reverse=True)[:10]:
        print(f"{length:6} {where}")


if __name__ == "__main__":
    main()
