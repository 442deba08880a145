"""Programs run under the launcher as they run without it, only with our scaler and optimizers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import amp_ext
from amp_ext import run

OLD_STYLE = """
import sys
import torch
from torch import nn
from torch.cuda.amp import autocast, GradScaler

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = GradScaler()
x, y = torch.randn(32, 8).to(device), torch.randn(32, 1).to(device)
for epoch in range(5):
    optimizer.zero_grad()
    with autocast(enabled=False):
        loss = nn.functional.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("epoch", epoch, "loss", loss.item())
print(type(scaler).__mro__, type(optimizer).__mro__, file=sys.stderr)
"""

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

COMMAND_LINE = """
import argparse
import sys
import torch


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--optimizers", action="store_true")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main(args):
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(device="cpu", enabled=args.amp)
    print(args, scaler.is_enabled())
    for _ in range(4):
        loss = (model(torch.eye(4)) - 1).pow(2).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print("loss=%.6f" % loss)
    print(type(scaler).__mro__, type(optimizer).__mro__, file=sys.stderr)


if __name__ == "__main__":
    main(parse_args())
"""

PICKLES = """
import copy
import dataclasses
import io
import pickle
import sys
import torch


@dataclasses.dataclass
class Config:
    lr: float = 0.05


def steps(number):
    for _ in range(number):
        loss = (param - torch.arange(5.0)).square().sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(loss.item(), scaler.get_scale())


config = pickle.loads(pickle.dumps(Config()))
param = torch.nn.Parameter(torch.zeros(5))
optimizer = torch.optim.AdamW([param], lr=config.lr)
scaler = torch.cpu.amp.GradScaler(256.0, growth_interval=3)
steps(4)
file = io.BytesIO()
torch.save({"param": param, "optimizer": optimizer, "scaler": scaler, "config": config}, file)
file.seek(0)
saved = copy.deepcopy(torch.load(file, weights_only=False))
param, optimizer, scaler = saved["param"], saved["optimizer"], saved["scaler"]
print(saved["config"], optimizer.param_groups[0]["params"][0] is param)
steps(3)
print(type(scaler).__mro__, type(optimizer).__mro__, file=sys.stderr)
"""

RESUMES = """
import sys
import torch


def build():
    torch.manual_seed(4)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    return model, optimizer, schedule, torch.amp.grad_scaler.GradScaler("cpu", growth_interval=3)


def train(model, optimizer, schedule, scaler):
    for _ in range(4):
        loss = model(torch.ones(2, 3)).abs().sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        print(loss.item(), schedule.get_last_lr()[0], scaler.state_dict())


first = build()
train(*first)
second = build()
for new, old in zip(second, first):
    new.load_state_dict(old.state_dict())
train(*second)
print(type(second[3]).__mro__, type(second[1]).__mro__, file=sys.stderr)
raise SystemExit(3)
"""

STYLES = [
    pytest.param(OLD_STYLE, ["--optimizers"], [], id="old-style"),
    pytest.param(CLIPPING, [], [], id="clipping"),
    pytest.param(CLIPPING, ["--optimizers"], [], id="clipping-optimizers"),
    pytest.param(
        COMMAND_LINE,
        ["--optimizers"],
        ["data", "--lr", "0.2", "--no-amp", "--optimizers"],
        id="command-line",
    ),
    pytest.param(PICKLES, ["--optimizers"], [], id="pickles"),
    pytest.param(RESUMES, ["--optimizers"], [], id="resumes-exits-with-3"),
]

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

ENDS = [
    pytest.param(SURROUNDINGS, id="surroundings"),
    pytest.param("import sys\nprint('out')\nsys.exit('words')", id="exit-with-words"),
    pytest.param("def f():\n    [][1]\n\n\ntry:\n    f()\nfinally:\n    1 / 0", id="error"),
    pytest.param("print('never')\nthis is no Python", id="syntax-error"),
    pytest.param("raise KeyboardInterrupt", id="interrupted"),
    pytest.param(
        "import sys, traceback\n"
        "sys.excepthook = lambda *error: print(len(traceback.extract_tb(error[2])), error[1])\n"
        "raise ValueError('shown by its own hook')",
        id="own-hook",
    ),
]


def python(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with the package on its path but not first."""
    root = Path(amp_ext.__file__).parent.parent
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_here(script: Path, arguments: list[str], monkeypatch) -> tuple[int, str]:
    """Runs a script without the launcher in this process, which has loaded torch already."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            code = error.code
    return code, printed.getvalue()


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    number = r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?"
    return re.split(number, text), [float(found) for found in re.findall(number, text)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("source", "options", "arguments"), STYLES)
def test_a_training_script_prints_the_same_losses(
    source, options, arguments, tmp_path, monkeypatch
):
    script = tmp_path / "train.py"
    script.write_text(source)
    code, expected = run_here(script, arguments, monkeypatch)
    done = python("-m", "amp_ext.run", *options, "train.py", *arguments, folder=tmp_path)
    assert done.returncode == code, done.stderr
    scaler, optimizer = done.stderr.splitlines()[-1].split(") (")
    assert "amp_ext.grad_scaler.GradScaler" in scaler
    assert ("amp_ext.optim" in optimizer) == bool(options)
    words, numbers = words_and_numbers(done.stdout)
    expected_words, expected_numbers = words_and_numbers(expected)
    assert words == expected_words
    # Both sides round some dozen operations to float32, in another order.
    assert numbers == pytest.approx(expected_numbers, rel=1e-5, abs=2e-6)
    assert len(numbers) > 4


@pytest.mark.parametrize("source", ENDS)
def test_a_script_sees_and_shows_what_it_does_without_the_launcher(source, tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "script.py").write_text(source)
    program = ("scripts/script.py", "-x", "--optimizers", "--", "-m")
    expected = python(*program, folder=tmp_path)
    done = python("-m", "amp_ext.run", *program, folder=tmp_path)
    assert done.stdout == expected.stdout
    assert done.stderr == expected.stderr
    assert done.returncode == expected.returncode


@pytest.mark.parametrize("name", ["package.module", "package"])
def test_a_module_runs_by_its_name(name, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "here.py").write_text("WORD = 'imported'")
    facts = "import sys\nfrom .here import WORD\nprint(WORD, sys.argv, sys.path[0], __file__)\n"
    facts += "print(__name__, __spec__.name, __package__, type(__loader__))\n1 / 0"
    for file in ("module.py", "__main__.py"):
        (package / file).write_text(facts)
    expected = python("-m", name, "--lr", "1", folder=tmp_path)
    done = python("-m", "amp_ext.run", "--optimizers", "-m", name, "--lr", "1", folder=tmp_path)
    assert done.stdout == expected.stdout
    assert "imported" in done.stdout
    assert done.returncode == expected.returncode == 1
    # Python itself shows the two frames of its own launcher.
    lines = expected.stderr.splitlines()
    assert done.stderr.splitlines() == [line for line in lines if "<frozen runpy>" not in line]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        pytest.param(["no_such.py"], "can't open script 'no_such.py': No such file", id="script"),
        pytest.param(["."], "can't open script '.': Is a directory", id="folder"),
        pytest.param(["-m", "no_such"], "no module 'no_such' of Python code", id="module"),
        pytest.param(["-m", "no_such.one"], "no module 'no_such.one' of Python", id="submodule"),
        pytest.param(["-m", "json"], "no module 'json.__main__' of Python code", id="package"),
        pytest.param(["-m", "math"], "no module 'math' of Python code", id="compiled"),
        pytest.param(["-m", "./train.py"], "by its full name, got './train.py'", id="path"),
        pytest.param(["--fast", "train.py"], "unrecognized arguments: --fast", id="option"),
        pytest.param(["--opt", "train.py"], "unrecognized arguments: --opt", id="abbreviation"),
        pytest.param([], "required: script.py or module", id="nothing"),
        pytest.param(["-m"], "required: script.py or module", id="no-module"),
    ],
)
def test_what_cannot_be_run_is_said_and_exits_with_2(arguments, wanted, monkeypatch, capsys):
    monkeypatch.setattr(run, "patch_torch", lambda **_: None)
    with pytest.raises(SystemExit) as exit_info:
        run.main(arguments)
    assert exit_info.value.code == 2
    assert wanted in capsys.readouterr().err


def test_a_module_that_lacks_another_says_which(tmp_path, monkeypatch):
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "__init__.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(run, "patch_torch", lambda **_: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed'"):
        run.main(["-m", "lacking"])


def test_a_binary_that_does_not_load_stops_the_program_before_it_starts(monkeypatch, capsys):
    def fail(**_: bool) -> None:
        raise ImportError("amp_ext was built for torch 1.2.3")

    monkeypatch.setattr(run, "patch_torch", fail)
    with pytest.raises(SystemExit) as exit_info:
        run.main(["no_such.py"])
    assert exit_info.value.code == 1
    error = capsys.readouterr().err
    assert "amp_ext.run: amp_ext was built for torch 1.2.3" in error
    assert "python -m amp_ext.info" in error
