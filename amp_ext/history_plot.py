"""Pictures of what a scaler and a guard of norms have seen over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Marks", "plot_over_time"]


class Marks(NamedTuple):
    """The points that get a cross.

    Attributes:
        label: What they are, for the legend.
        where: For each point whether it has one.
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
    """Draws values on a logarithmic axis, and saves the picture.

    Args:
        path: Of the picture; its ending says the format.
        labels: Of both axes.
        numbers: Of the points.
        values: Their values. One that is 0 or not finite has no place on the axis.
        marks: The points that get a cross.
        base: Of the logarithm.

    Raises:
        ImportError: Without matplotlib.
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
