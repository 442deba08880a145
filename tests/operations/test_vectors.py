"""The vectors of each instruction set compute what numbers do, lane by lane."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cuda_emulator import build

PROGRAM = Path(__file__).with_name("vectors.cpp")


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "size"), [("plain", 16), ("avx2", 32), ("avx512", 64)])
def test_vectors_and_formulas_on_them_give_the_bits_of_numbers(isa, size, tmp_path):
    program = tmp_path / "vectors"
    chosen = [f"-DAMP_EXT_ISA={isa}", f"-DAMP_EXT_VECTOR_BYTES={size}"]
    build.run([build.CXX, *build.FLAGS, *chosen, "-O2", str(PROGRAM), "-o", str(program)])
    done = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(f"this processor lacks {isa}")
    assert (done.returncode, done.stdout) == (0, "")
