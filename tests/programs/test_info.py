"""What is installed is told, and of a binary that does not work why and what to type."""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import sys
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from harness.rows import rows

import amp_ext
from amp_ext import binary, ops
from amp_ext.info import __main__ as command_line
from amp_ext.info.check import DTYPES, check, check_division

PYTHON = ".".join(map(str, sys.version_info[:3]))
BUILD = {
    "torch": torch.__version__,
    "python": "3.11.7",
    "compiler": "c++ (Debian 12.2.0) 12.2.0",
    "cuda": "13.0",
    "toolkit": "13.1",
    "backends": ["cpu", "cuda"],
    "architectures": ["compute_90", "sm_80"],
    "git": "0123456789abcdef-dirty",
}


@pytest.fixture
def info(capsys) -> Callable[..., tuple[int, str]]:
    """Runs the program in this process; returns its exit code and what it prints."""

    def info(*arguments: str) -> tuple[int, str]:
        code = command_line.main(arguments)
        out, err = capsys.readouterr()
        assert err == ""
        return code, out

    return info


def told(out: str) -> list[str]:
    """Returns the lines of the problem that was printed."""
    _, found, problem = out.partition("\n\nProblem:\n")
    assert found, out
    return [line.strip() for line in problem.splitlines()]


@pytest.mark.slow
def test_an_unknown_instruction_set_is_explained(run_module, tmp_path):
    done = run_module("amp_ext.info", folder=tmp_path, AMP_EXT_CPU_ISA="sse9")
    assert (done.returncode, done.stderr) == (1, "")
    assert "AMP_EXT_CPU_ISA must be plain, avx2 or avx512" in done.stdout
    assert "got sse9" in done.stdout


@pytest.fixture
def pretend(monkeypatch, tmp_path) -> Callable[..., None]:
    """Lets the build have left another note, and torch see GPUs of some compute capabilities."""

    def pretend(*capabilities: tuple[int, int], **build: object) -> None:
        (tmp_path / "_build_info.json").write_text(json.dumps({**BUILD, **build}))
        monkeypatch.setattr(command_line, "PACKAGE", tmp_path)
        monkeypatch.setattr(command_line, "build_folder", lambda: tmp_path)
        monkeypatch.setattr(binary, "build_folder", lambda: tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_name", "NVIDIA X{}".format)

    return pretend


def test_a_healthy_package_is_described_and_checked(pretend, info, tmp_path, monkeypatch):
    pretend(cuda=None, toolkit=None, backends=["cpu"], architectures=[])
    library = tmp_path / "lib" / "libamp_ext.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("AMP_EXT_CPU_ISA", "plain")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    code, out = info("--check")
    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        f"amp_ext {amp_ext.__version__} in {tmp_path}",
        f"torch {torch.__version__}, {cuda}",
        f"Python {PYTHON}",
        f"library {library}",
        f"build for torch {torch.__version__}, without CUDA, Python 3.11.7",
        "compiler c++ (Debian 12.2.0) 12.2.0",
        "commit 0123456789abcdef-dirty",
        "backends cpu",
        f"CPU {ops.cpu_isa()} (AMP_EXT_CPU_ISA plain), threads: 3, "
        f"cores: {len(os.sched_getaffinity(0))}",
        "GPU none that torch sees",
        "steps on cpu float32 works, float16 works, bfloat16 works",
        "",
        "It works.",
    ]


def test_the_facts_of_a_machine_with_gpus_are_printed(pretend, info, monkeypatch):
    pretend((8, 6), (9, 0))
    monkeypatch.delenv("AMP_EXT_CPU_ISA", raising=False)
    code, out = info()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert {
        "library none that programs in C++ could link",
        f"build for torch {torch.__version__}, CUDA 13.0, Python 3.11.7",
        "compiler c++ (Debian 12.2.0) 12.2.0, CUDA toolkit 13.1",
        "backends cpu, cuda, compute_90, sm_80",
        "GPU 0 NVIDIA X0, compute capability 8.6",
        "GPU 1 NVIDIA X1, compute capability 9.0",
    } <= set(lines)
    assert "(AMP_EXT_CPU_ISA not set)" in out
    assert lines[-1] == "It loads; --check takes real steps on each device."


# The CUDA of PyTorch, and the line that brings its compiler.
COMPILERS = {
    "pip": ("13.2", "To install nvcc: pip install 'cuda-toolkit[nvcc,nvvm,cccl]==13.2.*'"),
    "toolkit": ("12.8", "Install the toolkit of CUDA 12.8, and set CUDA_HOME to its folder."),
}
REBUILD = (
    "To rebuild amp_ext: AMP_EXT_CUDA=1 pip install --no-build-isolation --force-reinstall "
    "--no-deps --no-cache-dir <amp_ext's folder>"
)


@pytest.mark.parametrize(("cuda", "compiler"), rows(COMPILERS))
def test_a_gpu_that_cannot_be_used_is_a_problem(pretend, info, monkeypatch, cuda, compiler):
    pretend((9, 0), backends=["cpu"], architectures=[])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    code, out = info("--check")
    assert (code, "steps on" in out) == (1, False)
    assert told(out) == ["this amp_ext was built without CUDA.", compiler, REBUILD]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch with CUDA")
def test_a_call_on_a_gpu_that_cannot_be_used_prints_the_same_lines(pretend, info):
    if "cuda" in binary.build_info()["backends"]:
        pytest.skip("needs a build without CUDA")
    with pytest.raises(RuntimeError, match=r"must be on cpu, got cuda") as error:
        ops.count_division_errors(torch.device("cuda"), 1)
    pretend((9, 0), backends=["cpu"], architectures=[])
    first, *lines = str(error.value).splitlines()
    problem, *printed = told(info()[1])
    assert first.endswith(f": {problem}")
    assert lines == printed


def test_a_gpu_without_code_is_told_what_to_build_for(pretend, info, monkeypatch):
    pretend((8, 0), (12, 0), (7, 5))
    no_code = "CUDA error: no kernel image is available for execution on the device"
    monkeypatch.setattr(command_line, "check", lambda device, dtype: no_code)
    code, out = info("--check")
    *problems, cure = told(out)
    assert (code, len(problems)) == (1, 4 * 3)
    assert problems[0] == f"steps on cpu in float32: {no_code}"
    assert cure == "Rebuild amp_ext with TORCH_CUDA_ARCH_LIST='12.0;7.5;8.0'."


WRONG = [
    ("optim.AdamW", {"weight_decay": 0.2}, "away from torch's"),
    ("GradScaler", {"backoff_factor": 0.75}, "the loss scale is 192, torch's 128"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options", "words"), WRONG)
def test_wrong_steps_are_noticed(monkeypatch, name, options, words, dtype):
    wrong = functools.partial(operator.attrgetter(name)(amp_ext), **options)
    monkeypatch.setattr(f"amp_ext.{name}", wrong)
    assert words in check(torch.device("cpu"), dtype)


def test_a_parameter_that_becomes_nan_is_noticed(monkeypatch):
    results = [(torch.full((3,), value), 128.0) for value in (math.nan, 1.0)]
    monkeypatch.setattr("amp_ext.info.check._train", Mock(side_effect=results))
    assert "nan away from torch's" in check(torch.device("cpu"), torch.float32)


def test_steps_that_fail_are_shown_with_a_cure(pretend, info, monkeypatch):
    pretend()
    fail = Mock(side_effect=RuntimeError("something new\nsaid at length"))
    monkeypatch.setattr(amp_ext.optim.AdamW, "step", fail)
    code, out = info("--check")
    assert code == 1
    assert "float32 fails, float16 fails, bfloat16 fails" in out
    names = ("float32", "float16", "bfloat16")
    assert told(out) == [f"steps on cpu in {name}: RuntimeError: something new" for name in names]


def test_wrong_divisions_are_noticed(monkeypatch):
    counts = {"return_value": torch.tensor([0, 3, 0])}
    monkeypatch.setattr(ops, "count_division_errors", Mock(**counts), raising=False)
    assert "0 square roots, 3 reciprocals and 0 quotients" in check_division(torch.device("cpu"))
    monkeypatch.setattr(ops, "count_division_errors", Mock(return_value=torch.zeros(3)))
    assert check_division(torch.device("cpu")) is None
