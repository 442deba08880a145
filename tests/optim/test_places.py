"""Every optimizer stands in all places where CONTRIBUTING.md wants a new one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.list_operations import DESCRIBED
from harness.optimizer_cases import CLASSES

ROOT = Path(__file__).resolve().parents[2]
# A file, and the beginning of the line that it has for every class or every operation. What does
# not compile without it is not among them.
PLACES = [
    ("amp_ext/ops.py", r"def {operation}\("),
    ("amp_ext/ops.py", r'    "{operation}",$'),
    ("csrc/include/amp_ext/amp_ext.h", r"using {name} = FusedOptimizer<{name}Options>;$"),
    ("tests/programs/test_cpp.py", r'    "\S.*": \(\s*"{name}",'),
    ("tests/harness/list_operations.py", r'    "{operation}": described\('),
    ("tests/harness/list_operations.py", r'        "\S+": \("{operation}", '),
    ("tests/harness/list_operations.py", r'        "\S+-dithered": \("{operation}", '),
    ("tests/harness/optimizer_cases.py", r'    "{name}": Kind\('),
    ("tests/harness/optimizer_cases.py", r'        \("\S+", "{name}", '),
    ("CHANGELOG.md", r".*`{name}`"),
]


@pytest.mark.parametrize(("place", "pattern"), PLACES)
def test_every_optimizer_stands_there(place: str, pattern: str) -> None:
    names = [{"name": name} for name in CLASSES]
    if "{operation}" in pattern:
        names = [{"operation": described.operation} for described in DESCRIBED]
    text = (ROOT / place).read_text()
    for words in names:
        line = f"^{pattern.format(**words)}"
        assert re.search(line, text, re.MULTILINE), f"{place} lacks a line {line}"


def test_every_place_is_in_the_list_for_a_new_optimizer() -> None:
    steps = (ROOT / "CONTRIBUTING.md").read_text()
    steps = steps.partition("**An optimizer**")[2].partition("**A number format**")[0]
    assert [place for place, _ in PLACES if f"`{place}`" not in steps] == []
