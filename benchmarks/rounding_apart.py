"""Draws how far training runs diverge by rounding alone: docs/rounding_apart.png.

    PYTHONPATH=. python benchmarks/rounding_apart.py  # half a minute

A small network of tanh layers is trained in float32 on one thread. The reference run by
``torch.optim.AdamW`` is compared with runs by our AdamW, by torch's fused AdamW, and by the
reference's AdamW with all initial weights moved by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from common import BLUE, LIGHT_BLUE, ORANGE, save
from torch import Tensor, nn

from amp_ext.optim import AdamW

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "rounding_apart.png"
STEPS, EVERY = 3000, 10
WIDTH, DEPTH = 32, 6
MOVED = "torch, weights moved by one unit in the last place"
# Maps the label of a run to its optimizer, whether its initial weights are moved by one unit in the
# last place, and its colour.
Make = Callable[[Any], torch.optim.Optimizer]
by_torch = partial(torch.optim.AdamW, lr=3e-3)
RUNS: dict[str, tuple[Make, bool, str]] = {
    "amp_ext": (partial(AdamW, lr=3e-3), False, BLUE),
    "torch, fused=True": (partial(by_torch, fused=True), False, LIGHT_BLUE),
    MOVED: (partial(by_torch, foreach=False), True, ORANGE),
}


class Run(NamedTuple):
    """Weights and losses of a training run, recorded every ``EVERY`` steps."""

    weights: Tensor  # float32 of shape [records, parameters]
    losses: list[float]


def trained(make: Make, is_moved: bool = False, steps: int = STEPS) -> Run:
    """Trains the network; every call has the same initial weights and the same batches."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), *layers, nn.Linear(WIDTH, 1))
    if is_moved:
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.nextafter(param, torch.tensor(torch.inf)))
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    weights, losses = [], []
    for number in range(steps):
        x = torch.randn(64, 8, generator=generator)
        loss = nn.functional.mse_loss(model(x), (3.0 * x).sin().sum(1, keepdim=True))
        if number % EVERY == 0:
            weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
            losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Run(torch.stack(weights), losses)


def distances(run: Run, reference: Run) -> list[float]:
    """Returns the norm of the difference to the reference, divided by the reference's norm."""
    apart = (run.weights - reference.weights).norm(dim=1)
    return [float(each) for each in apart / reference.weights.norm(dim=1)]


def draw(reference: Run, runs: dict[str, Run], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, run in runs.items():
        colour = RUNS[name][2]
        steps = range(0, EVERY * len(run.losses), EVERY)
        left.plot(steps, distances(run, reference), color=colour, label=name)
        right.plot(steps, smoothed(run.losses), color=colour)
    right.plot(steps, smoothed(reference.losses), color="black", ls=":", label="torch")
    left.set(title="distance of the weights from those of torch", xlabel="step", yscale="log")
    right.set(title="loss, mean of 200 steps", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save(figure, path)


def smoothed(losses: list[float]) -> list[float]:
    span = 200 // EVERY
    return [fmean(losses[max(0, end - span) : end]) for end in range(1, len(losses) + 1)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    reference = trained(RUNS[MOVED][0])
    runs = {name: trained(make, is_moved) for name, (make, is_moved, _) in RUNS.items()}
    for name, run in runs.items():
        found = distances(run, reference)
        shown = ", ".join(f"step {at * EVERY}: {found[at]:.1e}" for at in (0, 1, 10, 100, -1))
        print(f"{name}: {shown}; last losses {smoothed(run.losses)[-1]:.4f}")
    print(f"torch: last losses {smoothed(reference.losses)[-1]:.4f}")
    draw(reference, runs, FIGURE)
