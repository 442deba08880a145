"""Draws the results of a benchmark: bandwidths, ratios to amp_ext's times, or training runs.

python benchmarks/plot.py results.json picture.png  # results of `python -m amp_ext.bench --json`
python benchmarks/plot.py training.json picture.png  # results of benchmarks/training.py or peers.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from common import BLUE, LIGHT_BLUE, ORANGE, RED, digits, label_of, save, summarize

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "ours": BLUE,
    "fused": LIGHT_BLUE,
    "default": "#B8BEC6",
    "foreach": "#8A9099",
    "by_hand": ORANGE,
    "buffered": "#F5D08A",
    "in_float32": "#7FA8C9",
    "swa_utils": "#44AA99",
    "DeepSpeed": RED,
    "bitsandbytes": "#009E73",
    "torchao": "#CC79A7",
    "optimi": "#0072B2",
    "flashoptim": "#882255",
    "heavyball": "#999933",
    "bnb 8-bit": "#009E73",
    "torchao 8-bit": "#CC79A7",
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws a figure with a panel for each list of shapes, or for each trained model.

    Args:
        result: The result of ``amp_ext.bench``, ``peers.py`` or ``training.py``.
        path: The file to write: PNG, or another format that matplotlib supports.
    """
    if "runs" in result:
        draw_training(result, path)
        return
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        panels.setdefault(row["shapes"], []).append(row)
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    beside_peers = "unequal" in result["rows"][0]
    tallest = max(
        sum(2.0 if beside_peers else len(row["sides"]) + 0.8 for row in rows)
        for rows in panels.values()
    )
    size = (1.5 + 4.6 * across, (0.17 * tallest + 0.9) * down + 0.9)
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (shapes, rows) in zip(grid.flat, panels.items(), strict=False):
        if beside_peers:
            draw_ratios(axes, rows)
        else:
            draw_bars(axes, rows)
            axes.set_ylim(tallest - 0.5, -1)  # makes the bars of all panels equally high
        axes.set_title(shapes, fontsize=10, loc="left")
        axes.tick_params(axis="y", length=0)
        axes.tick_params(labelsize=8)
    sides = dict.fromkeys(side for row in result["rows"] for side in row["sides"])
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=COLOURS[side], label=label_of(side)) for side in sides
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * across, frameon=False)
    figure.suptitle("\n".join(result["surroundings"]), fontsize=9, x=0.01, ha="left")
    save(figure, path, 130)


def draw_training(result: dict[str, Any], path: Path) -> None:
    """Draws training rate, update time, memory and loss of all sides, in a row for each model."""
    rows = summarize(result["runs"])
    models = list(dict.fromkeys(row["model"] for row in rows))
    size = (15, 0.5 + 3.4 * len(models))
    figure, grid = plt.subplots(
        len(models), 4, figsize=size, squeeze=False, sharey="row", layout="constrained"
    )
    for axes_of_model, model in zip(grid, models, strict=True):
        of_model = [row for row in rows if row["model"] == model]
        places = range(len(of_model))
        colours = [COLOURS["fused" if r["side"].startswith("torch") else "ours"] for r in of_model]
        rate, update, memory, loss = axes_of_model
        kept = [1e-6 * row["bytes_kept"] for row in of_model]
        peak = [1e-6 * (row["peak_bytes"] or row["bytes_kept"]) for row in of_model]
        for axes, values, label in (
            (rate, [row["rate"] for row in of_model], f"{of_model[0]['unit']} a second"),
            (update, [row["update_ms"] for row in of_model], "ms of an update"),
            (memory, peak, "MB: kept between steps (dark), peak on a GPU (light)"),
        ):
            alpha = 0.35 if axes is memory else 1.0
            bars = axes.barh(places, values, 0.85, color=colours, alpha=alpha)
            axes.bar_label(bars, fmt=digits, padding=3, fontsize=7)
            axes.set_xlabel(label, fontsize=8)
        memory.barh(places, kept, 0.85, color=colours)
        for place, row, colour in zip(places, of_model, colours, strict=True):
            spread = row["spread"] or 0.0
            loss.errorbar(row["loss"], place, xerr=spread, fmt="o", color=colour, capsize=3)
        loss.set_xlabel("loss at the end, mean and deviation of the seeds", fontsize=8)
        rate.set_title(f"{model}, {of_model[0]['parameters'] / 1e6:.3g}M parameters", loc="left")
        names = [f"{row['group'].partition(',')[0]}: {row['side']}" for row in of_model]
        rate.set_yticks(places, names)
        rate.invert_yaxis()
        for axes in axes_of_model:
            axes.tick_params(labelsize=8)
            axes.margins(x=0.2)
    figure.suptitle("\n".join(result["surroundings"]), fontsize=9, x=0.01, ha="left")
    save(figure, path)


def draw_ratios(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws all times divided by ours; a hollow marker stands for a side that does other work."""
    for place, row in enumerate(rows):
        for side, ratio in row["ratios"].items():
            face = "white" if side in row["unequal"] else COLOURS[side]
            marker = "s" if side.endswith("8-bit") else "o"
            axes.plot(ratio, place, marker, color=COLOURS[side], markerfacecolor=face)
    axes.set_yticks(range(len(rows)), [row["work"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color=COLOURS["ours"], linewidth=2)
    axes.set_xlabel("time ÷ amp_ext's; hollow: not the same work", fontsize=8)


def draw_bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws % of the streaming bandwidth or, for many small tensors, host µs per tensor."""
    many_small = rows[0]["many_small"]
    place, ticks = 0.0, {}
    for row in rows:
        ticks[place + (len(row["sides"]) - 1) / 2] = row["work"]
        for side, figures in row["sides"].items():
            share = figures["share_of_streaming"]
            length = 1e6 * figures["seconds"] / row["tensors"] if many_small else 100 * share
            bar = axes.barh(place, length, 0.92, color=COLOURS[side])
            axes.bar_label(bar, fmt="{:,.2f}" if many_small else "{:.0f} %", padding=3, fontsize=7)
            place += 1
        place += 0.8
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.margins(x=0.12)
    if many_small:
        axes.set_xlabel("host µs per tensor: less is better", fontsize=8)
    else:
        axes.axvline(100, color="black", linestyle="--", linewidth=1)
        axes.set_xlabel("% of the streaming bandwidth: more is better", fontsize=8)


def main() -> int:
    """Reads a JSON file of results and draws the picture."""
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/plot.py results.json picture.png")
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
