"""Helpers that the examples share: command-line options, figures and checks of their claims."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def make_parser(
    text: str, name: str, quick: str, *, seeds: bool = True, device: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser with the common options of the examples.

    Args:
        text: Docstring of the program. Its first line becomes the description.
        name: Name of the program. Results go to ``results/<name>`` by default.
        quick: Help text of ``--quick``.
        seeds: Whether to add ``--seeds``.
        device: Whether to add ``--device``.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results") / name, help="folder to write")
    parser.add_argument("--quick", action="store_true", help=quick)
    if seeds:
        parser.add_argument("--seeds", type=positive, default=1, help="how often each runs (1)")
    if device:
        default, where = "cuda" if torch.cuda.is_available() else "cpu", "where to train"
        parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=where)
    return parser


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line and creates the output folder."""
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def positive(text: str) -> int:
    """Parses an integer of at least 1. For other text, raises a ValueError for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def run_all(
    recipes: Sequence[Any], train_one: Callable[[Any, int], Any], seeds: int
) -> dict[Any, list[Any]]:
    """Calls ``train_one(recipe, seed)`` for every recipe and seed; returns results by recipe."""
    results: dict[Any, list[Any]] = {recipe: [] for recipe in recipes}
    for seed in range(seeds):
        for recipe in recipes:
            print(f"{recipe.name}, seed {seed}", flush=True)
            results[recipe].append(train_one(recipe, seed))
    return results


def differences(results: dict[Any, list[Any]], recipe: Any, base: Any, of: str = "") -> list[float]:
    """Returns how much a recipe's result exceeds that of ``base``, for each seed.

    ``of`` is the attribute of a run that holds the result; without it, a run is the number.
    """
    pairs = zip(results[recipe], results[base], strict=True)
    return [getattr(a, of) - getattr(b, of) if of else a - b for a, b in pairs]


def start_figure(title: str, height: float, **grid: Any) -> tuple[Figure, Any]:
    """Returns a figure, ``height`` inches high, with a title, and the axes of its ``grid``."""
    figure = plt.figure(figsize=(13, height))
    figure.suptitle(title, fontsize=15)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    return figure, figure.subplots(**grid) if grid else None


def plot_scale(axes: Axes, scales: Sequence[float], skipped: Sequence[int], **style: Any) -> None:
    """Draws a loss scale over the steps, and a mark for each step that was skipped."""
    axes.plot(scales, drawstyle="steps-post", **style)
    if skipped:
        style |= {"label": "skipped step", "ls": "", "marker": "v", "ms": 8}
        axes.plot(skipped, [scales[step] for step in skipped], **style)
    axes.set(title="Loss scale", xlabel="step")
    axes.set_yscale("log", base=2)


def finish_axes(*axes: Axes) -> None:
    """Adds a grid to each of ``axes``, and a legend if any of its curves has a label."""
    for each in axes:
        each.grid(alpha=0.3)
        each.margins(y=0.08)
        each.spines[["top", "right"]].set_visible(False)
        if each.get_legend_handles_labels()[0]:
            each.legend(frameon=False)


def write_figure(figure: Figure, caption: str, path: Path, dpi: int = 160) -> None:
    """Adds a caption below a figure, writes it to ``path`` and closes it."""
    figure.supxlabel(textwrap.fill(caption, 180), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def show_mean(values: list[float], form: str) -> str:
    """Formats the mean of ``values``, with the standard deviation if there are at least two."""
    deviation = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{deviation}".replace("-", "−")


def finish(table: str, figure: Path, claims: dict[str, bool]) -> int:
    """Prints the table and whether each claim holds; returns the exit code, 1 if a claim fails."""
    print(f"\n{table}\n\nWritten: {figure}")
    for claim, true in claims.items():
        print(f"{claim}: {'yes' if true else 'NO'}")
    return 0 if all(claims.values()) else 1
