"""Programs in C++ find the library with CMake, and what does not fit ends them when they start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from harness.rows import rows
from libraries import library_of_c

import amp_ext
from amp_ext import cmake

PACKAGE = Path(amp_ext.__file__).parent
SMOKE = Path(__file__).resolve().parent.parent / "cpp" / "smoke"
NO_VARIABLES: Mapping[str, str] = {"PATH": os.defpath}


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that knows none of our variables."""
    return subprocess.run(
        list(map(str, command)),
        env={**NO_VARIABLES, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def smoke(build_program) -> Path:
    """The program of tests/cpp/smoke."""
    build = SMOKE.parents[2] / "build" / "cpp_smoke"
    build_program(SMOKE, build, "Release")
    return build / "smoke"


@pytest.mark.slow
def test_a_program_calls_operations_and_catches_errors_without_python(smoke):
    done = run(smoke)
    wanted = "Float, Double, Half or BFloat16"
    told = f"caught: adam_: grads[0] must be {wanted}, got Long\nstepped by 0.5\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")
    linked = run("ldd", smoke).stdout
    assert f"libamp_ext.so => {PACKAGE / 'lib' / 'libamp_ext.so'} " in linked
    names = [line.split()[0] for line in linked.splitlines()]
    assert [name for name in names if "python" in name] == []


@pytest.mark.slow
def test_a_program_with_another_torch_is_told_at_its_first_step(smoke, tmp_path):
    major, minor = map(int, torch.__version__.split(".")[:2])
    older = f"unsigned long aoti_torch_abi_version(void) {{ return {major}ul << 56 | 3ul << 48; }}"
    other = library_of_c(older, tmp_path / "other.so")
    done = run(smoke, LD_PRELOAD=str(other))
    told = f"libamp_ext.so was built for torch {major}.{minor}, but torch {major}.3 is loaded"
    assert f"adam_: {told}" in done.stderr
    assert (done.returncode, done.stdout) != (0, "")


@pytest.mark.slow
def test_a_program_with_a_library_of_another_build_stops_when_it_starts(smoke, tmp_path):
    versions = tmp_path / "versions.map"
    versions.write_text("AMP_EXT_0.0.9 { local: *; };")
    library_of_c("", tmp_path / "libamp_ext.so", f"-Wl,--version-script={versions}")
    done = run(smoke, LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stdout) != (0, "")
    wanted = rf"libamp_ext\.so: version `AMP_EXT_{amp_ext.__version__}_torch_.*' not found"
    assert re.search(wanted, done.stderr)


def packages(folder: Path, torch_version: str) -> None:
    """Makes a torch that only tells its version, and a project that looks for amp_ext."""
    found = folder / "torch" / "share" / "cmake" / "Torch"
    found.mkdir(parents=True)
    (found / "TorchConfig.cmake").write_text("set(Torch_FOUND TRUE)")
    (found / "TorchConfigVersion.cmake").write_text(
        f"set(PACKAGE_VERSION {torch_version})\nset(PACKAGE_VERSION_COMPATIBLE TRUE)"
    )
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(looks LANGUAGES NONE)\n"
        "find_package(amp_ext REQUIRED)"
    )


@pytest.mark.slow
def test_another_torch_ends_the_configuration_with_the_reason(cmake_program, tmp_path):
    packages(tmp_path, "2.3.1")
    torch_folder = tmp_path / "torch" / "share" / "cmake" / "Torch"
    options = [f"-Damp_ext_DIR={cmake.folder()}", f"-DTorch_DIR={torch_folder}"]
    done = run(cmake_program, "-S", tmp_path, "-B", tmp_path / "build", *options)
    told = " ".join(done.stderr.split())
    assert done.returncode != 0
    built = f"this amp_ext was built for torch {torch.__version__}, but find_package(Torch) found"
    assert f"{built} 2.3.1 in {torch_folder}, and torch's C++ interface changes" in told


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["lib/libamp_ext.so", "share/cmake/amp_ext/amp_extBuild.cmake"])
def test_a_package_that_was_not_built_ends_the_configuration(
    cmake_program, tmp_path, copy, monkeypatch, capsys, missing
):
    packages(tmp_path, torch.__version__)
    (copy / missing).unlink()
    option = f"-Damp_ext_DIR={copy / 'share' / 'cmake' / 'amp_ext'}"
    done = run(cmake_program, "-S", tmp_path, "-B", tmp_path / "build", option)
    assert done.returncode != 0
    assert "libamp_ext.so is not there, or what its build notes" in " ".join(done.stderr.split())
    monkeypatch.setattr(cmake, "_PACKAGE", copy)
    monkeypatch.setattr(cmake, "build_folder", lambda: copy)
    assert cmake.main([]) == 1
    assert f"{copy / missing} is missing" in capsys.readouterr().err


VERSIONS = {
    "the-same": (amp_ext.__version__, True),
    "any-patch": (amp_ext.__version__.rpartition(".")[0], True),
    "later-patch": (f"{amp_ext.__version__}9", False),
    "later-minor": ("0.99", False),
    "earlier-minor": ("0.0.9", False),
    "later-major": ("7", False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "fits"), rows(VERSIONS))
def test_a_version_that_does_not_fit_is_not_taken(cmake_program, tmp_path, wanted, fits):
    script = tmp_path / "ask.cmake"
    script.write_text(
        f"set(PACKAGE_FIND_VERSION {wanted})\n"
        f'include("{cmake.folder()}/amp_extConfigVersion.cmake")\n'
        'message("${PACKAGE_VERSION} ${PACKAGE_VERSION_COMPATIBLE}")'
    )
    told = run(cmake_program, "-P", script).stderr
    assert told == f"{amp_ext.__version__} {'TRUE' if fits else 'FALSE'}\n"


def test_the_folder_is_printed(capsys):
    assert cmake.main([]) == 0
    assert capsys.readouterr().out == f"{PACKAGE / 'share' / 'cmake' / 'amp_ext'}\n"


# What each library exports, among others, and what it must not want.
LIBRARIES = {
    "host": ("libamp_ext.so", "_ZN7amp_ext5step_I", r"_?Py"),
    "kernels": (
        "libamp_ext_kernels.so",
        "_ZN7amp_ext3cpu13select_engine",
        r"_?Py|_ZN\w*(2at|3c10|5torch)",
    ),
}


@pytest.mark.parametrize(("library", "one", "unwanted"), rows(LIBRARIES))
def test_a_library_exports_names_of_amp_ext_alone(library, one, unwanted):
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    names = run("nm", "-D", PACKAGE / "lib" / library).stdout.splitlines()
    exported = [name.split()[-1] for name in names if name.split()[-2] not in "Uvw"]
    assert any(name.startswith(one) for name in exported)
    assert [
        name for name in exported if not re.search(r"^(_Z\w*?N?K?7amp_ext|AMP_EXT_)", name)
    ] == []
    assert [name for name in names if re.search(f" U ({unwanted})", name)] == []


LOAD_ALL = """
import ctypes, pathlib, torch, amp_ext

library = pathlib.Path(amp_ext.__file__).parent / "lib" / "libamp_ext.so"
amp_ext.ops.cpu_isa()
ctypes.CDLL(str(library))
torch.ops.load_library(library)
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
print(*sorted({line.split()[-1] for line in lines if "libamp_ext" in line}))
"""


@pytest.mark.slow
def test_a_process_has_each_library_once_however_it_is_loaded(run_module, tmp_path):
    (tmp_path / "load_all.py").write_text(LOAD_ALL)
    done = run_module("load_all", folder=tmp_path)
    library = (PACKAGE / "lib" / "libamp_ext").resolve()  # as the kernel lists it
    assert (done.stdout, done.stderr) == (f"{library}.so {library}_kernels.so\n", "")
