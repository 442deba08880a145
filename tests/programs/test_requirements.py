"""What is needed to build: the same everywhere, and nothing that PyTorch does not bear."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
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


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """What a wheel is made of, up to what is compiled."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py", "amp_ext/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "csrc").mkdir()
    for file in (ROOT / "csrc").glob("*_flags.txt"):
        shutil.copy(file, folder / "csrc")
    return folder


WITHOUT_COMPILING = """
import runpy, setuptools

whole = setuptools.setup
setuptools.setup = lambda **options: whole(**{**options, "ext_modules": []})
runpy.run_path("setup.py")
"""


def setup(sources: Path, *arguments: object) -> None:
    command = [sys.executable, "-c", WITHOUT_COMPILING, "-q", *map(str, arguments)]
    subprocess.run(command, cwd=sources, check=True, capture_output=True, text=True)


def asked_of_torch(metadata: bytes) -> list[str]:
    every = message_from_bytes(metadata).get_all("Requires-Dist") or []
    return [text for text in every if Requirement(text).name == "torch"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bdist_wheel", "editable_wheel"])
def test_a_wheel_asks_for_its_minor_release_of_torch_and_an_editable_one_for_any(
    sources, tmp_path, kind
):
    # The metadata that pip makes before any wheel, the same for both kinds.
    setup(sources, "dist_info", "--output-dir", tmp_path)
    (made,) = tmp_path.glob("*.dist-info")
    assert asked_of_torch((made / "METADATA").read_bytes()) == ["torch>=2.11"]
    setup(sources, kind, "--dist-dir", tmp_path, "--dist-info-dir", made)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (file for file in files.namelist() if file.endswith("/METADATA"))
        (asked,) = asked_of_torch(files.read(metadata))
    major, minor = torch.__version__.split(".")[:2]
    assert asked == (f"torch=={major}.{minor}.*" if kind == "bdist_wheel" else "torch>=2.11")
    assert Requirement(asked).specifier.contains(torch.__version__)
    later = Requirement(asked).specifier.contains(f"{major}.{int(minor) + 1}.0")
    assert later == (kind == "editable_wheel")
