"""A package whose binary is missing, broken or another PyTorch's imports, and explains itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amp_ext

PACKAGE = Path(amp_ext.__file__).parent
IMPORT_AND_USE = """
import torch, amp_ext
print("imported", amp_ext.GradScaler("cpu").get_scale())
try:
    amp_ext.ops.cpu_isa()
except ImportError as error:
    print("explained:", error)
"""


def remove_binary(package: Path, binary: Path) -> None:
    binary.unlink()


def break_binary(package: Path, binary: Path) -> None:
    binary.write_bytes(b"\x7fELF and nothing behind it")


def build_for_another_torch(package: Path, binary: Path) -> None:
    (package / "_build_info.json").write_text(json.dumps({"torch": "1.2.3", "python": "3.4.5"}))


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        pytest.param(remove_binary, "is not there for this Python", id="missing"),
        pytest.param(break_binary, "does not load", id="broken"),
        pytest.param(
            build_for_another_torch,
            "was built for torch 1.2.3 and Python 3.4.5",
            id="another-torch",
        ),
    ],
)
def test_a_bad_binary_is_explained_at_first_use(tmp_path, damage, wanted):
    package = tmp_path / "amp_ext"
    shutil.copytree(PACKAGE, package)
    (binary,) = package.glob("_C.*.so")
    damage(package, binary)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_USE],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "imported 65536.0" in done.stdout
    assert wanted in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    assert "pip install --no-build-isolation" in done.stdout


@pytest.mark.parametrize("note", ["", "{", "[]", '{"cuda": null}'])
def test_a_damaged_note_of_the_build_does_no_harm(tmp_path, note):
    package = tmp_path / "amp_ext"
    shutil.copytree(PACKAGE, package)
    (package / "_build_info.json").write_text(note)
    done = subprocess.run(
        [sys.executable, "-c", "import amp_ext; print(amp_ext.ops.cpu_isa())"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == amp_ext.ops.cpu_isa()
