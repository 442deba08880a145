"""Programs name arguments that they refuse, and two do not need the binary."""

from __future__ import annotations

import importlib

import pytest

from amp_ext.text_table import format_table


def test_tables_are_aligned():
    rows = [["name", "size", "note"], ["a", "1,000", "x"], ["longer", "1", ""]]
    assert format_table(rows, left=(0, 2)).splitlines() == [
        "name     size  note",
        "a       1,000  x",
        "longer      1",
    ]


# A program, its arguments, and a part of what it says.
REFUSED = [
    ("bench", "--device=cpu --filter=nothing-like-this", "matches no row"),
    ("bench", "--device=meta", "invalid choice: 'meta'"),
    ("info", "--fast", "unrecognized arguments: --fast"),
    ("memory", "7X", "must be a whole number"),
    ("memory", "7B --optimizer=tiger", "invalid choice: 'tiger'"),
    ("memory", "", "parameters"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_bad_arguments_exit_with_2(name, arguments, message, capsys):
    program = importlib.import_module(f"amp_ext.{name}.__main__")
    with pytest.raises(SystemExit) as exit_info:
        program.main(arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_calculator_needs_no_binary(copy, run_module):
    for binary in copy.glob("_C.*so"):
        binary.unlink()
    done = run_module("amp_ext.memory", "7B", folder=copy.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
