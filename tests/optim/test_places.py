"""Every optimizer stands in all places where CONTRIBUTING.md wants a new one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.list_operations import DESCRIBED
from harness.optimizer_cases import CLASSES

ROOT = Path(__file__).resolve().parents[2]
# A file, what it has of every class or of every operation, and the line that a new one adds. What
# does not compile without it is not among them.
PLACES = [
    (
        "amp_ext/ops.py",
        r"^def {operation}\(",
        "@step_operation, def {operation}(params, grads, ...)",
    ),
    ("amp_ext/ops.py", r'^    "{operation}",$', '"{operation}", to __all__'),
    (
        "csrc/include/amp_ext/amp_ext.h",
        r"^using {name} = FusedOptimizer<{name}Options>;$",
        "using {name} = FusedOptimizer<{name}Options>;",
    ),
    (
        "tests/programs/test_cpp.py",
        r'^    "\S.*": \(\s*"{name}",',
        '"{key}": ("{name}", "float32", {{}}), to CASES',
    ),
    (
        "tests/harness/list_operations.py",
        r'^    "{operation}": described\(',
        '"{operation}": described("{operation}", ...), to OPERATIONS',
    ),
    (
        "tests/harness/list_operations.py",
        r'^        "\S+": \("{operation}", ',
        '"{key}": ("{operation}", {{}}), to STEPS',
    ),
    (
        "tests/harness/list_operations.py",
        r'^        "\S+-dithered": \("{operation}", ',
        '"{key}-dithered": ("{operation}", {{"dither": True}}), to DITHERED_STEPS',
    ),
    (
        "tests/harness/optimizer_cases.py",
        r'^    "{name}": Kind\(',
        '"{name}": Kind(...), to KINDS',
    ),
    (
        "tests/harness/optimizer_cases.py",
        r'^        \("\S+", "{name}", ',
        '("{key}", "{name}", {{}}), to OPTIMIZERS',
    ),
    ("CHANGELOG.md", r"`{name}`", "- `{name}`, which ..., under Added"),
]


@pytest.mark.parametrize(("place", "pattern", "line"), PLACES)
def test_every_optimizer_stands_there(place: str, pattern: str, line: str) -> None:
    names = [{"name": name, "key": name.lower()} for name in CLASSES]
    if "{operation}" in pattern:
        names = [
            {"name": name, "key": name.strip("_"), "operation": name}
            for name in (cls.operation for cls in DESCRIBED)
        ]
    text = (ROOT / place).read_text()
    lacking = [
        f"{place} lacks {words['name']}: add {line.format(**words)}"
        for words in names
        if not re.search(pattern.format(**words), text, re.MULTILINE)
    ]
    assert not lacking, "\n".join(lacking)


def test_every_place_is_in_the_list_for_a_new_optimizer() -> None:
    steps = (ROOT / "CONTRIBUTING.md").read_text()
    steps = steps.partition("**An optimizer**")[2].partition("**A number format**")[0]
    assert [place for place, _, _ in PLACES if f"`{place}`" not in steps] == []
