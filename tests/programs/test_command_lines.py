"""Programs name arguments that they refuse, and two do not need the binary."""

from __future__ import annotations

import importlib

import pytest

from amp_ext.text_table import format_table

PROGRAMS = [("info", []), ("memory", ["7B"])]


def test_tables_are_aligned():
    rows = [["name", "size", "note"], ["a", "1,000", "x"], ["longer", "1", ""]]
    assert format_table(rows, left=(0, 2)).splitlines() == [
        "name     size  note",
        "a       1,000  x",
        "longer      1",
    ]


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
