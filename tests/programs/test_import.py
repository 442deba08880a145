"""A package whose binary is missing, broken or another PyTorch's imports, and explains itself."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.rows import rows
from libraries import library_of_c

import amp_ext
from amp_ext import binary

IMPORT_AND_USE = """
import amp_ext
print("imported", amp_ext.__file__, amp_ext.GradScaler("cpu", enabled=False).get_scale())
try:
    amp_ext.ops.cpu_isa()
    print("works")
except ImportError as error:
    print("explained:", error)
"""
TORCH_AND_PYTHON = '{"torch": "1.2.3", "python": "3.4.5"}'


def explanation(copy: Path, run_module: Callable[..., Any]) -> str:
    """Returns what the first use of a copy of the package says; its import must succeed."""
    (copy.parent / "use.py").write_text(IMPORT_AND_USE)
    done = run_module("use", folder=copy.parent)
    assert (done.returncode, done.stderr) == (0, "")
    imported, explained = done.stdout.splitlines()
    assert imported == f"imported {copy / '__init__.py'} 1.0"
    return explained.removeprefix("explained: ")


BAD = {
    "missing": (None, "{}", "No module named 'amp_ext._C'. If amp_ext is installed, start Python"),
    "broken": (b"\x7fELF and nothing behind it", "{}", "does not load"),
    "another-torch": (b"", TORCH_AND_PYTHON, "was built for torch 1.2.3 and Python 3.4.5"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("content", "note", "wanted"), rows(BAD))
def test_a_bad_binary_is_explained_at_first_use(copy, run_module, content, note, wanted):
    (binary,) = copy.glob("_C.*.so")
    binary.unlink()
    if content is not None:
        binary.write_bytes(content)
    (copy / "_build_info.json").write_text(note)
    explained = explanation(copy, run_module)
    for part in (wanted, f"torch {torch.__version__}", "pip install --no-build-isolation"):
        assert part in explained


STALE = "AMP_EXT_0.0.9 { local: *; };"
BAD_LIBRARY = {
    "missing": (None, "does not load: libamp_ext.so: cannot open shared object file"),
    "stale": (STALE, "version `AMP_EXT_"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("versions", "wanted"), rows(BAD_LIBRARY))
def test_a_bad_library_is_explained_at_first_use(copy, run_module, tmp_path, versions, wanted):
    library = copy / "lib" / "libamp_ext.so"
    library.unlink()
    if versions is not None:
        script = tmp_path / "versions.map"
        script.write_text(versions)
        options = ("-Wl,-soname,libamp_ext.so", f"-Wl,--version-script={script}")
        library_of_c("", library, "-nostdlib", *options)
    explained = explanation(copy, run_module)
    assert wanted in explained
    assert "Rebuild: pip install --no-build-isolation" in explained


# The releases that a wheel has builds for (None: the one that runs), and what the first use says.
SEVERAL = {
    "one-of-them": ((None, "99.8"), "works"),
    "another": (
        ("1.2", "99.8"),
        f"this amp_ext was built for torch 1.2, 99.8; you run torch {torch.__version__}. Install",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("releases", "wanted"), rows(SEVERAL))
def test_a_wheel_for_several_releases_takes_the_build_of_the_one_that_runs(
    copy, run_module, releases, wanted
):
    minor = ".".join(torch.__version__.split(".")[:2])
    for release in releases:
        folder = copy / f"torch{release or minor}"
        shutil.copytree(copy / "lib", folder / "lib")
        for file in (*copy.glob("_C.*.so"), copy / "_build_info.json"):
            shutil.copy(file, folder)
    for file in (*copy.glob("_C.*.so"), copy / "_build_info.json", copy / "lib" / "libamp_ext.so"):
        file.unlink()
    explained = explanation(copy, run_module)
    assert wanted in explained
    assert ("pip install --no-build-isolation" in explained) == (wanted != "works")


# The torch and the CUDA of a build, those that run, and whether they fit.
VERSIONS = {
    "the-same": (("2.13.0+cpu", None), ("2.13.0+cpu", None), True),
    "a-patch": (("2.13.0", None), ("2.13.1", None), True),
    "another-package": (("2.13.0+cpu", None), ("2.13.1+cu130", "13.0"), True),
    "minor-cuda": (("2.13.0+cu130", "13.0"), ("2.13.0+cu132", "13.2"), True),
    "another-cuda": (("2.13.0+cu126", "12.6"), ("2.13.0+cu130", "13.0"), False),
    "no-cuda": (("2.13.0+cu130", "13.0"), ("2.13.0+cpu", None), False),
    "a-minor-release": (("2.13.0", None), ("2.14.0", None), False),
    "a-major-release": (("2.13.0", None), ("3.13.0", None), False),
    "a-nightly-build": (("2.13.0", None), ("2.13.0.dev20260601", None), False),
    "from-sources": (("2.13.0a0+git1", None), ("2.13.0a0+git2", None), False),
}


@pytest.mark.parametrize(("built", "running", "fits"), rows(VERSIONS))
def test_what_is_built_fits_a_minor_release(tmp_path, monkeypatch, built, running, fits):
    note = {"torch": built[0], "cuda": built[1], "python": "3.4.5"}
    (tmp_path / "_build_info.json").write_text(json.dumps(note))
    monkeypatch.setattr(binary, "__file__", str(tmp_path / "binary.py"))
    monkeypatch.setattr(torch, "__version__", running[0])
    monkeypatch.setattr(torch.version, "cuda", running[1])
    loaded = binary.load_binary()
    if fits:
        assert loaded is amp_ext._C
        return
    with pytest.raises(
        ImportError, match=re.escape(f"built for torch {built[0]} and Python 3.4.5")
    ):
        loaded.cpu_isa()


@pytest.mark.slow
def test_what_loads_slowly_is_not_imported(run_module, tmp_path):
    slow = {"torch._dynamo", "torch.distributed.checkpoint"}
    (tmp_path / "look.py").write_text(f"import sys, amp_ext\nprint({slow} & sys.modules.keys())")
    assert run_module("look", folder=tmp_path).stdout == "set()\n"


def test_the_package_lists_its_public_names_and_no_others():
    assert set(dir(amp_ext)) == {*amp_ext.__all__, "__version__"}
    assert all(hasattr(amp_ext, name) for name in dir(amp_ext))
