"""Lists the public API, so that a change of it shows as a changed line of a file.

    python scripts/surface.py --write    # writes scripts/surface.txt
    python scripts/surface.py --check    # prints removed and added lines

Lists the functions, classes and methods of public modules with their signatures; the keys of state
dicts for each optimizer and state format; and the options of the command lines. The public headers
of csrc/include list what C++ programs use.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import inspect
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".txt")
sys.path[:0] = [str(ROOT / "tests")]
sys.path.append(str(ROOT))  # last, so that an installed amp_ext comes first

import checkpoint_corpus as corpus  # noqa: E402
import torch  # noqa: E402
from harness.optimizer_cases import CLASSES  # noqa: E402

import amp_ext  # noqa: E402

MODULES = (
    "amp_ext",
    "amp_ext.cmake",
    "amp_ext.compiled_ops",
    "amp_ext.memory",
    "amp_ext.ops",
    "amp_ext.optim",
    "amp_ext.tensor_core",
    "amp_ext.training",
)
PROGRAMS = ("bench", "info", "memory")


def of_class(name: str, kind: type) -> Iterator[str]:
    """Yields a class and its public members, except those inherited from other packages."""
    # The signature of an enumeration depends on the version of Python, so it is left out.
    yield name if issubclass(kind, enum.Enum) else f"{name}{inspect.signature(kind)}"
    for member in sorted({member for each in kind.__mro__ for member in vars(each)}):
        owner = next(each for each in kind.__mro__ if member in vars(each))
        if member.startswith("_") or not owner.__module__.startswith("amp_ext"):
            continue
        value = inspect.getattr_static(kind, member)
        function = getattr(value, "__func__", value)
        is_function = inspect.isfunction(function)
        yield f"{name}.{member}{inspect.signature(function) if is_function else ''}"


def of_python() -> Iterator[str]:
    """Yields the names and signatures in the public modules."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        public = [name for name in own if not name.startswith("_")]
        for name in sorted(getattr(module, "__all__", public)):
            value, full = getattr(module, name), f"{module_name}.{name}"
            if inspect.isclass(value):
                yield from of_class(full, value)
            else:
                yield f"{full}{inspect.signature(value) if inspect.isfunction(value) else ''}"


def of_states() -> Iterator[str]:
    """Yields the keys of groups and states, and of a vector's state if its keys are different."""
    for row in corpus.ROWS:
        written = corpus.run_in_python(corpus.plan_of(row, corpus.parts_of(row)[1]))["optimizer"]
        first, second = (list(written["state"].get(index, {})) for index in (0, 1))
        yield f"state of {row}: {' '.join(first)}"
        if second != first:
            yield f"state of {row}, a vector: {' '.join(second)}"
    for name in CLASSES:
        optimizer = getattr(amp_ext.optim, name)([torch.ones(1, requires_grad=True)])
        (group,) = optimizer.state_dict()["param_groups"]
        yield f"options of {name}: {' '.join(sorted(group))}"
    yield f"state of GradScaler: {' '.join(amp_ext.GradScaler('cpu').state_dict())}"


def of_programs() -> Iterator[str]:
    """Yields the command-line options of each program."""
    for name in PROGRAMS:
        text = io.StringIO()
        arguments, sys.argv = sys.argv, [name, "--help"]
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            runpy.run_module(f"amp_ext.{name}", run_name="__main__", alter_sys=False)
        sys.argv = arguments
        options = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text.getvalue())))
        yield f"python -m amp_ext.{name}: {' '.join(options)}"


def surface() -> list[str]:
    """Returns all lines of the list, sorted."""
    return sorted({*of_python(), *of_states(), *of_programs()})


def main() -> int:
    """Checks or writes the list; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare with the file")
    what.add_argument("--write", action="store_true", help="write the file, after a meant change")
    arguments = parser.parse_args()
    found = surface()
    if arguments.write:
        FILE.write_text("".join(f"{line}\n" for line in found))
        return 0
    expected = FILE.read_text().splitlines()
    gone, new = (
        [line for line in a if line not in b] for a, b in ((expected, found), (found, expected))
    )
    print("".join(f"- {line}\n" for line in gone) + "".join(f"+ {line}\n" for line in new), end="")
    return 1 if gone or new else 0


if __name__ == "__main__":
    sys.exit(main())
