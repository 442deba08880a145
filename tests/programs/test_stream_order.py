"""The order of several streams, checked without a GPU by streams that are vector clocks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles the check."""
    folder, program = Path(torch.__file__).parent, tmp_path_factory.mktemp("streams") / "program"
    options = [f"-I{ROOT / 'csrc'}", f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
    options += ["-lc10", f"-Wl,-rpath,{folder / 'lib'}"]
    source = ROOT / "tests/cpp/stream_order.cpp"
    compiler = os.environ.get("CXX", "g++").split()
    subprocess.run([*compiler, "-std=c++20", source, *options, "-o", program], check=True)
    return program


def test_streams_of_hooks_wait_for_each_other(program: Path) -> None:
    assert subprocess.run([program], capture_output=True, text=True).stdout == "ordered\n"


@pytest.mark.parametrize("left_out", ["begin", "enter", "join"])
def test_a_missing_wait_is_noticed(program: Path, left_out: str) -> None:
    process = subprocess.run([program, left_out], capture_output=True, text=True)
    assert "reads before stream" in process.stdout
