"""The command line of the benchmark.

python -m amp_ext.bench --quick               # the most common rows, in a minute
python -m amp_ext.bench --json results.json   # all rows; also writes the results to a file
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amp_ext.bench import measure
from amp_ext.bench.steps import choose_rows, make_params, make_program, row_name
from amp_ext.text_table import format_table

NOTE = (
    "Figures are amp_ext's; ÷ is torch's time divided by ours, in float32 that of our step with "
    "float32 masters and moments; each the least of runs in turns. B stored is what an element has "
    "between steps, with its gradient; B/elem. what a step must read and write, all that the share "
    "of the stream counts, which is x.mul_(c), on a GPU y.copy_(x), and can be exceeded."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the chosen rows, prints a table and writes the JSON file."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.bench",
        description="Times steps of scaler and optimizer, ours beside torch's, in turns.",
    )
    parser.add_argument("--quick", action="store_true", help="the most common rows; a minute")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--filter", default="", help="regular expression on 'work, shapes'")
    parser.add_argument("--json", type=Path, help="the file that takes the figures")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    rows = choose_rows(device.type, options.quick)
    chosen = [row for row in rows if re.search(options.filter, row_name(*row[:2]), re.IGNORECASE)]
    if not chosen:
        names = "; ".join(row_name(*row[:2]) for row in rows)
        parser.error(f"--filter {options.filter!r} matches no row of: {names}")
    about = measure.describe(device)
    run = functools.partial(measure.run_times, seconds=0.05 if options.quick else 0.15)
    streaming = measure.make_streaming(device)
    measured: list[dict[str, Any]] = []

    for work, shapes, sides in chosen:
        print(f"{row_name(work, shapes)} ...", file=sys.stderr)
        programs = {
            side: make_program(side, work, make_params(work, shapes, device)) for side in sides
        }
        measured.append(measure.measure_row(work, shapes, programs, streaming, run))
        if options.json:  # after every row, because a long run may be interrupted
            options.json.parent.mkdir(parents=True, exist_ok=True)
            result = {"surroundings": about, "arguments": sys.argv[1:], "rows": measured}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        del programs
        gc.collect()  # deletes the optimizers, which are in reference cycles
    print("\n".join(about), "", make_table(measured), "", NOTE, sep="\n")


def make_table(rows: list[dict[str, Any]]) -> str:
    """Formats a table of all rows."""
    sides = dict.fromkeys(side for row in rows for side in row["ratios"])
    heads = ["tensors", "scaler.step + update", "B stored", "B/elem.", "ns/elem.", "of stream"]
    table = [[*heads, *(f"÷ {side.replace('_', ' ')}" for side in sides)]]
    for row in rows:
        ours, ratios = row["sides"]["ours"], row["ratios"]
        share = ours["share_of_streaming"]
        figures = (row["bytes_stored"], row["bytes_per_element"], ours["ns_per_element"])
        cells = [row["shapes"], row["work"], *(f"{figure:.4g}" for figure in figures)]
        cells.append("" if share is None else f"{share:.1%}")
        table.append(cells + [f"{ratios[side]:.2f}" if side in ratios else "" for side in sides])
    return format_table(table, left=(0, 1))


if __name__ == "__main__":
    main()
