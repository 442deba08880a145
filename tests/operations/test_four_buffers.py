"""A formula with more buffers than any of the package has is stepped by engines and by kernels."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_emulator import build

PROGRAM = Path(__file__).with_name("buffers.cpp")
ISA = ("avx2", 32) if platform.machine() == "x86_64" else ("plain", 16)
ENGINE = [f"-DAMP_EXT_ISA={ISA[0]}", f"-DAMP_EXT_VECTOR_BYTES={ISA[1]}"]
KERNELS = [*build.EMULATE, "-x", "c++", str(build.EMULATOR / "cuda_emulator.cpp")]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ENGINE, KERNELS], ids=["engine", "kernels"])
def test_four_buffers_in_any_order_are_stepped(flags, tmp_path):
    """The sources are those of the package but for the number of buffers."""
    if flags is KERNELS and build.why_no_emulator():
        pytest.skip(str(build.why_no_emulator()))
    sources = shutil.copytree(build.CSRC, tmp_path / "csrc")
    header, program = sources / "kernels.h", tmp_path / "program"
    text, count = re.subn(r"(?<=kMaxBuffers = ).+;", "4;", header.read_text())
    assert count == 1
    header.write_text(text)
    flags = [f"-I{sources}", *build.FLAGS, "-O0", *flags]  # compiles sooner
    build.run([build.CXX, *flags, str(PROGRAM), "-o", str(program)])
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
