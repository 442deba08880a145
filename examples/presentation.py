"""What the programs in this folder share: their options, progress bars, figures and tables."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def make_parser(text: str, name: str, quick: str, device: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with ``--out``, ``--quick``, which does what is said, and ``--device``."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results") / name, help="folder to write")
    parser.add_argument("--quick", action="store_true", help=quick)
    if device:
        default, where = "cuda" if torch.cuda.is_available() else "cpu", "where to train"
        parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=where)
    return parser


def positive(text: str) -> int:
    """Reads a number of at least 1 from the command line."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def make_progress(console: Console, shown: str = "") -> Progress:
    """Returns bars with a description, what of their fields is shown, and the time."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(shown),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    return Progress(*columns, console=console)


def run_all(
    recipes: Sequence[Any],
    train_one: Callable[[Any, int, Callable[..., None]], Any],
    seeds: int,
    steps: int,
    figures: dict[str, str],
    console: Console,
) -> dict[Any, list[Any]]:
    """Trains every recipe with every seed, with a progress bar for each recipe.

    Args:
        recipes: What to train; each has a name.
        train_one: Takes a recipe, a seed, and what is to be called with the figures of each step.
        seeds: How often.
        steps: Steps of a training.
        figures: What the bars show, by its name: the format of a number.
        console: Where the bars are.
    """
    shown = "  ".join(f"{name} {{task.fields[{name}]:{form}}}" for name, form in figures.items())
    results: dict[Any, list[Any]] = {recipe: [] for recipe in recipes}
    with make_progress(console, shown) as progress:
        start = dict.fromkeys(figures, 0)
        bars = [progress.add_task(r.name, False, seeds * steps, **start) for r in recipes]
        for seed in range(seeds):
            for recipe, bar in zip(recipes, bars, strict=True):
                progress.start_task(bar)
                report = partial(progress.update, bar, advance=1)
                results[recipe].append(train_one(recipe, seed, report))
    return results


def start_figure(title: str, height: float) -> Figure:
    """Returns an empty figure with its title."""
    figure = plt.figure(figsize=(13, height))
    figure.suptitle(title, fontsize=15)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    return figure


def finish_axes(*axes: Axes) -> None:
    """Gives curves a grid, and a legend where some have a label."""
    for each in axes:
        each.grid(alpha=0.3)
        each.margins(y=0.08)
        each.spines[["top", "right"]].set_visible(False)
        if each.get_legend_handles_labels()[0]:
            each.legend(frameon=False)


def write_figure(figure: Figure, caption: str, path: Path, dpi: int = 160) -> None:
    """Writes a figure with its caption below."""
    figure.supxlabel(textwrap.fill(caption, 180), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def start_table(left: Sequence[str], right: Sequence[str] = (), **options: Any) -> Table:
    """Returns an empty table with columns of words and of numbers."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, **options)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def show_mean(values: list[float], form: str) -> str:
    """Formats the mean and, from two values on, the standard deviation."""
    deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{deviation}".replace("-", "−")


def judge(claims: dict[str, bool], console: Console) -> int:
    """Says which claims hold; returns the exit code, 1 if one does not."""
    for claim, true in claims.items():
        console.print(f"{claim}: {'yes' if true else 'NO'}", style="green" if true else "red")
    return 0 if all(claims.values()) else 1
