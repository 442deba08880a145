"""Fits the photograph of photo.py with bf16 parameters, with and without fp32 master weights.

    python examples/master_weights.py                         # about 15 s on two cores
    python examples/master_weights.py --seeds 3

bf16 has 8 significant bits: near 0.1 its numbers are 0.0005 apart. A step moves a weight by less
than half of that most of the time, and rounding then puts the weight back where it was. A master
is the same weight in fp32: it collects the small updates until they show in bf16.
The range of bf16 is that of fp32, so there is no loss scale here: the optimizer works alone.

Expect the bf16 run with masters to end near fp32, and both runs without to end 2 to 3 dB lower.
Matrix products are bf16 where the parameters are. A CPU without bf16 arithmetic takes up to 10
times longer for them than for fp32, hence the small picture. Writes ``master_weights.png`` and
prints a table. With the default settings it also says whether both claims hold, and returns 1 if
one does not.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from photo import Settings, fourier_features, load_photo, make_start
from presentation import (
    differences,
    finish,
    finish_axes,
    make_parser,
    read_options,
    run_all,
    show_mean,
    start_figure,
    write_figure,
)
from torch import Tensor
from torch.nn import functional

from amp_ext.optim import AdamW
from amp_ext.program import format_table, run_program


@dataclass(frozen=True, eq=False)
class Recipe:
    """What one run constructs. The loop is the same for all."""

    name: str
    dtype: torch.dtype  # of the parameters, and so of the matrix products and the gradients
    optimizer: Callable[..., torch.optim.Optimizer]


FP32 = Recipe("fp32", torch.float32, AdamW)
MASTERS = Recipe("bf16, fp32 masters", torch.bfloat16, AdamW)
NO_MASTERS = Recipe(
    "bf16, no masters",
    torch.bfloat16,
    partial(AdamW, master_weights=False, rounding="nearest"),
)
TORCH = Recipe("bf16, torch.optim", torch.bfloat16, torch.optim.AdamW)
RECIPES = (FP32, MASTERS, NO_MASTERS, TORCH)

# Colours that colour-blind people can tell apart; thinner lines are drawn on wider ones.
COLOURS = {FP32: "#000000", MASTERS: "#56B4E9", NO_MASTERS: "#D55E00", TORCH: "#E69F00"}
WIDTHS = {FP32: 4.5, MASTERS: 2.0, NO_MASTERS: 3.0, TORCH: 1.2}

DEFAULT = Settings(steps=1000, size=64, width=64, tiles=1)
QUICK = Settings(steps=60, size=32, width=32, tiles=1)
LARGE_ERROR = 0.1  # the brightest that the pictures of the error show
LEARNING_RATE = 5e-3  # of the first step; it falls along a cosine to a hundredth


@dataclass
class Run:
    """One run with one seed; the lists hold a number for each step."""

    psnr: float  # dB
    picture: Tensor  # [size, size, 3], 0 to 1
    losses: list[float]  # mean squared error
    updates: list[float]  # median over the weights of how far a step moved them
    half_steps: list[float]  # median over the weights of half the distance to the next bf16 number
    unmoved: list[float]  # share of the weights that a step left exactly as they were


Results = dict[Recipe, list[Run]]  # a run per seed


def train(recipe: Recipe, photo: Tensor, settings: Settings, seed: int, device: str) -> Run:
    """Trains one network the way ``recipe`` says; a seed gives all recipes the same start.

    The photo is float32, ``[size, size, 3]``, 0 to 1.
    """
    frequency, model = make_start(settings, seed)
    features = fourier_features(settings.size, frequency).to(device, recipe.dtype)
    colours = photo.view(-1, 3).to(device)
    model = model.to(device, recipe.dtype)
    optimizer = recipe.optimizer(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, settings.steps, eta_min=LEARNING_RATE / 100
    )
    losses, updates, half_steps, unmoved = [], [], [], []
    for _ in range(settings.steps):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(features).float(), colours)
        loss.backward()
        before = trained_weights(optimizer)
        optimizer.step()
        schedule.step()

        # For the figure only: a loop that is to be fast on a GPU does not wait for these numbers.
        after = trained_weights(optimizer)
        moved = (after - before).abs()
        losses.append(loss.item())
        updates.append(moved.median().item())
        half_steps.append(half_bf16_step(after).median().item())
        unmoved.append((moved == 0).float().mean().item())

    with torch.no_grad():
        picture = model(features).float().clamp(0, 1).cpu().view_as(photo)
    psnr = -10 * math.log10(functional.mse_loss(picture, photo).item())
    return Run(psnr, picture, losses, updates, half_steps, unmoved)


def trained_weights(optimizer: torch.optim.Optimizer) -> Tensor:
    """Copies what a step updates, as one float32 vector: masters where there are, or parameters."""
    held = [
        optimizer.state.get(param, {}).get("master_param", param).detach().float().flatten()
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    return torch.cat(held)


def half_bf16_step(weights: Tensor) -> Tensor:
    """Returns for each weight the largest update that rounding to bf16 can undo."""
    exponent = torch.frexp(weights).exponent  # of a mantissa from 0.5 to 1, which has 8 bits
    return torch.ldexp(torch.ones_like(weights), exponent - 9)


def mean_curve(runs: list[Run], name: str) -> np.ndarray:
    """Averages a list of the runs over the seeds."""
    return np.mean([getattr(run, name) for run in runs], axis=0)


def draw(results: Results, photo: Tensor, settings: Settings, path: Path) -> None:
    """Draws the pictures of the first seed, and below them the curves, averaged over the seeds."""
    lost, kept = (
        show_mean(differences(results, recipe, FP32), "+.2f") for recipe in (NO_MASTERS, MASTERS)
    )
    title = f"{lost} dB without master weights, {kept} dB with them, against fp32"
    figure = start_figure(f"A photograph learned in bf16: {title}", 9.8)
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1.2))
    upper, lower = grid[0].subgridspec(2, 5), grid[1].subgridspec(1, 3)
    pictures = [figure.add_subplot(upper[0, column]) for column in range(5)]
    errors = [figure.add_subplot(upper[1, column]) for column in range(5)]
    loss_axes, update_axes, unmoved_axes = (figure.add_subplot(lower[c]) for c in range(3))

    pictures[0].imshow(photo, interpolation="nearest")
    pictures[0].set(title="the photograph", xlabel=f"{settings.size} × {settings.size} pixels")
    errors[0].text(0.5, 0.5, f"error\nblack: 0\nlight: {LARGE_ERROR}", ha="center", fontsize=12)
    errors[0].set_axis_off()
    for recipe, axes, error_axes in zip(RECIPES, pictures[1:], errors[1:], strict=True):
        first = results[recipe][0]
        axes.imshow(first.picture, interpolation="nearest")
        error = (first.picture - photo).abs().mean(dim=-1)
        error_axes.imshow(error, "inferno", vmin=0, vmax=LARGE_ERROR, interpolation="nearest")
        axes.set(title=recipe.name, xlabel=f"{first.psnr:.1f} dB")
        for framed in (axes, error_axes):
            framed.spines[:].set(color=COLOURS[recipe], linewidth=3)
    for axes in (*pictures, *errors):
        axes.set(xticks=[], yticks=[])

    for recipe, runs in results.items():
        style: dict[str, Any] = {"color": COLOURS[recipe], "lw": WIDTHS[recipe]}
        loss_axes.plot(mean_curve(runs, "losses"), label=recipe.name, **style)
        unmoved_axes.plot(100 * mean_curve(runs, "unmoved"), label=recipe.name, **style)
    masters: dict[str, Any] = {"color": COLOURS[MASTERS], "lw": WIDTHS[MASTERS]}
    updates = mean_curve(results[MASTERS], "updates")
    half_steps = mean_curve(results[MASTERS], "half_steps")
    update_axes.plot(updates, label="update of the master", **masters)
    update_axes.plot(half_steps, label="half a bf16 step of the weight", color="#000000", ls="--")
    hidden = (updates < half_steps).tolist()
    update_axes.fill_between(
        range(settings.steps), updates, half_steps, where=hidden, color="#D55E00", alpha=0.12, lw=0
    )

    loss_axes.set(title="Loss: mean squared error", xlabel="step", yscale="log")
    update_axes.set(title="Why: updates below half a bf16 step", xlabel="step", yscale="log")
    unmoved_axes.set(title="Weights that a step leaves as they were, %", xlabel="step")
    unmoved_axes.set_ylim(-4, 104)
    finish_axes(loss_axes, update_axes, unmoved_axes)

    seeds = len(results[FP32])
    seen = f"Curves: mean of {seeds} seeds; pictures: the first." if seeds > 1 else "One seed."
    caption = (
        f"{seen} {settings.steps} steps of AdamW, learning rate from {LEARNING_RATE} along a "
        f"cosine to a hundredth, {settings.width} Fourier features, three layers; gradients and "
        "matrix products are bf16 where the parameters are. The middle panel shows medians over "
        "the weights of the run with masters: where the update lies below the dashed line, a bf16 "
        "weight without a master rounds back to where it was. torch.optim keeps the moments in "
        "bf16, too; in the other three runs, all with amp_ext.optim.AdamW, moments are fp32."
    )
    write_figure(figure, caption, path)


def make_table(results: Results) -> str:
    """Sums the runs up for the terminal."""
    table = [["parameters", "PSNR, dB", "vs fp32, dB", "unmoved weights, %"]]
    for recipe, runs in results.items():
        table.append(
            [
                recipe.name,
                show_mean([run.psnr for run in runs], ".2f"),
                "" if recipe is FP32 else show_mean(differences(results, recipe, FP32), "+.2f"),
                f"{100 * mean_curve(runs, 'unmoved').mean():.0f}",
            ]
        )
    return format_table(table)


def check(results: Results) -> dict[str, bool]:
    """Compares the means over the seeds with what the example is to show."""
    return {
        "with masters within 0.5 dB of fp32": abs(mean(differences(results, MASTERS, FP32))) <= 0.5,
        "without masters at least 1 dB worse": mean(differences(results, NO_MASTERS, FP32)) <= -1,
    }


def main() -> int:
    """Reads the command line, trains, and writes the figure and the table."""
    parser = make_parser(__doc__, "master_weights", "a few seconds, judges nothing")
    arguments = read_options(parser)
    settings = QUICK if arguments.quick else DEFAULT
    photo = load_photo(None, settings.size)

    results = run_all(
        RECIPES,
        lambda recipe, seed: train(recipe, photo, settings, seed, arguments.device),
        arguments.seeds,
    )
    figure = arguments.out / "master_weights.png"
    draw(results, photo, settings, figure)
    return finish(make_table(results), figure, {} if arguments.quick else check(results))


if __name__ == "__main__":
    sys.exit(run_program(main))
