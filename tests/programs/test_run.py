"""Programs run under the launcher as they run without it, only with our scaler and optimizers."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from rows import rows

from amp_ext import run

CLIPPING = """
import sys
import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.optim import SGD

torch.manual_seed(1)
weight = torch.randn(6, 3, requires_grad=True)
optimizer = SGD([weight], lr=0.1, momentum=0.9, nesterov=True)
scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
x, target = torch.randn(16, 6), torch.randint(3, (16,))
for step in range(6):
    loss = F.cross_entropy(x @ weight, target)
    scaler.scale(loss * float("inf") if step == 2 else loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm=0.2)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"{step} {loss.item():.7g} {float(norm):.6g} {scaler.get_scale()}")
assert isinstance(scaler, torch.amp.GradScaler) and isinstance(optimizer, torch.optim.SGD)
print(type(scaler).__mro__, type(optimizer).__mro__, file=sys.stderr)
"""

RESUMES = """
import argparse, copy, dataclasses, io, pickle, sys
import torch


@dataclasses.dataclass
class Config:
    data: str
    lr: float
    optimizers: bool


def build(make_scaler):
    param = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([param], lr=config.lr, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    return param, optimizer, schedule, make_scaler(growth_interval=3)


def train(param, optimizer, schedule, scaler):
    for _ in range(4):
        loss = (param - torch.arange(5.0)).square().sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        print("loss=%.6f" % loss.item(), schedule.get_last_lr()[0], scaler.state_dict())
    print(type(scaler).__mro__, type(optimizer).__mro__, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--optimizers", action="store_true")
    config = pickle.loads(pickle.dumps(Config(**vars(parser.parse_args()))))
    first = build(torch.cpu.amp.GradScaler)
    train(*first)
    file = io.BytesIO()
    torch.save({"made": first[:2] + first[3:], "config": config}, file)
    file.seek(0)
    saved = copy.deepcopy(torch.load(file, weights_only=False))
    param, optimizer, scaler = saved["made"]
    print(saved["config"], optimizer.param_groups[0]["params"][0] is param)
    second = build(lambda **options: torch.amp.grad_scaler.GradScaler("cpu", **options))
    for new, old in zip(second[1:], (optimizer, first[2], scaler)):
        new.load_state_dict(old.state_dict())
    train(*second)
    raise SystemExit(3)
"""

RESUMED = (RESUMES, ["--optimizers"], ["data", "--lr", "0.2", "--optimizers"])
STYLES = {
    "clipping": (CLIPPING, [], []),
    "clipping-optimizers": (CLIPPING, ["--optimizers"], []),
    "resumes-exits-with-3": RESUMED,
}

# What a program can see of itself, also when it is over.
SURROUNDINGS = """
import __main__, atexit, inspect, multiprocessing, pickle, sys
print(sys.argv, sys.path[0], __file__, __name__, __spec__, __package__)
print(sorted({*vars()} - {"__annotations__", "__cached__"}), __main__.__dict__ is globals())
print(__builtins__, type(__loader__))


class Config:
    pass


def child(queue):
    queue.put((__name__, sys.argv, Config.__module__))


if __name__ == "__main__":
    print(inspect.getsource(Config))
    atexit.register(lambda: print("at exit", type(pickle.loads(pickle.dumps(Config())))))
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=child, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""

OWN_HOOK = """
import sys, traceback
sys.excepthook = lambda *error: print(len(traceback.extract_tb(error[2])), error[1])
raise ValueError("shown by its own hook")
"""
ENDS = {
    "surroundings": SURROUNDINGS,
    "exit-with-words": "import sys\nprint('out')\nsys.exit('words')",
    "error": "def f():\n    [][1]\n\n\ntry:\n    f()\nfinally:\n    1 / 0",
    "syntax-error": "print('never')\nthis is no Python",
    "interrupted": "raise KeyboardInterrupt",
    "own-hook": OWN_HOOK,
}


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, without torch and the launcher."""
    options = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run([sys.executable, *arguments], cwd=folder, check=False, **options)


def run_here(start: Callable[[], object]) -> tuple[int, str, str]:
    """Runs a program in this process; returns its exit code and what it prints."""
    printed, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            start()
        except SystemExit as error:
            code = error.code
    return code, printed.getvalue(), errors.getvalue()


@pytest.fixture
def restored(monkeypatch):
    """Undoes what the launcher does to this process for good."""
    patches, real_patch = [], run.patch_torch
    monkeypatch.setattr(run, "patch_torch", lambda **on: patches.append(real_patch(**on)))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    for patch in patches:
        patch.undo()


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    number = r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?"
    return re.split(number, text), [float(found) for found in re.findall(number, text)]


@pytest.mark.filterwarnings("error", "ignore:.*is deprecated", "ignore:.*CUDA is not available")
@pytest.mark.parametrize(("source", "options", "arguments"), rows(STYLES))
def test_a_training_script_prints_the_same_losses(source, options, arguments, tmp_path, restored):
    script = tmp_path / "train.py"
    script.write_text(source)
    sys.argv = [str(script), *arguments]
    expected = run_here(lambda: runpy.run_path(str(script), run_name="__main__"))
    actual = run_here(lambda: run.main([*options, str(script), *arguments]))
    assert actual[0] == expected[0]
    words, numbers = words_and_numbers(actual[1])
    wanted_words, wanted_numbers = words_and_numbers(expected[1])
    assert words == wanted_words
    # Both sides round some dozen operations to float32, in another order.
    assert numbers == pytest.approx(wanted_numbers, rel=1e-5, abs=2e-6)
    assert len(numbers) > 4
    for line in actual[2].splitlines():
        scaler, optimizer = line.split(") (")
        assert "amp_ext.grad_scaler.GradScaler" in scaler
        assert ("amp_ext.optim" in optimizer) == bool(options)


@pytest.mark.slow
@pytest.mark.parametrize("source", rows(ENDS))
def test_a_script_sees_and_shows_what_it_does_without_the_launcher(source, tmp_path, run_module):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text(source)
    program = ("scripts/script.py", "-x", "--optimizers", "--", "-m")
    expected = python(*program, folder=tmp_path)
    done = run_module("amp_ext.run", *program, folder=tmp_path)
    for name in ("stdout", "stderr", "returncode"):
        assert getattr(done, name) == getattr(expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["package.module", "package"])
def test_a_module_runs_by_its_name(name, tmp_path, run_module):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "here.py").write_text("WORD = 'imported'")
    facts = "import sys\nfrom .here import WORD\nprint(WORD, sys.argv, sys.path[0], __file__)\n"
    facts += "print(__name__, __spec__.name, __package__, type(__loader__))\n1 / 0"
    for file in ("module.py", "__main__.py"):
        (package / file).write_text(facts)
    expected = python("-m", name, "--lr", "1", folder=tmp_path)
    done = run_module("amp_ext.run", "--optimizers", "-m", name, "--lr", "1", folder=tmp_path)
    assert done.stdout == expected.stdout
    assert "imported" in done.stdout
    assert done.returncode == expected.returncode == 1
    # Python itself shows the two frames of its own launcher.
    lines = expected.stderr.splitlines()
    assert done.stderr.splitlines() == [line for line in lines if "<frozen runpy>" not in line]


def test_a_module_that_lacks_another_says_which(tmp_path, monkeypatch):
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "__init__.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(run, "patch_torch", lambda **_: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed'"):
        run.main(["-m", "lacking"])


def test_a_binary_that_does_not_load_stops_the_program_before_it_starts(monkeypatch, capsys):
    fail = Mock(side_effect=ImportError("amp_ext was built for torch 1.2.3"))
    monkeypatch.setattr(run, "patch_torch", fail)
    with pytest.raises(SystemExit) as exit_info:
        run.main(["no_such.py"])
    assert exit_info.value.code == 1
    error = capsys.readouterr().err
    assert "amp_ext.run: amp_ext was built for torch 1.2.3" in error
    assert "python -m amp_ext.info" in error
