"""Plots of the loss scale and of gradient norms over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Marks", "plot_over_time"]


class Marks(NamedTuple):
    """The points of a plot that get a cross.

    Attributes:
        label: Text for the legend, such as "skipped step".
        where: One bool per point, True for a cross.
    """

    label: str
    where: Sequence[bool]


def plot_over_time(
    path: str | os.PathLike[str],
    labels: tuple[str, str],
    numbers: Sequence[int],
    values: Sequence[float],
    marks: Marks,
    *,
    base: int = 10,
) -> None:
    """Plots values on a logarithmic axis and saves the picture.

    Args:
        path: File of the picture; its extension sets the format.
        labels: Labels of the horizontal and the vertical axis.
        numbers: Positions of the points on the horizontal axis.
        values: Values of the points. Points that are 0 or not finite are not shown.
        marks: The points that get a cross.
        base: Base of the logarithmic axis.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    axes.step(numbers, values, where="post", color="tab:blue", linewidth=1)
    marked = [
        (number, value)
        for number, value, is_marked in zip(numbers, values, marks.where, strict=True)
        if is_marked
    ]
    if marked:
        axes.plot(*zip(*marked, strict=True), "x", color="tab:red", label=marks.label)
        axes.legend(frameon=False)
    axes.set_yscale("log", base=base)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
