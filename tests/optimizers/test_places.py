"""Every optimizer stands in all places where CONTRIBUTING.md wants a new one."""

from __future__ import annotations

import re
from pathlib import Path

import optimizer_cases as cases
import pytest
from list_operations import DESCRIBED, FEW_STEPS, OPERATIONS, STEPS
from optimizer_cases import CLASSES, ours

from amp_ext.ops import __all__ as names_of_ops

ROOT = Path(__file__).resolve().parents[2]
# What a file has of every class. What does not compile without it is not among them.
PLACES = {
    "README.md": r"and fused [^.]*\b{name}\b",
    "docs/index.md": r"and fused [^.]*\b{name}\b",
    "docs/cpp.md": r"[`:]{name}`",
    "CHANGELOG.md": r"`{name}`",
    "amp_ext/memory/__init__.py": r'"{key}": \d',
    "tests/cpp/program/deeds.h": r"AMP_EXT_MAKE\({name}\)",
    "tests/programs/test_cpp.py": r'^    "{name}": {{',
    "tests/programs/test_memory.py": r'\("{name}", ',
    "tests/optimizer_cases.py": r'^    "{name}": Kind\(',
    "scripts/hash_steps.py": r'\("{name}", ',
}


@pytest.mark.parametrize("place", PLACES)
def test_every_optimizer_stands_there(place):
    text = (ROOT / place).read_text()

    def stands(name):
        return re.search(PLACES[place].format(name=name, key=name.lower()), text, re.MULTILINE)

    missing = [name for name in CLASSES if not stands(name)]
    assert not missing, f"{place} lacks {missing}: nothing is like {PLACES[place]}"


def test_every_place_is_in_the_list_for_a_new_optimizer():
    steps = (ROOT / "CONTRIBUTING.md").read_text()
    steps = steps.partition("## Adding an optimizer")[2].partition("\n## ")[0]
    assert [place for place in PLACES if f"`{place}`" not in steps] == []


def test_every_optimizer_is_in_the_tables_of_the_tests():
    assert set(cases.NAMES) == set(CLASSES), "EACH_CLASS of optimizer_cases.py: one row of each"

    def formulas(rows):
        return {ours(row.values[0])._hyperparameters_class for row in rows}

    every = formulas(cases.OPTIMIZERS)
    assert formulas(cases.FEW_OPTIMIZERS) == every, "FEW_OPTIMIZERS of optimizer_cases.py"


def test_every_operation_is_in_the_tables_of_the_tests():
    operations = {described.operation for described in DESCRIBED}
    assert operations <= set(names_of_ops), "__all__ of ops.py"
    assert operations <= OPERATIONS.keys(), "OPERATIONS of list_operations.py"
    assert operations == {row.values[0] for row in STEPS}, "STEPS of list_operations.py"

    def kernels(rows):
        return {(name, len(OPERATIONS[name].buffers(options))) for name, options in rows}

    every = kernels(row.values for row in STEPS)
    assert kernels(row.values for row in FEW_STEPS) == every, "FEW of list_operations.py"
