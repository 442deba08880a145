"""What is installed is told, and of a binary that does not work why and what to type."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import amp_ext
from amp_ext.info import causes, facts
from amp_ext.info.__main__ import main
from amp_ext.info.check import DTYPES, check

PACKAGE = Path(amp_ext.__file__).parent
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


def link(binary: Path, source: str, *options: object) -> None:
    """Builds a shared library from C in the place of the binary."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    file = binary.with_suffix(".c")
    file.write_text(source)
    command = [compiler, "-shared", "-fPIC", "-o", binary, file, *options]
    binary.unlink(missing_ok=True)
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)


def link_with(binary: Path, name: str, version: str = "") -> None:
    """Links the binary with a library that is found under a name while it is linked, only then."""
    library = binary.with_name("stub") / name
    library.parent.mkdir()
    options = [f"-Wl,-soname,{name}", "-nostdlib"]
    if version:
        script = library.with_suffix(".map")
        script.write_text(f"{version} {{ global: *; }};")
        options.append(f"-Wl,--version-script={script}")
    link(library, "void wanted(void) {}", *options)
    link(binary, "void wanted(void); void use(void) { wanted(); }", "-nostdlib", library)
    shutil.rmtree(library.parent)


def remove(binary: Path) -> None:
    binary.unlink()


def rename_for_another_python(binary: Path) -> None:
    binary.rename(binary.with_name("_C.cpython-36m-x86_64-linux-gnu.so"))


def cut_short(binary: Path) -> None:
    binary.write_bytes(binary.read_bytes()[:64])


def write_words(binary: Path) -> None:
    binary.write_text("version https://git-lfs.github.com/spec/v1\n")


def change_processor(binary: Path) -> None:
    content = bytearray(binary.read_bytes())
    content[18:20] = (40).to_bytes(2, sys.byteorder)
    binary.write_bytes(content)


def build_for_another_torch(binary: Path) -> None:
    note = json.dumps({**BUILD, "torch": "1.2.3", "python": "3.4.5"})
    binary.with_name("_build_info.json").write_text(note)


def leave_a_symbol_undefined(binary: Path) -> None:
    symbol = "_ZN3c105ErrorC1ENS_14SourceLocationESs"
    link(binary, f"void {symbol}(void); void use(void) {{ {symbol}(); }}")


def link_with_another_cuda(binary: Path) -> None:
    link_with(binary, "libcudart.so.9")


def link_with_a_missing_library(binary: Path) -> None:
    link_with(binary, "libnot_installed.so.1")


def want_a_newer_libstdcxx(binary: Path) -> None:
    link_with(binary, "libstdc++.so.6", "GLIBCXX_9.9.9")


def want_a_newer_libc(binary: Path) -> None:
    link_with(binary, "libc.so.6", "GLIBC_9.9")


def be_no_module(binary: Path) -> None:
    link(binary, "int nothing = 0;")


def lack_the_kernels(binary: Path) -> None:
    source = """
    #include <Python.h>
    static PyObject* cpu_isa(PyObject* self, PyObject* none) {
      return PyUnicode_FromString("plain");
    }
    static PyMethodDef methods[] = {{"cpu_isa", cpu_isa, METH_NOARGS, ""}, {0}};
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "amp_ext._C", "", -1, methods};
    PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module); }
    """
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        pytest.skip("needs the headers of Python")
    link(binary, source, f"-I{headers}")


REBUILD = "-m pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir"
BROKEN = [
    pytest.param(remove, "missing", "is not there for this Python", id="missing"),
    pytest.param(rename_for_another_python, "other-python", "_C.cpython-36m", id="other-python"),
    pytest.param(cut_short, "damaged", "does not load", id="cut-short"),
    pytest.param(write_words, "damaged", "begins with b'vers'", id="not-a-library"),
    pytest.param(be_no_module, "damaged", "PyInit__C", id="not-a-module"),
    pytest.param(change_processor, "other-processor", "is for arm, this one", id="processor"),
    pytest.param(build_for_another_torch, "other-torch", "for torch 1.2.3", id="other-torch"),
    pytest.param(leave_a_symbol_undefined, "undefined-symbol", "_ZN3c105Error", id="symbol"),
    pytest.param(link_with_another_cuda, "other-cuda", "libcudart.so.9", id="other-cuda"),
    pytest.param(link_with_a_missing_library, "missing-library", "libnot_inst", id="library"),
    pytest.param(want_a_newer_libstdcxx, "old-libstdc++", "GLIBCXX_9.9.9", id="libstdc++"),
    pytest.param(want_a_newer_libc, "old-libc", "GLIBC_9.9", id="libc"),
    pytest.param(lack_the_kernels, "other-version", "has no attribute", id="other-version"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to be broken."""
    package = tmp_path / "amp_ext"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def info(package: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amp_ext.info", *arguments],
        cwd=package.parent,
        env={"PYTHONPATH": str(package.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("damage", "key", "wanted"), BROKEN)
def test_a_broken_binary_is_explained(copy, damage: Callable[[Path], None], key: str, wanted: str):
    (binary,) = copy.glob("_C.*.so")
    damage(binary)
    done = info(copy, "--check", "--json")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["ok"] is False
    (problem,) = report["problems"]
    assert problem["cause"] == key
    assert wanted in problem["message"]
    assert REBUILD in problem["cure"] or problem["cure"].startswith("conda install")


@pytest.mark.parametrize("check", [(), ("--check",)], ids=["plain", "check"])
def test_the_table_marks_the_cause_and_says_what_to_type(copy, check):
    remove(*copy.glob("_C.*.so"))
    done = info(copy, *check)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "✗ amp_ext's compiled module amp_ext._C is not there" in done.stdout
    assert f"no compiled module lies in {copy}" in done.stdout
    for cause in causes.CAUSES:
        (row,) = (line for line in done.stdout.splitlines() if cause.text in line)
        assert row.strip().startswith("→") == (cause.key == "missing")
    last = done.stdout.partition("Type this:\n")[2].strip()
    assert last.startswith(sys.executable)
    assert REBUILD in last


def test_an_unknown_instruction_set_is_explained(copy):
    done = info(copy, AMP_EXT_CPU_ISA="sse9")
    assert done.returncode == 1
    assert "AMP_EXT_CPU_ISA must be plain or avx2" in done.stdout
    assert "got sse9" in done.stdout
    assert done.stdout.endswith("Type this:\n\n    unset AMP_EXT_CPU_ISA\n")


def test_a_healthy_package_is_described_checked_and_exits_with_0(copy):
    build = {**BUILD, "cuda": None, "toolkit": None, "backends": ["cpu"], "architectures": []}
    (copy / "_build_info.json").write_text(json.dumps(build))
    environment = {"AMP_EXT_CPU_ISA": "plain", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = info(copy, "--check", "--json", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["versions"] == {
        "amp_ext": amp_ext.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    assert report["folder"] == str(copy)
    del build["git"]
    commit = {"commit": "0123456789abcdef", "uncommitted_changes": True}
    assert report["build"] == {**build, **commit}
    assert report["cpu"] == {
        "instructions": "plain",
        "variable": "plain",
        "threads": 1,
        "cores": len(os.sched_getaffinity(0)),
    }
    assert report["gpus"] == []
    assert report["check"] == [
        {"device": "cpu", "dtype": dtype, "error": None}
        for dtype in ("float32", "float16", "bfloat16")
    ]
    assert report["problems"] == []
    assert report["ok"] is True


# In this process, where no binary has to be broken.


@pytest.fixture
def pretend(monkeypatch, tmp_path) -> Callable[..., None]:
    """Lets the build have left another note, and torch see GPUs of some compute capabilities."""

    def pretend(*capabilities: tuple[int, int], **build: object) -> None:
        (tmp_path / "_build_info.json").write_text(json.dumps({**BUILD, **build}))
        monkeypatch.setattr(facts, "PACKAGE", tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA X{index}")

    return pretend


@pytest.mark.parametrize("with_rich", [True, False], ids=["rich", "plain"])
def test_the_facts_are_printed_with_and_without_rich(pretend, with_rich, monkeypatch, capsys):
    pretend((8, 6), (9, 0))
    monkeypatch.delenv("AMP_EXT_CPU_ISA", raising=False)
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"Python {'.'.join(map(str, sys.version_info[:3]))}" in lines
    assert f"build for torch {torch.__version__}, CUDA 13.0, Python 3.11.7" in lines
    assert "compiler c++ (Debian 12.2.0) 12.2.0, CUDA toolkit 13.1" in lines
    assert "commit 0123456789abcdef, with uncommitted changes" in lines
    assert "backends cpu, cuda, compute_90, sm_80" in lines
    (cpu,) = (line for line in lines if line.startswith("CPU "))
    assert cpu.startswith(f"CPU {amp_ext.ops.cpu_isa()} (AMP_EXT_CPU_ISA not set), threads: ")
    assert "GPU 0 NVIDIA X0, compute capability 8.6, sm_80" in lines
    assert (
        "GPU 1 NVIDIA X1, compute capability 9.0, compute_90, compiled by the driver (PTX)" in lines
    )
    assert lines[-1] == "✓ It loads; --check takes real steps on each device."


def test_without_rich_the_table_of_causes_is_plain(pretend, monkeypatch, capsys):
    pretend((12, 0), architectures=["sm_90"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    (heading,) = (line for line in lines if line.strip().startswith("cause"))
    (row,) = (line for line in lines if line.startswith("→"))
    assert row.index("it holds no code for this GPU") == heading.index("cause")
    assert row.index("rebuild with TORCH_CUDA_ARCH_LIST='…'") == heading.index("cure")


def test_a_build_without_a_note_is_unknown(pretend, tmp_path, capsys):
    pretend((9, 0))
    (tmp_path / "_build_info.json").unlink()
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "unknown: no _build_info.json lies beside the compiled module" in out
    assert "compute capability 9.0, code for it unknown" in out


def test_a_note_of_this_build_holds_what_is_shown():
    if not (PACKAGE / "_build_info.json").exists():
        pytest.skip("the build left no note")
    build = facts.read_build()
    assert build["torch"] == torch.__version__
    assert build["python"].rpartition(".")[0] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "cpu" in build["backends"]
    assert bool(build["architectures"]) == bool(build["toolkit"]) == ("cuda" in build["backends"])
    assert build["compiler"]


@pytest.mark.parametrize(
    ("git", "commit", "changes"),
    [
        pytest.param("0123abc", "0123abc", False, id="clean"),
        pytest.param("0123abc-dirty", "0123abc", True, id="with-changes"),
        pytest.param(None, None, None, id="no-git"),
    ],
)
def test_uncommitted_changes_are_told_from_the_commit(pretend, git, commit, changes):
    pretend(git=git)
    build = facts.read_build()
    assert (build["commit"], build["uncommitted_changes"]) == (commit, changes)


@pytest.mark.parametrize(
    ("capabilities", "build", "cause", "message", "cure"),
    [
        pytest.param(
            [(9, 0)],
            {"backends": ["cpu"], "architectures": []},
            "no-cuda",
            "built without CUDA, and there is GPU 0 (NVIDIA X0, compute capability 9.0)",
            "AMP_EXT_CUDA=1 ",
            id="no-cuda",
        ),
        pytest.param(
            [(8, 0), (12, 0), (7, 5)],
            {"architectures": ["sm_80"]},
            "gpu-architecture",
            "no code for GPU 1 (NVIDIA X1, compute capability 12.0); it holds sm_80",
            "TORCH_CUDA_ARCH_LIST='12.0;7.5;8.0' ",
            id="architecture",
        ),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_problem(
    pretend, capsys, capabilities, build, cause, message, cure
):
    pretend(*capabilities, **build)
    assert main(["--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["cause"] == cause
    assert message in problem["message"]
    assert problem["cure"].startswith(cure)


@pytest.mark.parametrize(
    ("capability", "architectures", "code"),
    [
        pytest.param((9, 0), ["compute_90", "sm_80", "sm_90"], "sm_90", id="its-own"),
        pytest.param((8, 9), ["sm_80", "sm_86", "sm_90"], "sm_86", id="an-older-minor-version"),
        pytest.param((8, 0), ["sm_75", "sm_86", "sm_90"], None, id="other-versions"),
        pytest.param((9, 0), ["sm_80", "compute_70", "compute_80"], "compute_80", id="ptx"),
        pytest.param((8, 0), ["compute_90"], None, id="later-ptx"),
        pytest.param((12, 1), ["sm_90", "sm_120"], "sm_120", id="three-digits"),
        pytest.param((9, 0), ["sm_90a"], "sm_90a", id="for-one-alone"),
        pytest.param((10, 0), ["sm_90a", "compute_90a"], None, id="for-another-alone"),
        pytest.param((10, 3), ["sm_100f", "compute_90"], "sm_100f", id="family"),
        pytest.param((12, 0), ["sm_100f", "compute_100f"], None, id="another-family"),
        pytest.param((12, 0), ["ltoir"], None, id="unknown-name"),
        pytest.param((12, 0), [], None, id="nothing"),
    ],
)
def test_the_code_that_a_gpu_takes(capability, architectures, code):
    assert facts.code_for(capability, architectures) == code


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_steps_agree_with_torch(device, dtype):
    assert check(device, dtype) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_steps_are_noticed(monkeypatch, dtype):
    wrong = functools.partial(amp_ext.optim.AdamW, weight_decay=0.2)
    monkeypatch.setattr(amp_ext.optim, "AdamW", wrong)
    assert "away from torch's" in check(torch.device("cpu"), dtype)


def test_an_overflow_that_is_missed_is_noticed(monkeypatch):
    deaf = functools.partial(amp_ext.GradScaler, backoff_factor=0.75)
    monkeypatch.setattr(amp_ext, "GradScaler", deaf)
    assert check(torch.device("cpu"), torch.float32) == "the loss scale is 192, torch's 128"


def test_steps_that_fail_are_marked_and_exit_with_1(pretend, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    pretend()
    monkeypatch.setattr(amp_ext.optim.AdamW, "step", fail)
    assert main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "float32 ✗, float16 ✗, bfloat16 ✗" in out
    assert "✗ steps on cpu in float32: RuntimeError: CUDA error: no kernel image" in out
    assert re.search("→ +it holds no code for this GPU", out)


def test_an_unknown_failure_is_shown_and_a_rebuild_proposed(pretend, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("something new\nsaid at length")

    pretend()
    monkeypatch.setattr(amp_ext.optim.AdamW, "step", fail)
    assert main(["--check", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["cause"] == "unknown"
    assert problem["message"] == "steps on cpu in float32: RuntimeError: something new"
    assert problem["cure"] == causes.rebuild_line()


def test_each_cause_has_a_name_and_words_of_its_own():
    rows = [*causes.CAUSES, causes.UNKNOWN]
    for column in ("key", "text"):
        assert len({getattr(row, column) for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        pytest.param(
            "Python version mismatch: module was compiled for Python 3.10, but the interpreter",
            "other-python",
            id="pybind11",
        ),
        pytest.param(
            "libc10_cuda.so: cannot open shared object file", "other-cuda", id="torch-lacks-cuda"
        ),
        pytest.param("version `CXXABI_1.3.15' not found", "old-libstdc++", id="cxxabi"),
        pytest.param("wrong ELF class: ELFCLASS32", "other-processor", id="32-bit"),
        pytest.param("segment prefix", "unknown", id="unknown"),
    ],
)
def test_errors_of_the_loader_are_recognised(text, key):
    assert causes.recognise(f"amp_ext's compiled module does not load: {text}").key == key


def test_in_its_source_folder_the_package_is_rebuilt_in_place(monkeypatch, tmp_path):
    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(causes, "PACKAGE", tmp_path / "amp_ext")
    line = f"make -C {tmp_path} clean build PYTHON={sys.executable}"
    assert causes.rebuild_line() == line
    assert causes.rebuild_line("AMP_EXT_CUDA=1") == f"AMP_EXT_CUDA=1 {line}"


@pytest.mark.parametrize(
    ("noted", "source"),
    [
        pytest.param('{"url": "file:///my%20code/amp"}', "'/my code/amp'", id="folder"),
        pytest.param('{"url": "https://host/amp.git"}', "<the source folder of amp_ext>", id="url"),
        pytest.param(None, "<the source folder of amp_ext>", id="no-note"),
    ],
)
def test_an_installed_package_is_rebuilt_from_where_it_came(monkeypatch, tmp_path, noted, source):
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return noted

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    monkeypatch.setattr(causes, "PACKAGE", tmp_path / "amp_ext")
    assert causes.rebuild_line().endswith(f"{REBUILD} {source}")


def test_a_bad_option_exits_with_2(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--fast"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: --fast" in capsys.readouterr().err
