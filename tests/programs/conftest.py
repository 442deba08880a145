"""Programs in C++, and copies of the package, to be broken."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_ext
from amp_ext import cmake

PACKAGE = Path(amp_ext.__file__).parent
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

BuildProgram = Callable[[Path, Path, str], None]


@pytest.fixture(scope="session")
def cmake_program() -> str:
    """The path of CMake, which may be a package of this Python."""
    folders = os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")
    found = shutil.which("cmake", path=os.pathsep.join(folders))
    if found is None:
        if os.environ.get("AMP_EXT_REQUIRE_CMAKE") == "1":
            pytest.fail("there is no CMake")
        pytest.skip("there is no CMake")
    return found


@pytest.fixture(scope="session")
def build_program(cmake_program: str) -> BuildProgram:
    """Builds a program in C++ in a folder, with CMake and the library of this package."""
    options, environment = [f"-Damp_ext_DIR={cmake.folder()}"], dict(os.environ)
    toolkit = json.loads((PACKAGE / "_build_info.json").read_text())["cuda_home"]
    if toolkit is not None:  # which torch's own files ask for; nvcc on the PATH may be a wrapper
        options += [f"-DCUDAToolkit_ROOT={toolkit}", f"-DCUDA_TOOLKIT_ROOT_DIR={toolkit}"]
        environment["CUDACXX"] = f"{toolkit}/bin/nvcc"

    def build(source: Path, folder: Path, kind: str) -> None:
        configure = ["-S", source, "-B", folder, f"-DCMAKE_BUILD_TYPE={kind}", *options]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:  # other workers may build it too
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "CMakeCache.txt").unlink(missing_ok=True)  # of another torch, maybe
            for command in (configure, ["--build", folder]):
                done = subprocess.run(
                    [cmake_program, *map(str, command)],
                    env=environment,
                    capture_output=True,
                    text=True,
                )
                assert done.returncode == 0, done.stdout + done.stderr

    return build


TESTS = Path(__file__).resolve().parents[1]
CPP_PROGRAM = TESTS.parent / "build" / "cpp_program"


@pytest.fixture(scope="module")
def run(build_program: BuildProgram) -> Callable[..., None]:
    """Builds the program in C++ as a user of the package would; returns what runs its commands."""
    build_program(TESTS / "cpp" / "program", CPP_PROGRAM, "Debug")
    # One thread, as one_thread says; checks of threads make their own.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> None:
        program = [CPP_PROGRAM / "program", *command]
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to be broken."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "amp_ext"))
