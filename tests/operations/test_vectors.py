"""The vectors of each instruction set compute what numbers do, and store what they should."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from cuda_emulator import build

FOLDER = Path(__file__).parent
every_isa = pytest.mark.parametrize(("isa", "size"), [("plain", 16), ("avx2", 32), ("avx512", 64)])


def run_program(
    name: str,
    isa: str,
    size: int,
    folder: Path,
    *arguments: str,
    flags: Iterable[str] = (),
    level: str = "-O2",
) -> None:
    """Compiles a program for an instruction set and runs it; it prints what is wrong."""
    if size > 16 and platform.machine() != "x86_64":
        pytest.skip(f"{platform.machine()} has no {isa}")
    program = folder / "program"
    chosen = [f"-DAMP_EXT_ISA={isa}", f"-DAMP_EXT_VECTOR_BYTES={size}"]
    build.run(
        [build.CXX, *flags, *build.FLAGS, *chosen, level, str(FOLDER / name), "-o", str(program)]
    )
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(f"this processor lacks {isa}")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@every_isa
def test_vectors_and_formulas_on_them_give_the_bits_of_numbers(isa, size, tmp_path):
    run_program("vectors.cpp", isa, size, tmp_path)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags for sources that differ in nothing but the number of buffers."""
    folder = shutil.copytree(build.CSRC, tmp_path_factory.mktemp("four_buffers") / "csrc")
    header = folder / "kernels.h"
    text, count = re.subn(r"(?<=kMaxBuffers = ).+;", "4;", header.read_text())
    assert count == 1
    header.write_text(text)
    return [f"-I{folder}"]


@pytest.mark.slow
def test_four_buffers_in_any_order_are_stepped_by_engines(sources, tmp_path):
    isa, size = ("avx2", 32) if platform.machine() == "x86_64" else ("plain", 16)
    run_program("buffers.cpp", isa, size, tmp_path, flags=sources, level="-O0")  # compiles sooner


@pytest.mark.slow
@pytest.mark.skipif(bool(build.why_no_emulator()), reason=str(build.why_no_emulator()))
def test_four_buffers_in_any_order_are_stepped_by_kernels(sources, tmp_path):
    program = tmp_path / "program"
    files = [str(FOLDER / "buffers.cpp"), str(build.EMULATOR / "cuda_emulator.cpp")]
    flags = [*sources, *build.FLAGS, *build.EMULATE, "-O0", "-x", "c++"]
    build.run([build.CXX, *flags, *files, "-o", str(program)])
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(bool(build.why_no_emulator()), reason=str(build.why_no_emulator()))
def test_numbers_come_back_as_kernels_have_stored_them():
    (program,) = build.build_programs([([build.EMULATOR / "numbers.cu"], "")])
    stride = os.environ.get("AMP_EXT_NUMBER_STRIDE", "4001")
    done = subprocess.run([program, stride], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@every_isa
def test_numbers_come_back_as_they_were_stored(isa, size, tmp_path):
    stride = os.environ.get("AMP_EXT_NUMBER_STRIDE", "4001")
    run_program("numbers.cpp", isa, size, tmp_path, stride)
