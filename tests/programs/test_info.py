"""What is installed is told, and of a binary that does not work why and what to type."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from libraries import library_of_c

import amp_ext
from amp_ext import binary as compiled_module
from amp_ext import ops
from amp_ext.info import __main__ as command_line
from amp_ext.info import causes, facts
from amp_ext.info.check import DTYPES, check

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


REBUILD = "-m pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir"
UNDEFINED = "_ZN3c105Error"
USES_UNDEFINED = f"void {UNDEFINED}(void); void use(void) {{ {UNDEFINED}(); }}"


@pytest.fixture
def info(capsys) -> Callable[..., tuple[int, str]]:
    """Runs the program in this process; returns its exit code and what it prints."""

    def info(*arguments: str) -> tuple[int, str]:
        code = command_line.main(arguments)
        out, err = capsys.readouterr()
        assert err == ""
        return code, out

    return info


def told(out: str) -> tuple[str, str, str]:
    """Returns the one problem that was printed, its cause, and the line to type."""
    problems = out.partition("\n\n")[2]
    pattern = r"Problem: (.*)\n(?:Cause: (.*)\n)?\nType this:\n\n    (.*)\n"
    found = re.fullmatch(pattern, problems)
    assert found is not None, out
    return found[1], found[2] or "", found[3]


# What is done to the binary, a part of the cause that is to be found, and one of the message.
BROKEN = [
    (Path.unlink, "", "is not there for this Python"),
    (functools.partial(library_of_c, USES_UNDEFINED), "another torch, another C++ ABI", UNDEFINED),
]


@pytest.mark.parametrize(("change", "cause", "message"), BROKEN)
def test_a_broken_binary_is_explained(copy, info, monkeypatch, change, cause: str, message: str):
    (binary,) = copy.glob("_C.*.so")
    change(binary)
    monkeypatch.setattr(amp_ext, "__path__", [str(copy)])
    monkeypatch.setattr(compiled_module, "__file__", str(copy / "binary.py"))
    monkeypatch.delitem(sys.modules, "amp_ext._C")
    monkeypatch.delattr(amp_ext, "_C")
    monkeypatch.setattr(ops, "_C", compiled_module.load_binary())
    for module in (facts, causes):
        monkeypatch.setattr(module, "PACKAGE", copy)
    code, out = info("--check")
    assert (code, "steps on" in out) == (1, False)
    problem = told(out)
    assert message in problem[0]
    assert cause in problem[1]
    assert REBUILD in problem[2] or problem[2].startswith("conda install")


@pytest.mark.slow
def test_an_installed_package_beside_the_sources_is_not_built_again(copy, run_module):
    """The README has the install in the folder of the sources, where many type the next line."""
    (binary,) = copy.glob("_C.*.so")
    binary.unlink()
    (copy / "_build_info.json").unlink()
    (copy.parent / "setup.py").touch()
    done = run_module("amp_ext.info", "--check", folder=copy.parent)
    installed = Path(amp_ext.__file__).parents[1]
    assert (done.returncode, done.stderr) == (1, "")
    problem, cause, line = told(done.stdout)
    assert f"where it is not built, and not from {installed}. Start Python in another" in problem
    assert cause.startswith("Python was started in the folder of the sources")
    assert line == f"cd / && {sys.executable} -m amp_ext.info --check"


@pytest.mark.slow
def test_an_unknown_instruction_set_is_explained(run_module, tmp_path):
    done = run_module("amp_ext.info", folder=tmp_path, AMP_EXT_CPU_ISA="sse9")
    assert (done.returncode, done.stderr) == (1, "")
    assert "AMP_EXT_CPU_ISA must be plain, avx2 or avx512" in done.stdout
    assert "got sse9" in done.stdout
    assert done.stdout.endswith("Type this:\n\n    unset AMP_EXT_CPU_ISA\n")


@pytest.fixture
def pretend(monkeypatch, tmp_path) -> Callable[..., None]:
    """Lets the build have left another note, and torch see GPUs of some compute capabilities."""

    def pretend(*capabilities: tuple[int, int], **build: object) -> None:
        (tmp_path / "_build_info.json").write_text(json.dumps({**BUILD, **build}))
        monkeypatch.setattr(facts, "PACKAGE", tmp_path)
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


def test_a_build_without_a_note_is_unknown(pretend, info, tmp_path):
    pretend((9, 0))
    (tmp_path / "_build_info.json").unlink()
    code, out = info()
    assert code == 0
    assert "unknown: no _build_info.json lies beside the compiled module" in out


def test_a_note_of_this_build_holds_what_is_shown():
    if not (facts.PACKAGE / "_build_info.json").exists():
        pytest.skip("the build left no note")
    build = facts.read_build()
    assert build["torch"] == torch.__version__
    assert build["python"].rpartition(".")[0] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "cpu" in build["backends"]
    assert bool(build["architectures"]) == bool(build["toolkit"]) == ("cuda" in build["backends"])
    assert build["compiler"]


def test_a_gpu_that_cannot_be_used_is_a_problem(pretend, info):
    pretend((9, 0), backends=["cpu"], architectures=[])
    code, out = info()
    built = "built without CUDA, and there is GPU 0 (NVIDIA X0, compute capability 9.0)"
    cause = "there is a GPU, and it was built for the CPU alone"
    assert (code, told(out)) == (
        1,
        (f"amp_ext was {built}", cause, causes.rebuild_line("AMP_EXT_CUDA=1")),
    )


def test_a_gpu_without_code_is_told_what_to_build_for(pretend, info, monkeypatch):
    pretend((8, 0), (12, 0), (7, 5))
    no_code = "CUDA error: no kernel image is available for execution on the device"
    monkeypatch.setattr(command_line, "check", lambda device, dtype: no_code)
    code, out = info("--check")
    cure = causes.rebuild_line("TORCH_CUDA_ARCH_LIST='12.0;7.5;8.0'")
    problem = f"steps on cpu in float32: {no_code}"
    assert (code, told(out)) == (1, (problem, "it holds no code for this GPU", cure))


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


def test_steps_that_fail_are_shown_with_a_cure(pretend, info, monkeypatch):
    pretend()
    fail = Mock(side_effect=RuntimeError("something new\nsaid at length"))
    monkeypatch.setattr(amp_ext.optim.AdamW, "step", fail)
    code, out = info("--check")
    assert code == 1
    assert "float32 fails, float16 fails, bfloat16 fails" in out
    problem = ("steps on cpu in float32: RuntimeError: something new", "", causes.rebuild_line())
    assert told(out) == problem


OF_THE_LOADER = [
    ("libc10_cuda.so: cannot open shared object file", "another major version of CUDA"),
    ("libcudart.so.9: cannot open shared object file", "version of CUDA"),
    ("libnot_here.so: cannot open shared object file", "is not installed"),
    ("/lib/libc.so.6: version `GLIBC_9.9' not found", "on a newer system"),
    ("libstdc++.so.6: version `GLIBCXX_9.9' not found", "its compiler is newer"),
    ("/a/lib/libamp_ext.so: version `AMP_EXT_1' not found (required by /a/_C.so)", ""),
    ("version `CXXABI_1.3.15' not found", "its compiler is newer"),
    ("segment prefix", ""),
]


@pytest.mark.parametrize(("text", "cause"), OF_THE_LOADER)
def test_errors_of_the_loader_are_recognised(text, cause):
    found = causes.recognise(f"amp_ext's compiled module does not load: {text}")
    assert cause in found.text
    assert bool(cause) == bool(found.text)


@pytest.mark.parametrize("is_source", [True, False])
def test_a_package_is_rebuilt_in_its_source_folder_or_with_pip(monkeypatch, tmp_path, is_source):
    monkeypatch.setattr(causes, "PACKAGE", tmp_path / "amp_ext")
    if is_source:
        (tmp_path / "Makefile").touch()
    in_place = f"make -C {tmp_path} clean build PYTHON={sys.executable}"
    line = in_place if is_source else f"{sys.executable} {REBUILD} <the source folder of amp_ext>"
    assert causes.rebuild_line() == line
    assert causes.rebuild_line("AMP_EXT_CUDA=1") == f"AMP_EXT_CUDA=1 {line}"
