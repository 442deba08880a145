"""No program ends in a traceback, whatever its output goes to and whatever it is given to read."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import amp_ext
from amp_ext.program import make_console, run_program
from amp_ext.tensor_core import Advice, make_table

pytest.importorskip("rich")

ROOT = Path(amp_ext.__file__).parents[1]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")

PROGRAMS = [("info", []), ("memory", ["7B"]), ("tensor_core", ["vocab_size=50257"])]
each_program = pytest.mark.parametrize(("name", "arguments"), PROGRAMS)


def run(monkeypatch, stream, name, arguments) -> int:
    """Runs a program in this process with another standard output."""
    monkeypatch.setattr(sys, "stdout", stream)
    main = importlib.import_module(f"amp_ext.{name}.__main__").main
    return run_program(lambda: main(arguments))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@each_program
def test_every_encoding_will_do(monkeypatch, name, arguments, encoding):
    written = io.BytesIO()
    arguments = ["--check"] if name == "info" else arguments
    code = run(monkeypatch, io.TextIOWrapper(written, encoding), name, arguments)
    text = written.getvalue().decode(encoding)
    assert code == 0
    if name == "info":
        assert "float32 works, float16 works, bfloat16 works\n\nIt works.\n" in text


def test_a_name_that_no_encoding_has_is_shown(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "utf-8"))
    assert run_program(lambda: sys.stdout.write("a folder\udcff, →") * 0) == 0
    assert written.getvalue().decode() == "a folder?, →"


def test_paths_and_names_are_not_read_as_markup(capsys):
    name = "Written: runs[a]/[/b]/:x:"
    make_console().print(name, make_table([Advice(name, 1, 3, 8, 8, 0, 0.0)]))
    assert capsys.readouterr().out.count(name) == 2


@each_program
def test_an_output_that_nobody_reads_ends_a_program_quietly(monkeypatch, capsys, name, arguments):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        assert run(monkeypatch, stream, name, arguments) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


@needs_full
@each_program
def test_a_full_device_is_told_in_a_line(monkeypatch, capsys, name, arguments):
    with FULL.open("w") as stream:
        assert run(monkeypatch, stream, name, arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": error: can't write the output: No space left on device")


@each_program
def test_a_closed_output_is_no_error(monkeypatch, capsys, name, arguments):
    assert run(monkeypatch, None, name, arguments) == 0
    assert capsys.readouterr().err == ""


def test_what_stops_a_program_gives_its_exit_code(monkeypatch):
    def stop(error: BaseException) -> int:
        raise error

    assert run_program(lambda: stop(KeyboardInterrupt())) == 130
    assert run_program(lambda: stop(SystemExit(2))) == 2
    assert run_program(lambda: stop(SystemExit())) == 0
    assert run_program(lambda: 5) == 5


EVERY = [
    *(["-m", f"amp_ext.{name}", *arguments] for name, arguments in PROGRAMS),
    ["-m", "amp_ext.bench", "--device=cpu", "--list"],
]


@needs_full
@pytest.mark.slow
@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_each_program_is_one_of_those(command):
    pytest.importorskip("matplotlib")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "can't write the output" in done.stderr


# What is to be written is tried before anything is measured; what is read may be anything.

BENCH = ["--device=cpu", "--shrink=20000", "--rounds=1", "--seconds=1e-4"]
REFUSED = {
    "filter": (["--filter=("], "argument --filter: '(' is no regular expression: missing )"),
    "json": (["--json=/proc/nope/x.json"], "--json: can't write /proc/nope/x.json: "),
    "json-folder": (["--json=/proc/nope"], "--json: can't write /proc/nope: "),
    "plot": (["--plot=/proc/nope/x.png"], "--plot: can't write /proc/nope/x.png: "),
    "format": (["--plot={folder}/x.xyz"], "x.xyz must end in one of "),
    "file-as-folder": (["--json={file}/x.json"], "--json: can't write "),
    "device": (["--device=no"], "argument --device: "),
    "meta": (["--device=meta"], "argument --device: must be cpu or a GPU that torch sees"),
    "rounds": (["--rounds=0"], "argument --rounds: must be 1 or more, got 0"),
    "seconds": (["--seconds=nan"], "argument --seconds: must be positive, got nan"),
    "shrink": (["--shrink=-1"], "argument --shrink: must be 1 or more, got -1"),
    "load": (["--load=/proc/nope"], "--load: [Errno 2] No such file"),
    "load-text": (["--load={file}"], "is not JSON: "),
    "load-deep": (["--load={deep}"], "deep.json is nested too deeply"),
    "load-other": (["--load={other}"], "other.json must be a file that --json wrote"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_the_benchmark_refuses_before_it_measures(
    arguments, message, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("matplotlib")
    bench = importlib.import_module("amp_ext.bench.__main__")
    monkeypatch.setattr(bench, "measure", None)
    places = {name: tmp_path / f"{name}.json" for name in ("file", "deep", "other")}
    places["file"].write_text("no JSON")
    places["deep"].write_text("[" * 100_000)
    places["other"].write_text(json.dumps({"rows": [{}]}))
    given = [argument.format(folder=tmp_path, **places) for argument in arguments]
    with pytest.raises(SystemExit, match="2"):
        bench.main([*BENCH, *given])
    assert message in capsys.readouterr().err
    assert places["file"].read_text() == "no JSON"
    assert sorted(tmp_path.iterdir()) == sorted(places.values())


def test_a_file_that_is_there_keeps_what_it_holds_until_the_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    bench = importlib.import_module("amp_ext.bench.__main__")
    stored = tmp_path / "x.json"
    stored.write_text("old")
    with pytest.raises(SystemExit, match="2"):
        bench.main([*BENCH, "--filter=nothing-like-this", f"--json={stored}"])
    assert stored.read_text() == "old"
