"""The command line of the memory calculator.

python -m amp_ext.memory 7B                                   # AdamW, by configuration
python -m amp_ext.memory 1.3e9 --optimizer all                # every optimizer
python -m amp_ext.memory 7B --trainable 20M --json            # most parameters frozen; exact bytes
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence

from amp_ext.memory import NOT_COUNTED, OPTIMIZERS, make_table, training_memory
from amp_ext.program import make_console, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table or JSON.

    Args:
        arguments: Those of the command line, or None for the process's own.

    Returns:
        The exit code. Bad input exits with 2.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    names = list(OPTIMIZERS) if options.optimizer == "all" else [options.optimizer]
    try:
        usages = [
            usage
            for name in names
            for usage in training_memory(options.parameters, name, trainable=options.trainable)
        ]
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        rows = [usage.as_dict() for usage in usages]
        print(json.dumps({"rows": rows, "not_counted": NOT_COUNTED}, indent=1))
        return 0
    if importlib.util.find_spec("rich") is None:
        parser.error("rich is missing: pip install rich, or ask for --json")
    console = make_console()
    count, trained = usages[0].parameter_count, usages[0].trainable_count
    some = "" if trained == count else f", {trained:,} of them trained"
    console.print(f"{count:,} parameters{some}", style="bold")
    console.print(make_table(usages))
    console.print(f"Not counted: {'; '.join(NOT_COUNTED)}.", style="dim", soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.memory",
        description="Shows the memory that training takes: parameters, masters, gradients and "
        "optimizer states, by configuration.",
    )
    parser.add_argument("parameters", help="how many there are: 7B, 124M, 1.3e9, 7_000_000_000")
    choices = [*OPTIMIZERS, "all"]
    parser.add_argument("--optimizer", choices=choices, default="adamw", help="(adamw)")
    parser.add_argument("--trainable", help="how many of them are trained (all)")
    parser.add_argument("--json", action="store_true", help="prints exact bytes instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(run_program(main))
