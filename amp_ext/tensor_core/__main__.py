"""The command line that finds dimensions which slow down Tensor Cores.

python -m amp_ext.tensor_core config.json                    # a Hugging Face configuration
python -m amp_ext.tensor_core config.json vocab_size=50257   # the same with one value replaced
python -m amp_ext.tensor_core n_embd=768 n_head=12 vocab_size=50257
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amp_ext.program import format_table, run_program
from amp_ext.tensor_core import MULTIPLE, VOCABULARY_MULTIPLE, tensor_core_advice


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the advice as a table; returns 0. Exits with code 2 if the input is invalid."""
    parser = _parser()
    try:
        config: dict[str, Any] = {}
        for text in parser.parse_args(arguments).config:
            config |= _read(text)
        advice = tensor_core_advice(config)
    except ValueError as error:
        parser.error(str(error))
    if not advice:
        multiples = f"{MULTIPLE}, the vocabulary of {VOCABULARY_MULTIPLE}"
        print(f"Every dimension is a multiple of {multiples}.")
        return 0
    rows = [["dimension", "size", "multiple", "padded"]]
    for row in advice:
        sizes = (f"{each:,}" for each in (row.size, row.multiple, row.padded))
        rows.append([row.dimension, *sizes])
    print(format_table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.tensor_core",
        description="Shows which dimensions of a model should be padded so that fp16 and bf16 "
        "matrix products run on Tensor Cores at full speed.",
    )
    names = "name=value or a JSON file, with Hugging Face's names; later ones replace earlier ones"
    parser.add_argument("config", nargs="+", help=names)
    return parser


def _read(text: str) -> dict[str, Any]:
    """Reads one argument: ``name=value`` or the path of a JSON file.

    Raises:
        ValueError: If the argument is neither.
    """
    name, equals, value = text.partition("=")
    if equals and name.isidentifier():
        try:
            return {name: json.loads(value)}
        except ValueError:
            return {name: value}
    try:
        config = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{text} is neither name=value nor a file to read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{text} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{text} must hold a JSON object, got {type(config).__name__}")
    return config


if __name__ == "__main__":
    sys.exit(run_program(main))
