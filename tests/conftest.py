"""Where the tests run: devices, instruction sets of the CPU engine, and programs in Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Threads that wait sleep instead of spinning, which makes tests ten times faster on a busy machine;
# workers of pytest-xdist share the cores. OpenMP reads both once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

import torch
from cuda_emulator import build
from harness import HANGS

TESTS = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Row:
    """One place where the kernels run.

    Attributes:
        name: Shown in the test's name.
        device: Where the tensors of the test live.
        why_missing: Says why this machine lacks the row, or returns None.
        selected: A context in which the operations take this row's kernels.
    """

    name: str
    device: str
    why_missing: Callable[[], str | None] = lambda: None
    selected: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def why_no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device"


@functools.cache
def emulated_binary() -> ModuleType | RuntimeError:
    """Builds the CUDA kernels for the emulator and loads them; returns the error if that fails."""
    try:
        path = build.build_emulated(os.environ.get("CUDA_EMULATOR_SANITIZERS", ""))
    except RuntimeError as error:
        return error
    spec = importlib.util.spec_from_file_location("amp_ext_emulated._C", path)
    assert spec is not None
    assert spec.loader is not None
    binary = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(binary)
    return binary


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    """Lets the operations run the CUDA kernels on CPU tensors."""
    from amp_ext import ops

    binary = emulated_binary()
    if isinstance(binary, RuntimeError):
        raise binary
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_C", binary)
        yield


REQUIRES_CUDA = os.environ.get("AMP_EXT_REQUIRE_CUDA") == "1"
ROWS = [
    Row("cpu", "cpu"),
    Row("emulated", "cpu", build.why_no_emulator, emulated_cuda),
    Row("cuda", "cuda", why_no_gpu),
]
if why_no_gpu() and not REQUIRES_CUDA:
    ROWS.pop()  # to skip thousands of tests takes seconds


@pytest.fixture(params=[pytest.param(row, id=row.name) for row in ROWS])
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """Every place in turn, for tests that expect more of one than of another.

    A missing GPU has no row, and one that fails under ``AMP_EXT_REQUIRE_CUDA=1``.
    """
    yield from taken(request.param)


def taken(row: Row) -> Iterator[Row]:
    """Takes a row's kernels until the test has ended."""
    reason = row.why_missing()
    if reason is not None:
        if row.name == "cuda":
            pytest.fail(f"AMP_EXT_REQUIRE_CUDA=1, but {reason}")
        pytest.skip(reason)
    with row.selected():
        yield row


def only(name: str) -> list[Any]:
    return [pytest.param(row, id=row.name) for row in ROWS if row.name == name]


@pytest.fixture(params=only("emulated"))
def emulated(request: pytest.FixtureRequest) -> Iterator[Row]:
    """The emulator alone, for tests of what neither the CPU nor a sound GPU does."""
    yield from taken(request.param)


@pytest.fixture(params=only("cuda"))
def gpu(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU alone, for tests of what no other row has."""
    for _ in taken(request.param):
        yield torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def device(row: Row) -> torch.device:
    """The device of the tensors, once for each row."""
    return torch.device(row.device)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets slow tests come first, so that no worker is left with one when the others are done."""
    for item in items:
        if "under_isa" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


RunModule = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_module() -> RunModule:
    """Runs ``python -m module`` in a folder; the package is on its path, but not first."""
    import amp_ext

    path = os.pathsep.join([str(Path(amp_ext.__file__).parents[1]), *sys.path])

    def run(module: str, *arguments: str, folder: Path, **changes: str | None):
        variables = {**os.environ, "PYTHONPATH": path, **changes}
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            env={name: text for name, text in variables.items() if text is not None},
            capture_output=True,
            text=True,
            timeout=HANGS,
        )

    return run


CHILD = """
import importlib, sys
import torch
from amp_ext import ops
tests, folder, module, function, path = sys.argv[1:]
sys.path[:0] = [tests, folder]
torch.manual_seed(0)
torch.save((ops.cpu_isa(), getattr(importlib.import_module(module), function)()), path)
"""


@pytest.fixture(scope="session")
def under_isa(
    run_module: RunModule, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Callable[[], Any], str | None], tuple[str, Any]]:
    """Runs a function of a test module in a fresh interpreter, under a chosen instruction set.

    ``under_isa(function, "plain")`` returns the instruction set that was taken and what the
    function returned: anything of tensors, lists, dicts and numbers. The set is read when the
    package is imported, so one process cannot do both. None leaves the choice to the package.
    """
    folder = tmp_path_factory.mktemp("under_isa")
    (folder / "child.py").write_text(CHILD)

    def run(function: Callable[[], Any], isa: str | None) -> tuple[str, Any]:
        home, path = Path(inspect.getfile(function)).parent, folder / "result.pt"
        arguments = map(str, (TESTS, home, function.__module__, function.__name__, path))
        done = run_module("child", *arguments, folder=folder, AMP_EXT_CPU_ISA=isa)
        assert done.returncode == 0, done.stderr
        return torch.load(path)

    return run
