"""The command line of the memory calculator.

python -m amp_ext.memory 7B                            # all configurations of AdamW
python -m amp_ext.memory 1.3e9 --optimizer lion
python -m amp_ext.memory 7B --released                 # if backward() frees each gradient
python -m amp_ext.memory 30B --offloaded               # if the states are in host memory
"""

from __future__ import annotations

import argparse

from amp_ext.memory import NOT_COUNTED, OPTIMIZERS, training_memory
from amp_ext.text_table import format_table

_PARTS = ("parameters", "masters", "gradients", "states", "total")


def main(arguments: list[str] | None = None) -> None:
    """Prints the table. Exits with code 2 if the input is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.memory", description="Shows the memory that training takes."
    )
    about = "how many there are: 7B, 124M, 1.3e9, 7_000_000_000"
    parser.add_argument("model", metavar="parameters", help=about)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(adamw)")
    parser.add_argument("--released", action="store_true", help="as with release_gradients")
    parser.add_argument("--offloaded", action="store_true", help="as with offload_states")
    options = parser.parse_args(arguments)
    try:
        usages = training_memory(**vars(options))
    except ValueError as error:
        parser.error(str(error))
    count = usages[0].parameter_count
    how = ", released gradients" * options.released + ", states in host memory" * options.offloaded
    print(f"{count:,} parameters, {options.optimizer}{how}. GiB; 16-bit is fp16 or bf16.\n")
    places = ("GPU", "host") if options.offloaded else ()
    rows = [["configuration", *_PARTS, *places, "bytes each", "options"]]
    for usage in usages:
        sizes = {**usage.bytes, "GPU": usage.gpu, "host": usage.host}
        cells = [f"{sizes[part] / 2**30:,.2f}" for part in (*_PARTS, *places)]
        each, given = f"{usage.total / count:.4g}", usage.configuration.options or "defaults"
        rows.append([usage.configuration.name, *cells, each, given])
    print(format_table(rows, left=(0, len(rows[0]) - 1)))
    print(f"\nNot counted: {'; '.join(NOT_COUNTED)}.")


if __name__ == "__main__":
    main()
