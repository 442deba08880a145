"""The command line of the benchmark.

python -m amp_ext.bench --quick               # the most common rows, in a minute
python -m amp_ext.bench --json results.json   # all rows; also writes the results to a file
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from pathlib import Path

import torch

from amp_ext import bench
from amp_ext.text_table import format_table

NOTE = (
    "÷ is the time of torch, or of our step with float32 masters and moments, divided by ours; the "
    "fastest run counts. B stored: bytes of an element between two steps, with its gradient. "
    "B/elem.: bytes that a step must read and write. of stream: their bandwidth as a share of that "
    "of x.mul_(c), on a GPU of y.copy_(x). A step that prefetches can exceed it."
)


def main(arguments: list[str] | None = None) -> None:
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
    rows = bench.choose_rows(device.type, options.quick)
    chosen = {name: row for name, row in rows.items() if re.search(options.filter, name, re.I)}
    if not chosen:
        parser.error(f"--filter {options.filter!r} matches no row of: {'; '.join(rows)}")
    about = bench.describe(device)
    streaming = bench.make_streaming(device)
    measured = []

    for name, (work, shapes, sides) in chosen.items():
        print(f"{name} ...", file=sys.stderr)
        programs = {
            side: bench.make_program(side, work, bench.make_params(work, shapes, device))
            for side in sides
        }
        measured.append(bench.measure_row(work, shapes, programs, streaming))
        if options.json:  # after every row, because a long run may be interrupted
            options.json.parent.mkdir(parents=True, exist_ok=True)
            result = {"surroundings": about, "arguments": sys.argv[1:], "rows": measured}
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        del programs
        gc.collect()  # deletes the optimizers, which are in reference cycles

    compared = dict.fromkeys(side for row in measured for side in row["ratios"])
    heads = ["tensors", "scaler.step + update", "B stored", "B/elem.", "ns/elem.", "of stream"]
    table = [[*heads, *(f"÷ {side.replace('_', ' ')}" for side in compared)]]
    for row in measured:
        ours, ratios = row["sides"]["ours"], row["ratios"]
        time, share = 1e9 * ours["seconds"] / row["elements"], ours["share_of_streaming"]
        figures = (row["bytes_stored"], row["bytes_per_element"], time)
        cells = [row["shapes"], row["work"], *(f"{figure:.4g}" for figure in figures)]
        cells.append("" if share is None else f"{share:.1%}")
        table.append(cells + [f"{ratios[side]:.2f}" if side in ratios else "" for side in compared])
    print("\n".join(about), "", format_table(table, left=(0, 1)), "", NOTE, sep="\n")


if __name__ == "__main__":
    main()
