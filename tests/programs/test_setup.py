"""What is needed to build, the same everywhere, and what setup.py chooses before it compiles."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.rows import rows
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "setup.py"
GIB = 2**30


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """The functions of setup.py, of which nothing is run."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    body = [node for node in ast.parse(SETUP.read_text()).body if isinstance(node, kinds)]
    functions: dict[str, Any] = {}
    exec(compile(ast.Module(body, []), SETUP, "exec"), functions)
    return functions


V1 = "9:memory:/jobs\n3:cpu,cpuacct:/\n1:name=systemd:/\n"
V2 = "0::/user/jobs\n"
# What /proc/self/cgroup says, files below /sys/fs/cgroup, and the jobs of 16 cores.
GROUPS = {
    "none": ("", {}, 16),
    "v1-memory": (V1, {"memory/jobs/memory.limit_in_bytes": 5 * GIB}, 2),
    "v1-memory-of-the-parent": (V1, {"memory/memory.limit_in_bytes": 7 * GIB}, 3),
    "v1-seen-from-inside": ("9:memory:/docker/1f\n", {"memory/memory.limit_in_bytes": GIB}, 1),
    "v1-cores": (V1, {"cpu/cpu.cfs_quota_us": 450_000, "cpu/cpu.cfs_period_us": 100_000}, 4),
    "v1-no-limit": (
        V1,
        {
            "memory/memory.limit_in_bytes": 2**63 - 4096,
            "cpu/cpu.cfs_quota_us": -1,
            "cpu/cpu.cfs_period_us": 100_000,
        },
        16,
    ),
    "v2-memory": (V2, {"user/jobs/memory.max": 4 * GIB}, 2),
    "v2-memory-of-the-parent": (V2, {"user/jobs/memory.max": "max", "user/memory.max": 6 * GIB}, 3),
    "v2-cores": (V2, {"cpu.max": "max 100000", "user/jobs/cpu.max": "500000 100000"}, 5),
    "v2-half-a-core": (V2, {"user/jobs/cpu.max": "50000 100000"}, 1),
    "v2-no-limit": (V2, {"user/jobs/memory.max": "max", "user/jobs/cpu.max": "max 100000"}, 16),
}


@pytest.mark.parametrize(("groups", "files", "jobs"), rows(GROUPS))
def test_limits_of_a_container_count_for_the_jobs(
    setup, monkeypatch, tmp_path, groups, files, jobs
):
    for name, content in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": f"{content}\n" for name, content in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    sizes = {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    setup["bound_jobs"](tmp_path)
    assert os.environ["MAX_JOBS"] == str(jobs)
    monkeypatch.setenv("MAX_JOBS", "7")
    setup["bound_jobs"](tmp_path)
    assert os.environ["MAX_JOBS"] == "7"


@pytest.mark.slow
def test_a_compiler_that_fails_names_the_variable_of_the_jobs(run_module, tmp_path):
    (tmp_path / "csrc").mkdir()
    for file in (SETUP, ROOT / "pyproject.toml", *ROOT.glob("csrc/*_flags.txt")):
        (tmp_path / file.relative_to(ROOT)).write_text(file.read_text())
    variables = {"MAX_JOBS": "3", "AMP_EXT_CUDA": "0"}
    # There are no sources.
    done = run_module("setup", "build_ext", "--inplace", folder=tmp_path, **variables)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == (
        "amp_ext: if the compiler was killed, there was too little memory for MAX_JOBS=3 "
        "compilers at once: set MAX_JOBS to fewer."
    )


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_cuda_home_without_a_compiler_is_refused_by_name(setup, monkeypatch, tmp_path, name):
    for each in ("CUDA_HOME", "CUDA_PATH", "AMP_EXT_CUDA"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(SystemExit, match=rf"{name} is {tmp_path}, which has no bin/nvcc\."):
        setup["choose_cuda"]()
    monkeypatch.setenv("AMP_EXT_CUDA", "0")
    assert setup["choose_cuda"]() is False


# The CUDA of the nvcc on the PATH and of pip's, and the folder of the one that CUDA 13.2 takes.
COMPILERS = {
    "path": ("13.0", None, "path"),
    "path-first": ("13.0", "13.2", "path"),
    "pip": (None, "13.2", "nvidia/cu13"),
    "another-on-the-path": ("12.8", "13.2", "nvidia/cu13"),
}


@pytest.fixture
def compilers(setup, monkeypatch, tmp_path) -> Callable[..., None]:
    """Makes compilers that tell their folder and version; hides those of this machine."""
    for each in ("CUDA_HOME", "CUDA_PATH", "AMP_EXT_CUDA"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")

    def compilers(needed: str, **versions: str | None) -> None:
        monkeypatch.setattr(torch.version, "cuda", needed)
        for name, version in versions.items():
            nvcc = tmp_path / {"pip": "nvidia/cu13"}.get(name, name) / "bin" / "nvcc"
            if version is not None:
                nvcc.parent.mkdir(parents=True)
                nvcc.write_text(
                    f"#!/bin/sh\necho release {version},\necho '#$ TOP={nvcc.parents[1]}' >&2"
                )
                nvcc.chmod(0o755)

        def which(name: str) -> str | None:
            file = tmp_path / "path" / "bin" / name  # an absolute name stays as it is
            return str(file) if file.is_file() and file.is_relative_to(tmp_path) else None

        monkeypatch.setattr(shutil, "which", which)
        packages = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: packages)

    return compilers


@pytest.mark.parametrize(("path", "pip", "taken"), rows(COMPILERS))
def test_a_compiler_of_the_major_version_is_taken(setup, compilers, tmp_path, path, pip, taken):
    compilers("13.2", path=path, pip=pip)
    assert setup["choose_cuda"]() is True
    assert os.environ["CUDA_HOME"] == str(tmp_path / taken)


WITH_PIP = "To install nvcc: pip install 'cuda-toolkit[nvcc,nvvm,cccl]==13.2.*'"
WITH_TOOLKIT = "Install the toolkit of CUDA 12.8, and set CUDA_HOME to its folder."
# CUDA of PyTorch, CUDA of the nvcc on the PATH, and two of the three lines.
NO_COMPILER = {
    "none": ("13.2", None, "no nvcc of CUDA 13 was found.", WITH_PIP),
    "another": ("13.2", "12.8", "CUDA 13 was found, only {}/path of 12.8.", WITH_PIP),
    "cuda-12": ("12.8", "13.0", "CUDA 12 was found, only {}/path of 13.0.", WITH_TOOLKIT),
}


@pytest.mark.parametrize("choice", ["", "1"])
@pytest.mark.parametrize(("needed", "path", "missing", "cure"), rows(NO_COMPILER))
def test_without_a_compiler_the_build_stops_with_three_lines(
    setup, compilers, monkeypatch, tmp_path, needed, path, missing, cure, choice
):
    compilers(needed, path=path)
    monkeypatch.setenv("AMP_EXT_CUDA", choice)
    with pytest.raises(SystemExit) as ended:
        setup["choose_cuda"]()
    lines = str(ended.value).strip().splitlines()
    assert lines[0].startswith(f"amp_ext: PyTorch {torch.__version__} has CUDA {needed}, but no")
    assert lines[0].endswith(missing.format(tmp_path))
    assert lines[1:] == [cure, "To build for the CPU alone: set AMP_EXT_CUDA=0."]


RUNTIMES = {
    "toolkit": (["libcudart.so", "libcudart.so.13"], "cudart"),
    "pip": (["libcudart.so.13"], ":libcudart.so.13"),
    "for-the-linker-to-find": ([], "cudart"),
}


@pytest.mark.parametrize(("files", "name"), rows(RUNTIMES))
def test_the_runtime_is_linked_by_its_file_where_it_has_no_plain_name(setup, tmp_path, files, name):
    for file in files:
        (tmp_path / file).touch()
    settings = {"with_cuda": True, "library_dirs": [str(tmp_path)]}
    libraries = types.FunctionType(setup["cuda_runtime"].__code__, {**setup, **settings})
    assert libraries() == [name]


# Requirements.

FILES = ["README.md", "docs/quickstart.md", "pyproject.toml", "setup.py", "Dockerfile"]
FILES += ["scripts/own_environment.sh"]
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


def test_the_docker_image_has_the_pinned_torch_and_is_the_one_of_the_page():
    dockerfile = (ROOT / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    torch_of_base, cuda = re.fullmatch(r"pytorch/pytorch:([\d.]+)-cuda(\d+).*-devel", base).groups()
    assert f"torch=={torch_of_base}\n" in (ROOT / "requirements.txt").read_text()
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"`{base}`" in page
    assert f"CUDA {cuda} was tested" in page
    # The page sets no argument that the Dockerfile does not have.
    arguments = set(re.findall(r"--build-arg (\w+)=", page))
    assert arguments == {"AMP_EXT_CUDA", "BASE", "TORCH_CUDA_ARCH_LIST"}
    assert arguments <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


SOURCES = ["LICENSE", "README.md", "pyproject.toml", "setup.py", "amp_ext/__init__.py"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """What a wheel is made of, up to what is compiled."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
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


def run_setup(sources: Path, *arguments: object) -> None:
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
    run_setup(sources, "dist_info", "--output-dir", tmp_path)
    (made,) = tmp_path.glob("*.dist-info")
    assert asked_of_torch((made / "METADATA").read_bytes()) == ["torch>=2.11"]
    run_setup(sources, kind, "--dist-dir", tmp_path, "--dist-info-dir", made)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (file for file in files.namelist() if file.endswith("/METADATA"))
        (asked,) = asked_of_torch(files.read(metadata))
    major, minor = torch.__version__.split(".")[:2]
    assert asked == (f"torch=={major}.{minor}.*" if kind == "bdist_wheel" else "torch>=2.11")
    assert Requirement(asked).specifier.contains(torch.__version__)
    later = Requirement(asked).specifier.contains(f"{major}.{int(minor) + 1}.0")
    assert later == (kind == "editable_wheel")
