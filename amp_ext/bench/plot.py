"""Draws results as bars under the roof of the streaming bandwidth, or beside peers as ratios."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from amp_ext.bench.report import heading
from amp_ext.bench.work import SIDES

# Colours that colour-blind people can tell apart.
_COLOURS = {
    "ours": "#004D7A",
    "fused": "#56B4E9",
    "default": "#B8BEC6",
    "foreach": "#8A9099",
    "by_hand": "#E69F00",
    "by_hand_buffered": "#F5D08A",
    "in_float32": "#7FA8C9",
    "deepspeed": "#D55E00",
    "bitsandbytes": "#009E73",
    "torchao": "#CC79A7",
    "optimi": "#0072B2",
    "bitsandbytes_8bit": "#009E73",
    "torchao_8bit": "#CC79A7",
}
_MARKERS = {"ours": "|", "bitsandbytes_8bit": "s", "torchao_8bit": "s"}  # others: dots
_PANELS = 3  # beside each other


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws a panel for each list of shapes, and a bar for each side of each featured row.

    What was measured beside peers becomes a dot for each side, at its time divided by ours.

    Args:
        result: What was measured.
        path: A PNG file to write, or another that matplotlib knows.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    beside_peers = "peers" in result
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if (
            beside_peers
            or row["featured"]
            or not any(other["featured"] for other in result["rows"])
        ):
            panels.setdefault(row["shapes"], []).append(row)
    across = min(_PANELS, len(panels)) or 1
    down = -(-len(panels) // across) or 1
    heights = [0.0] * down
    for index, rows in enumerate(panels.values()):
        bars = sum(3.0 if beside_peers else len(row["sides"]) + 1.5 for row in rows)
        heights[index // across] = max(heights[index // across], 0.17 * bars + 0.9)
    figure, grid = plt.subplots(
        *(down, across),
        figsize=(1.5 + 4.6 * across, sum(heights) + 0.9),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    draw_panel = _draw_ratios if beside_peers else _draw_panel
    for axes, (shapes, rows) in zip(grid.flat, panels.items(), strict=False):
        draw_panel(axes, shapes, rows)
    seen = {side for rows in panels.values() for row in rows for side in row["sides"]}
    handles = [
        _dot(side) if beside_peers else Patch(color=_COLOURS[side], label=label)
        for side, label in SIDES.items()
        if side in seen
    ]
    columns = 6 if beside_peers else len(SIDES)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle("\n".join(heading(result)), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def check_format(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Exits with a line unless matplotlib can draw a file of this name."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        parser.error(f"{option}: {path} must end in one of {', '.join(sorted(known))}")


def _dot(side: str) -> Any:
    from matplotlib.lines import Line2D

    marker = _MARKERS.get(side, "o")
    return Line2D([], [], color=_COLOURS[side], marker=marker, linestyle="", label=SIDES[side])


def _draw_ratios(axes: Any, shapes: str, rows: list[dict[str, Any]]) -> None:
    """Draws the times of all sides divided by ours; hollow where the work is not the same."""
    labels = []
    for place, row in enumerate(rows):
        axes.plot(1, place, marker="|", markersize=18, color=_COLOURS["ours"], markeredgewidth=3)
        for side, ratio in row["ratios"].items():
            hollow = side in row["unequal"]
            axes.plot(
                *(ratio, place),
                marker=_MARKERS.get(side, "o"),
                color=_COLOURS[side],
                markerfacecolor="white" if hollow else _COLOURS[side],
                linestyle="",
                alpha=0.9,
            )
        ours = row["sides"]["ours"]
        time = f"{ours['ns_per_element']:.3f} ns/element"
        if row["many_small"]:
            time = f"{1e6 * ours['seconds']:.3g} µs/step"
        labels.append(f"{row['work']}\n{time}")
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.tick_params(axis="y", length=0)
    axes.set_title(shapes, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high, 2.5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color=_COLOURS["ours"], linewidth=1)
    axes.axvspan(axes.get_xlim()[0], 1, color="#F0F0F0", zorder=0)
    axes.set_xlabel("time ÷ amp_ext's; hollow: not the same work", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _draw_panel(axes: Any, shapes: str, rows: list[dict[str, Any]]) -> None:
    """Draws shares of the streaming bandwidth, or µs per tensor where the host is what counts."""
    many_small = rows[0]["many_small"]
    figure, factor = ("host_us_per_tensor", 1.0) if many_small else ("share_of_streaming", 100.0)
    form = "{:,.2f}" if many_small else "{:.0f} %"
    place, ticks = 0.0, []
    for row in rows:
        middle = place + (len(row["sides"]) - 1) / 2
        ticks.append((middle, f"{row['work']}\n{row['bytes_per_element']:.4g} B/element"))
        for side, figures in row["sides"].items():
            value = factor * figures[figure]
            axes.barh(place, value, 0.92, color=_COLOURS[side])
            axes.annotate(
                form.format(value),
                (value, place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                bbox={"color": "white", "pad": 0.3},  # over the line at 100 %
            )
            place += 1
        place += 0.8
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_title(shapes, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if many_small:
        axes.margins(x=0.12)
        axes.set_xlabel("host µs per tensor: less is better", fontsize=8)
    else:
        axes.axvline(100, color="black", linestyle="--", linewidth=1)
        axes.set_xlim(0, max(118, axes.get_xlim()[1] * 1.08))
        axes.set_xlabel("% of the streaming bandwidth: more is better", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
