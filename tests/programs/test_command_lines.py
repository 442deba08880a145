"""Every program of the package refuses what it cannot do; two do not need the binary."""

from __future__ import annotations

import importlib

import pytest

CALCULATORS = [("memory", "7B"), ("tensor_core", "vocab_size=50257")]

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
    ("tensor_core", "", "the following arguments are required: config"),
    ("tensor_core", "hidden=8", "a configuration must have some of vocab_size, hidden_size,"),
    ("tensor_core", "n_embd=wide", "n_embd must be a positive int, got 'wide'"),
    ("tensor_core", "nowhere.json", "nowhere.json is neither name=value nor a file"),
    ("tensor_core", b"[1]", "must hold a JSON object, got list"),
    ("tensor_core", b"{", "is not JSON"),
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


@pytest.mark.parametrize(("name", "argument"), CALCULATORS)
def test_calculators_need_no_binary(name, argument, copy, run_module):
    for binary in copy.glob("_C.*so"):
        binary.unlink()
    done = run_module(f"amp_ext.{name}", argument, folder=copy.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
