"""Programs that have torch already, each up in a tenth of a second, and copies of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import amp_ext

PACKAGE = Path(amp_ext.__file__).parent
ROOT = PACKAGE.parent

# Forks for each line that it reads and goes on as `python -m` would, whose own frames have such
# names too: no traceback of a program begins with this one.
SERVER = """
import json, os, runpy, signal, sys
import torch

for line in sys.stdin:
    module, arguments, folder, environment, outputs = json.loads(line)
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
signal.alarm(120)
for number, path in enumerate([os.devnull, *outputs]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
sys.argv, sys.path[0] = ["-m", *arguments], folder
runpy._run_module_as_main(module)
"""

RunModule = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunModule]:
    """Runs ``python -m module`` in a folder; the package is on its path, but not first."""
    outputs = [str(tmp_path_factory.mktemp("outputs") / name) for name in ("stdout", "stderr")]
    server = subprocess.Popen(
        [sys.executable, "-c", f"exec(compile({SERVER!r}, '<frozen server>', 'exec'))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(module: str, *arguments: str, folder: Path, **environment: str):
        request = [module, arguments, str(folder), {**os.environ, **environment}, outputs]
        server.stdin.write(f"{json.dumps(request)}\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        texts = [Path(output).read_text() for output in outputs]
        return subprocess.CompletedProcess([module, *arguments], code, *texts)

    yield run
    server.communicate()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, to be broken."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "amp_ext"))
