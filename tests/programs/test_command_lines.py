"""No program ends in a traceback, whatever its output goes to and whatever it is given to read.

Each refuses what it cannot do, and two do not need the binary.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from amp_ext.program import format_table, run_program

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")

PROGRAMS = [("info", []), ("memory", ["7B"])]
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


def test_tables_are_aligned():
    rows = [["name", "size", "note"], ["a", "1,000", "x"], ["longer", "1", ""]]
    assert format_table(rows, left=(0, 2)).splitlines() == [
        "name     size  note",
        "a       1,000  x",
        "longer      1",
    ]


@each_program
def test_an_output_that_nobody_reads_ends_a_program_quietly(monkeypatch, capsys, name, arguments):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        assert run(monkeypatch, stream, name, arguments) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_what_stops_a_program_gives_its_exit_code(monkeypatch):
    def stop(error: BaseException) -> int:
        raise error

    assert run_program(lambda: stop(KeyboardInterrupt())) == 130
    assert run_program(lambda: stop(SystemExit(2))) == 2
    assert run_program(lambda: stop(SystemExit())) == 0
    assert run_program(lambda: 5) == 5


@needs_full
@each_program
def test_a_full_device_is_told_in_a_line(run_module, tmp_path, name, arguments):
    done = run_module(f"amp_ext.{name}", *arguments, folder=tmp_path, stdout=str(FULL))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(": error: can't write the output: No space left on device")


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(capsys):
    main = importlib.import_module("amp_ext.bench.__main__").main
    assert run_program(lambda: main(["--device=cpu", "--json=/proc/nope/x.json"])) == 1
    assert ": error: /proc/nope: No such file" in capsys.readouterr().err


# A program, its arguments or what its file holds, and a part of what it says.
REFUSED = [
    ("bench", "--device=cpu --filter=nothing-like-this", "matches no row"),
    ("bench", "--filter=(", "--filter: '(' is no regular expression: missing )"),
    ("bench", "--device=no", "--device: must be cpu or a GPU that torch sees"),
    ("bench", "--device=meta", "--device: must be cpu or a GPU that torch sees"),
    ("info", "--fast", "unrecognized arguments: --fast"),
    ("memory", "7X", "must be a whole number"),
    ("memory", "7B --optimizer=tiger", "invalid choice: 'tiger'"),
    ("memory", "", "parameters"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_bad_arguments_exit_with_2(name, arguments, message, tmp_path, capsys):
    program = importlib.import_module(f"amp_ext.{name}.__main__")
    file = tmp_path / "config.json"
    if isinstance(arguments, bytes):
        file.write_bytes(arguments)
    with pytest.raises(SystemExit) as exit_info:
        program.main([str(file)] if file.exists() else arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "arguments"), PROGRAMS[1:])
def test_calculators_need_no_binary(name, arguments, copy, run_module):
    for binary in copy.glob("_C.*so"):
        binary.unlink()
    done = run_module(f"amp_ext.{name}", *arguments, folder=copy.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
