"""What setup.py chooses before it compiles: how many jobs, and which toolkit."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.rows import rows

SETUP = Path(__file__).resolve().parents[2] / "setup.py"
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
    for file in (SETUP, SETUP.with_name("pyproject.toml"), *SETUP.parent.glob("csrc/*_flags.txt")):
        target = tmp_path / file.relative_to(SETUP.parent)
        target.write_text(file.read_text())
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
