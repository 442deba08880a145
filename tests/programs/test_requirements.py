"""What is needed to build: the same everywhere, and nothing that PyTorch does not bear."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = ["README.md", "docs/quickstart.md", "pyproject.toml", "scripts/cuda_build.sh", "setup.py"]
PINNED = re.search(r"^setuptools==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)


def setuptools_of(file: str) -> Requirement:
    (text,) = re.findall(r"[\"'](setuptools[<>=][^\"']*)[\"']", (ROOT / file).read_text())
    return Requirement(text)


@pytest.mark.parametrize("file", FILES)
def test_setuptools_has_one_range_with_the_pinned_release_and_without_82(file):
    """PyTorch 2.11 wants a release below 82; below 77 none knows a licence expression."""
    range_of_file = setuptools_of(file).specifier
    assert range_of_file == setuptools_of("pyproject.toml").specifier
    assert PINNED is not None
    assert range_of_file.contains(PINNED[1])
    assert range_of_file.contains("77.0.3")
    assert not range_of_file.contains("82.0.0")
    assert not range_of_file.contains("76.1.0")


def test_the_pinned_setuptools_is_one_that_this_pytorch_takes():
    wanted = map(Requirement, importlib.metadata.requires("torch") or [])
    ranges = [each.specifier for each in wanted if each.name == "setuptools" and not each.marker]
    assert PINNED is not None
    assert all(each.contains(PINNED[1]) for each in ranges)
