"""Draws the errors of low-precision states and masters against float64: docs/update_errors.png.

    PYTHONPATH=. python benchmarks/update_errors_figure.py  # half a minute

The left panel compares state dtypes by the error of an update, as ``update_errors.py`` measures it.
The right panel compares kinds of masters by the error of a parameter's total change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import BLUE, LIGHT_BLUE, ORANGE, RED, save
from gradient_streams import STREAMS, gradients
from torch import Tensor
from update_errors import OptimizerScheme, exact_adamw, shadow_run

from amp_ext.optim import AdamW

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "update_errors.png"

# STATES and MASTERS below map a label to options of AdamW, a colour and a marker.
NEAREST = {"rounding": "nearest"}
STATES: dict[str, tuple[dict[str, Any], str, str]] = {
    "bf16": ({"state_dtype": torch.bfloat16}, BLUE, "o"),
    "8bit-bf16": ({"state_dtype": "8bit-bf16"}, LIGHT_BLUE, "s"),
    "8bit": ({"state_dtype": "8bit"}, ORANGE, "D"),
    "bf16, to nearest": ({"state_dtype": torch.bfloat16, **NEAREST}, RED, "x"),
}
NO_MASTERS = {"master_weights": False, "state_dtype": torch.float32}
MASTERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "float32": ({}, "#000000", "o"),
    "split": ({"master_weights": "split"}, LIGHT_BLUE, "."),
    "split8": ({"master_weights": "split8"}, BLUE, "o"),
    "none": (NO_MASTERS, ORANGE, "o"),
    "none, to nearest": ({**NO_MASTERS, **NEAREST}, RED, "x"),
}
LEARNING_RATE = 1e-3
START = 0.1  # standard deviation of the initial weights

Table = dict[str, dict[str, float]]  # maps a stream's name to the errors, keyed by label


def errors_of_updates(stream: Tensor) -> dict[str, float]:
    """Returns the relative RMS error of the updates for each entry of ``STATES``."""
    shape = stream.shape[1:]
    schemes = {
        states: OptimizerScheme(AdamW, shape, weight_decay=0.0, **options)
        for states, (options, *_) in STATES.items()
    }
    found = shadow_run(stream, exact_adamw(shape), schemes)
    return {states: errors.update for states, errors in found.items()}


def errors_of_weights(stream: Tensor) -> dict[str, float]:
    """Returns the relative error of a bf16 weight's total change for each entry of ``MASTERS``."""
    generator = torch.Generator().manual_seed(0)
    start = (START * torch.randn(stream.shape[1:], generator=generator)).bfloat16()
    end = trained(start.double(), torch.optim.AdamW, stream)
    way = (end - start.double()).norm()
    ends = {
        masters: trained(start, AdamW, stream, **options)
        for masters, (options, *_) in MASTERS.items()
    }
    return {masters: ((each - end).norm() / way).item() for masters, each in ends.items()}


def trained(start: Tensor, kind: Any, stream: Tensor, **options: Any) -> Tensor:
    """Trains a parameter from ``start``; returns it in float64, or its master if it has one."""
    param = torch.nn.Parameter(start.clone())
    optimizer = kind([param], lr=LEARNING_RATE, weight_decay=0.0, **options)
    for grad in stream:
        param.grad = grad.to(param.dtype)
        optimizer.step()
    (whole,) = optimizer.master_params() if kind is AdamW else [param.detach()]
    return whole.double()


def draw(updates: Table, weights: Table, path: Path) -> None:
    """Draws both panels, with a row for each stream and a marker for each label."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    titles = "error of an update: states", "error of the way of a bf16 weight: master"
    for axes, title, errors, kinds in zip(
        panels, titles, (updates, weights), (STATES, MASTERS), strict=True
    ):
        for kind, (_, colour, marker) in kinds.items():
            values = [100 * errors[name][kind] for name in errors]
            axes.plot(values, range(len(values)), marker, color=colour, ms=8, label=kind)
        axes.set_yticks(range(len(errors)), list(errors))
        axes.set(title=title, xscale="log", xlabel="% of it in float64, root mean square")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    panels[0].invert_yaxis()
    save(figure, path)


if __name__ == "__main__":
    of_updates = {name: errors_of_updates(gradients(name)) for name in STREAMS}
    of_weights = {name: errors_of_weights(gradients(name)) for name in STREAMS}
    for title, errors in {"update": of_updates, "weight": of_weights}.items():
        for name, row in errors.items():
            cells = "  ".join(f"{kind} {error:.3%}" for kind, error in row.items())
            print(f"{title}, {name:14} {cells}")
    draw(of_updates, of_weights, FIGURE)
