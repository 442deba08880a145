"""Checks that includes and imports follow the layers of the code.

A folder of csrc/ may include itself and lower layers of ``FOLDERS``, but no other folder of its own
layer. Public headers (csrc/include) may include only public headers.

Prints each violation as ``file:line: what is wrong`` and exits with 1 if there is one.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PUBLIC = CSRC / "include"

CXX = {".h", ".cuh", ".cpp", ".cu"}
# Maps each folder and each file at the top of csrc/ to its layer; higher layers use lower ones.
FOLDERS = {
    "numeric.h": 0,
    "formats": 1,
    "formulas": 2,
    "kernels.h": 3,
    "launches.h": 4,
    "element.h": 5,
    "judge_norm.h": 6,
    "cpu": 7,
    "cuda": 7,
    "devices": 8,
    "tensors": 8,
    "ops": 9,
    "libtorch": 10,
    "python": 11,
}
LIBTORCH, PYTHON = FOLDERS["libtorch"], FOLDERS["python"]
TORCH_FREE = [name for name, layer in FOLDERS.items() if layer <= FOLDERS["cuda"]]
# The layers of public headers that include torch's headers but stand below csrc/libtorch. Other
# public headers are in the layer of csrc/libtorch if they do, else in the lowest.
PUBLIC_LAYERS = {
    "autocast.h": FOLDERS["tensors"],
    "options.h": FOLDERS["tensors"],
    "ops.h": FOLDERS["ops"],
}

INCLUDE = re.compile(r'#\s*include\s*([<"])([^>"]+)[>"]')
TORCH = re.compile(r"(torch|ATen|c10)/")
# Plain C headers that define torch's version.
VERSION = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/headeronly/version.h")
OF_PYTHON = re.compile(
    r"pybind11/|Python\.h|torch/(torch|all|extension|python)\.h"
    r"|torch/csrc/(Exceptions|THP|Export|python|utils/py)"
)
OF_SCALER = re.compile(
    r"amp_ext\.(scaler|(sharded_)?grad_scaler|scaler_stats|(Sharded)?GradS\w+)\b"
)
CUDA = re.compile(r"cuda|cub/|thrust/|cooperative_groups|nv|c10/cuda/|ATen/cuda/")


def layer(path: Path) -> int:
    """Returns the layer of a file of csrc/ or of a public header."""
    if not path.is_relative_to(PUBLIC):
        return FOLDERS[path.relative_to(CSRC).parts[0]]
    if path.name in PUBLIC_LAYERS:
        return PUBLIC_LAYERS[path.name]
    return LIBTORCH if any(TORCH.match(name) for name in all_included(path)) else 0


def includes(path: Path) -> Iterator[tuple[int, bool, str]]:
    """Yields for each include its line number, True if its name is in "" (not <>), and the name."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := INCLUDE.match(line.lstrip()):
            yield number, found[1] == '"', found[2]


def all_included(path: Path) -> Iterator[str]:
    """Yields the names that a public header includes, also through other public headers."""
    for _, _, name in includes(path):
        yield name
        if (PUBLIC / name).is_file():
            yield from all_included(PUBLIC / name)


def check_includes() -> Iterator[tuple[Path, int, str]]:
    """Yields the violations in headers and C++ and CUDA files as path, line and message."""
    cuda_users: set[Path] = set()
    for path in sorted(file for file in CSRC.rglob("*") if file.is_file()):
        is_public = path.is_relative_to(PUBLIC)
        if is_public and (path.suffix != ".h" or path.parent != PUBLIC / "amp_ext"):
            yield path, 1, "only headers of the folder amp_ext are public"
        if path.suffix not in CXX:
            continue
        folder, mine = path.relative_to(CSRC).parts[0], layer(path)
        for line, quoted, name in includes(path):
            written = f'"{name}"' if quoted else f"<{name}>"
            target = (CSRC if quoted else PUBLIC) / name
            if quoted or name.startswith("amp_ext/"):
                if is_public and quoted:
                    yield path, line, f"{written} is not a public header"
                elif ".." in name or not target.is_file():
                    where = "path inside csrc" if quoted else "public header"
                    yield path, line, f"{written} is not a {where}"
                elif layer(target) > mine:
                    yield path, line, f"{written} belongs to a higher layer"
                elif quoted and layer(target) == mine and Path(name).parts[0] != folder:
                    yield path, line, f"{written} belongs to another folder of the same layer"
            elif not is_public:
                if TORCH.match(name) and folder in TORCH_FREE:
                    yield path, line, f"{written}: no PyTorch header in {folder}"
                if OF_PYTHON.match(name) and mine < PYTHON:
                    yield path, line, f"{written} belongs to the bindings"
                elif name.startswith("torch/") and name not in VERSION and mine < LIBTORCH:
                    yield path, line, f"{written} belongs to libtorch/: ATen and c10 serve here"
                if CUDA.match(name) and folder != "cuda":
                    cuda_users.add(path)
                    if len(cuda_users) > 1:
                        names = ", ".join(sorted(user.name for user in cuda_users))
                        why = f"one file outside cuda/ may name CUDA, not {names}"
                        yield path, line, f"{written}: {why}"


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and full name of each import; the string "amp_ext._C" counts as an import."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value == "amp_ext._C":
            yield node.lineno, "amp_ext._C"


def check_imports() -> Iterator[tuple[Path, int, str]]:
    """Yields the violations in the package's Python files as path, line and message."""
    for path in sorted((ROOT / "amp_ext").rglob("*.py")):
        inside = path.relative_to(ROOT / "amp_ext").as_posix()
        for line, name in imports(path, ast.parse(path.read_text())):
            if re.match(r"amp_ext\._C\b", name) and inside not in ("binary.py", "ops.py"):
                yield path, line, "only ops.py knows _C, which binary.py loads"
            is_protocol = inside == "amp_protocol.py"
            is_of_scaler = inside.startswith("scaler/")
            is_optimizer = inside.startswith("optim/")
            if (is_of_scaler or is_protocol) and re.match(r"amp_ext\.optim\b", name):
                yield path, line, f"the scaler and its protocol must not import {name}"
            if (is_optimizer or is_protocol) and OF_SCALER.match(name):
                yield path, line, f"an optimizer and its protocol must not import {name}"


def main() -> int:
    """Prints all violations and returns the exit code."""
    violations = [*check_includes(), *check_imports()]
    for path, line, text in violations:
        print(f"{path.relative_to(ROOT)}:{line}: {text}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
