"""The command line of the advice on Tensor Cores.

python -m amp_ext.tensor_core config.json                          # as Hugging Face has it
python -m amp_ext.tensor_core config.json vocab_size=50257 --json  # with a change
python -m amp_ext.tensor_core n_embd=768 n_head=12 n_layer=12 vocab_size=50257 --batch-size 3
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amp_ext.program import make_console, parse_json, run_program
from amp_ext.tensor_core import MULTIPLE, VOCABULARY_MULTIPLE, make_table, tensor_core_advice


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table or JSON.

    Args:
        arguments: Those of the command line, or None for the process's own.

    Returns:
        The exit code, 0 whatever the advice. Bad input exits with 2.
    """
    parser = _parser()
    options = vars(parser.parse_intermixed_args(arguments))
    as_json = options.pop("json")
    try:
        config: dict[str, Any] = {}
        for text in options.pop("config"):
            config |= _read(text)
        advice = tensor_core_advice(config, **options)
    except ValueError as error:
        parser.error(str(error))
    if as_json:
        print(json.dumps([asdict(row) for row in advice], indent=1))
        return 0
    if importlib.util.find_spec("rich") is None:
        parser.error("rich is missing: pip install rich, or ask for --json")
    console = make_console()
    if advice:
        console.print(make_table(advice))
        console.print("Adds: parameters, if only this row is padded.", style="dim")
    else:
        console.print(
            f"Every dimension is a multiple of {options['multiple']}, "
            f"the vocabulary of {options['vocabulary_multiple']}."
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.tensor_core",
        description="Shows which dimensions of a model should be padded so that fp16 and bf16 "
        "matrix products run on Tensor Cores at full speed.",
    )
    names = "name=value or a JSON file, with Hugging Face's names; later ones replace earlier ones"
    parser.add_argument("config", nargs="+", help=names)
    parser.add_argument("--batch-size", type=int, help="sequences in a batch")
    parser.add_argument("--sequence-length", type=int, help="tokens in a sequence")
    parser.add_argument(
        "--multiple", type=int, default=MULTIPLE, help="for dimensions (%(default)s)"
    )
    parser.add_argument(
        "--vocabulary-multiple",
        type=int,
        default=VOCABULARY_MULTIPLE,
        help="for the vocabulary (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="prints a list instead of a table")
    return parser


def _read(text: str) -> dict[str, Any]:
    """Reads one argument: ``name=value`` or the path of a JSON file.

    Raises:
        ValueError: If it is none of them.
    """
    name, equals, value = text.partition("=")
    if equals and name.isidentifier():
        try:
            return {name: json.loads(value)}
        except ValueError:
            return {name: value}
    try:
        config = parse_json(Path(text).read_text(encoding="utf-8"), text)
    except OSError as error:
        raise ValueError(f"{text} is neither name=value nor a file to read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{text} must hold a JSON object, got {type(config).__name__}")
    return config


if __name__ == "__main__":
    sys.exit(run_program(main))
