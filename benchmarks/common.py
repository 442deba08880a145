"""What the benchmarks share: timing in turns, runs within a time limit, files and figures."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_ext.bench import Step, describe

CPU = torch.device("cpu")
# Colours are safe for colour-blind readers.
BLUE, LIGHT_BLUE, ORANGE, RED = "#004D7A", "#56B4E9", "#E69F00", "#D55E00"


REASONS = ("left_out", "failed")  # lists of runs without a result


def in_turns(timed: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """Calls each function once per round, and returns the least time of each."""
    times = [[call() for call in timed.values()] for _ in range(rounds)]
    return dict(zip(timed, map(min, zip(*times, strict=True)), strict=True))


def seconds_of(
    step: Step, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Returns a function that runs a step to its end on the device, and returns its seconds."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def run() -> float:
        wait()
        start = clock()
        step()
        wait()
        return clock() - start

    return run


def buffered(params: list[Parameter], masters: list[Parameter], step_masters: Step) -> Step:
    """Returns a step of float32 masters that copies gradients and parameters by foreach calls."""
    for master in masters:
        master.grad = torch.empty_like(master)

    def step() -> None:
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
        step_masters()
        torch._foreach_copy_([p.detach() for p in params], [m.detach() for m in masters])

    return step


def label_of(side: str) -> str:
    """Returns the name of an implementation in tables and pictures."""
    names = {"ours": "amp_ext", "swa_utils": "torch swa_utils"}
    of_torch = side in ("fused", "foreach", "default")
    return f"torch {side}" if of_torch else names.get(side, side.replace("_", " "))


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns masters, moments and step counters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def reason(error: BaseException | None) -> str:
    """Returns the first line of an error, and of each error that caused it."""
    texts = []
    while error is not None:
        line = str(error).strip().partition("\n")[0]
        texts.append(f"{type(error).__name__}: {line}" if line else type(error).__name__)
        error = error.__cause__
    return ", from ".join(texts)


def digits(value: float) -> str:
    """Formats a positive number with three significant digits, or as an integer from 1,000 on."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def new_result(device: torch.device, **lists: list[Any]) -> dict[str, Any]:
    """Returns an empty result, with hardware and versions as ``surroundings``."""
    return {"surroundings": describe(device), **lists, **{what: [] for what in REASONS}}


def make_parser(text: str) -> argparse.ArgumentParser:
    """Returns a parser with ``--device``. The first line of ``text`` is the description."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def add_files(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the options of a program that writes files of this name with :func:`run_and_store`."""
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no run begins that may end after these"
    )
    parser.add_argument("--out", type=Path, help=f"takes {name}.json, {name}.md and {name}.png")


def run_and_store(
    name: str,
    options: argparse.Namespace,
    result: dict[str, Any],
    runs: Iterable[tuple[str, Callable[[], None]]],
    markdown: Callable[[dict[str, Any]], str],
) -> int:
    """Calls functions that add to a result, prints its tables, and returns the exit code.

    Args:
        name: The name of the files.
        options: The options of :func:`add_files`. A run that might end after ``--seconds`` is not
            started, and the files in the folder ``--out`` are rewritten after each run.
        result: Takes the names of runs that are ``left_out`` or ``failed``, with reasons.
        runs: The name of each run, and the function.
        markdown: Formats a result.
    """
    out: Path | None = options.out

    def store() -> None:
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            (out / f"{name}.md").write_text(markdown(result) + "\n")

    begin, longest = time.monotonic(), 0.0
    for title, run in runs:
        start = time.monotonic()
        if start - begin + longest > options.seconds:
            why = f"not begun, for the {options.seconds:g} s are used up"
            result["left_out"].append(f"{title}: {why}")
            continue
        print(f"{title} ({start - begin:.0f} s so far)", file=sys.stderr, flush=True)
        try:
            run()
        except Exception as error:  # goes on with the other runs
            result["failed"].append(f"{title}: {reason(error)}")
        gc.collect()  # frees the optimizers, which are in reference cycles
        store()
        longest = max(longest, time.monotonic() - start)
    store()  # now includes the runs that were not started
    print(markdown(result))
    is_empty = not result.get("rows", result.get("runs"))
    if out and not is_empty:
        files = [out / f"{name}.{suffix}" for suffix in ("json", "png")]
        subprocess.run([sys.executable, Path(__file__).with_name("plot.py"), *files], check=True)
    return 1 if result["failed"] or is_empty else 0


def markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown. The first row has the headings."""
    heading, *lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [heading, "|" + "---|" * len(rows[0]), *lines]


def notes(result: dict[str, Any]) -> list[str]:
    """Returns a line for each run that was left out or failed."""
    return [f"* {what.replace('_', ' ')}: {line}" for what in REASONS for line in result[what]]


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarizes the seeds of each model and side: median rates and times, and mean losses.

    The loss of a run is the mean over its last tenth of steps. ``faster`` and ``update_faster`` are
    the times of torch's side in the same group, divided by those of this side. ``difference`` is
    the loss minus that of torch's run with the same seed: mean and deviation over the seeds.
    """
    of_sides: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        of_sides.setdefault((run["model"], run["group"], run["side"]), []).append(run)
    rows: list[dict[str, Any]] = []
    for (model, group, side), seeds in of_sides.items():
        row = {"model": model, "group": group, "side": side}
        for figure in ("rate", "update_ms"):
            row[figure] = statistics.median(run[figure] for run in seeds)
        for figure in ("parameters", "tensors", "unit", "bytes_kept", "peak_bytes"):
            row[figure] = seeds[0][figure]
        last = max(1, len(seeds[0]["losses"]) // 10)
        losses = {run["seed"]: statistics.fmean(run["losses"][-last:]) for run in seeds}
        row |= {"losses": losses, "faster": None, "update_faster": None, "difference": (None, None)}
        row["loss"], row["spread"] = mean_and_spread(losses.values())
        rows.append(row)
        base = next(r for r in rows if (r["model"], r["group"]) == (model, group))
        if base["side"].startswith("torch"):
            row["faster"] = row["rate"] / base["rate"]
            row["update_faster"] = base["update_ms"] / row["update_ms"]
            common = losses.keys() & base["losses"]
            row["difference"] = mean_and_spread(losses[s] - base["losses"][s] for s in common)
    return rows


def mean_and_spread(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Returns mean and standard deviation; each is None if there are too few values for it."""
    known = list(values)
    mean = statistics.fmean(known) if known else None
    return mean, statistics.stdev(known) if len(known) > 1 else None


def save(figure: Any, path: Path, dpi: int = 110) -> None:
    """Writes a figure, without the frame at the top and on the right of each panel."""
    import matplotlib.pyplot as plt

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
