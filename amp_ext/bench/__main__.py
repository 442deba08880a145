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
from amp_ext.bench.steps import make_params, make_program
from amp_ext.bench.work import SIDES, choose_rows, row_name
from amp_ext.text_table import format_table

NOTE = (
    "Figures are amp_ext's; ÷ is torch's time divided by ours, in float32 that of our step with "
    "float32 masters and moments; each the least of runs in turns. B stored is what an element has "
    "between steps, with its gradient; B/elem. what a step must read and write, all that GB/s "
    "counts. Streaming is x.mul_(c), on a GPU y.copy_(x), and can be exceeded."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the chosen rows, prints a table and writes the JSON file; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    known = [*["cuda"] * (gpus > 0), *(f"cuda:{index}" for index in range(gpus)), "cpu"]
    if options.device not in (None, *known):
        parser.error(f"--device: must be cpu or a GPU that torch sees, got {options.device!r}")
    device = torch.device(options.device or known[0])
    rows = choose_rows(device.type, options.quick)
    try:
        chosen = [row for row in rows if re.search(options.filter, row_name(*row), re.IGNORECASE)]
    except re.error as error:
        parser.error(f"--filter: {options.filter!r} is no regular expression: {error}")
    if not chosen:
        names = "; ".join(row_name(*row) for row in rows)
        parser.error(f"--filter {options.filter!r} matches no row of: {names}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    about = measure.describe(device)
    run = functools.partial(measure.run_times, seconds=0.05 if options.quick else 0.15)
    streaming = measure.make_streaming(device)
    measured: list[dict[str, Any]] = []

    def store() -> None:
        if options.json:
            result = {"surroundings": about, "arguments": sys.argv[1:], "rows": measured}
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    for work, shapes in chosen:
        print(f"{row_name(work, shapes)} ...", file=sys.stderr)
        programs = {
            side: make_program(side, work, make_params(work, shapes, device))
            for side in work.sides()
        }
        measured.append(measure.measure_row(work, shapes, programs, streaming, run))
        store()  # after every row, because a long run may be interrupted
        del programs
        gc.collect()  # deletes the optimizers, which are in reference cycles
    speeds = [row["streaming_gb_per_s"] for row in measured if not row["many_small"]]
    about += [f"streaming: {max(speeds):.1f} GB/s at best"] if speeds else []
    print("\n".join(about), "", make_table(measured), "", NOTE, sep="\n")
    store()
    if options.json:
        print(f"Written: {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.bench",
        description="Times steps of scaler and optimizer, ours beside torch's, in turns.",
    )
    parser.add_argument("--quick", action="store_true", help="the most common rows; a minute")
    parser.add_argument("--device", help="cpu or cuda (a GPU if any)")
    parser.add_argument("--filter", default="", help="regular expression on 'work, shapes'")
    parser.add_argument("--json", type=Path, help="the file that takes the figures")
    return parser


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Returns the table cells of a measured row, keyed by column heading."""
    ours, many_small = row["sides"]["ours"], row["many_small"]
    ratios = {side: f"{ratio:.2f}" for side, ratio in row["ratios"].items()}
    return {
        "scaler.step + update": row["work"],
        "B stored": f"{row['bytes_stored']:.4g}",
        "B/elem.": f"{row['bytes_per_element']:.4g}",
        "ns/elem.": f"{ours['ns_per_element']:.3g}",
        "GB/s": f"{ours['gb_per_s']:.3g}",
        "of stream": "" if many_small else f"{ours['share_of_streaming']:.1%}",
        **{f"÷ {SIDES[side].removeprefix('torch ')}": ratios.get(side, "") for side in SIDES},
        "host µs/tensor": f"{ours['host_us_per_tensor']:.3f}" if many_small else "",
    }


def make_table(rows: list[dict[str, Any]]) -> str:
    """Formats a table with a section for each list of shapes; leaves out empty columns."""
    table = [cells(row) for row in rows]
    shown = [title for title in table[0] if any(row[title] for row in table)]
    text = format_table([shown, *([row[title] for title in shown] for row in table)])
    head, *lines = text.splitlines()
    for shapes in dict.fromkeys(row["shapes"] for row in rows):
        of_shapes = [line for row, line in zip(rows, lines, strict=True) if row["shapes"] == shapes]
        head = "\n".join([head, "", shapes, *of_shapes])
    return head


if __name__ == "__main__":
    sys.exit(main())
