"""Trains a generator and a discriminator in fp16: two optimizers share one loss scale.

    python examples/two_optimizers.py                         # about half a minute on two cores

The data are 2-D points, clustered around eight centres on a ring. The generator turns noise into
such points, and the discriminator learns to distinguish them from the data. Each network has its
own loss and its own Adam. An iteration calls ``scaler.step`` for each optimizer and then
``scaler.update`` once. If the gradients of one optimizer overflow, only its step is skipped.

Matrix products are computed in fp16 by autocast; parameters are fp32. The scale starts too high and
doubles often, so that steps are skipped. Expect samples around all eight centres, and expect each
optimizer to skip steps that the other one takes. Writes ``two_optimizers.png``, prints whether
these claims hold, and returns 1 if one does not.
"""

import math
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from presentation import (
    finish,
    finish_axes,
    make_parser,
    plot_scale,
    read_options,
    start_figure,
    write_figure,
)
from torch import Tensor, nn
from torch.nn import functional

import amp_ext
from amp_ext.text_table import format_table

STEPS = 3000
QUICK_STEPS = 160
WIDTH = 64  # units of each hidden layer, in both networks
NOISE = 8  # dimensions of the generator's input
ROWS = 256  # batch size: points per step
PACK = 2  # number of points that the discriminator judges together, to notice repeated points
LEARNING_RATE = 2e-3
INITIAL_SCALE = 2.0**24  # too high on purpose (default: 2**16)
GROWTH_INTERVAL = 50  # steps without overflow before the scale doubles (default: 2000)

PLACES = 8  # cluster centres, on a ring of radius 1
SPREAD = 0.08  # standard deviation of the points around a centre
SHOWN = 5  # scatter plots of samples in the figure
SAMPLES = 2000  # points in each scatter plot

NAMES = ("discriminator", "generator")
# Colours are safe for colour-blind readers.
COLOURS, GREY = {"discriminator": "#D55E00", "generator": "#004D7A"}, "#B8BEC6"


@dataclass
class Record:
    """Measurements of a run. Each list holds one value per step."""

    scales: list[float] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in NAMES})
    skipped: dict[str, list[bool]] = field(default_factory=lambda: {n: [] for n in NAMES})
    samples: dict[int, Tensor] = field(default_factory=dict)  # maps steps to points [SAMPLES, 2]


def make_network(inputs: int, outputs: int) -> nn.Module:
    """Builds a network of three linear layers."""
    hidden = [nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*hidden, nn.LeakyReLU(0.2), nn.Linear(WIDTH, outputs))


def places() -> Tensor:
    """Returns the cluster centres of the data: ``[PLACES, 2]``."""
    angle = torch.arange(PLACES) * (2 * math.pi / PLACES)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def draw_data(points: int) -> Tensor:
    """Draws ``points`` points of the data distribution: ``[points, 2]``."""
    return places()[torch.randint(PLACES, (points,))] + SPREAD * torch.randn(points, 2)


def train(steps: int, device: str) -> Record:
    """Trains both networks, with one step of each per iteration."""
    torch.manual_seed(0)
    generator = make_network(NOISE, 2).to(device)
    discriminator = make_network(2 * PACK, 1).to(device)
    adam = partial(amp_ext.optim.Adam, lr=LEARNING_RATE, betas=(0.5, 0.9))
    optimizers = {
        "discriminator": adam(discriminator.parameters()),
        "generator": adam(generator.parameters()),
    }
    scaler = amp_ext.GradScaler(device, init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL)
    fp16 = partial(torch.autocast, device, torch.float16)

    def judge(points: Tensor) -> Tensor:
        return discriminator(points.view(-1, 2 * PACK)).float()

    record = Record()
    for step in range(steps):
        if step % (steps // (SHOWN - 1)) == 0:
            record.samples[step] = sample(generator, device)
            print(f"{step} steps: {describe(record.samples[step])}", flush=True)
        data, noise = draw_data(ROWS).to(device), torch.randn(ROWS, NOISE).to(device)

        optimizers["discriminator"].zero_grad()
        with fp16():
            made = generator(noise)
            real, fake = judge(data), judge(made.detach())
        loss = functional.softplus(-real).mean() + functional.softplus(fake).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers["discriminator"])
        record.losses["discriminator"].append(loss.item())

        optimizers["generator"].zero_grad()
        with fp16():
            fake = judge(made)
        loss = functional.softplus(-fake).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers["generator"])
        record.losses["generator"].append(loss.item())

        record.scales.append(scaler.get_scale())
        scaler.update()  # once, after both steps
        for name, optimizer in optimizers.items():
            # The figure needs the answer about this step, so the call waits for a GPU.
            record.skipped[name].append(scaler.last_step_skipped(optimizer, wait=True) is True)
    record.samples[steps] = sample(generator, device)
    return record


@torch.no_grad()
def sample(generator: nn.Module, device: str) -> Tensor:
    """Generates ``[SAMPLES, 2]`` points, from the same noise in every call."""
    noise = torch.randn(SAMPLES, NOISE, generator=torch.Generator().manual_seed(0))
    with torch.autocast(device, torch.float16):
        return generator(noise.to(device)).float().cpu()


def reached(points: Tensor) -> tuple[int, float]:
    """Returns how many centres have at least 2 % of the points, and what share is near a centre."""
    distance, place = torch.cdist(points, places()).min(dim=1)
    near = distance < 3 * SPREAD  # within three standard deviations of the data
    share = torch.bincount(place[near], minlength=PLACES) / len(points)
    return int((share >= 0.02).sum()), near.float().mean().item()


def describe(points: Tensor) -> str:
    """Describes how well the samples cover the centres."""
    count, near = reached(points)
    return f"{count} of {PLACES} places, {near:.0%} near"


def draw(record: Record, path: Path) -> None:
    """Draws samples over time, the loss scale with its skipped steps, and both losses."""
    figure, _ = start_figure("Two optimizers under one loss scale", 7.4)
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.3))
    upper, lower = grid[0].subgridspec(1, SHOWN), grid[1].subgridspec(1, 3)
    scale_axes, loss_axes = figure.add_subplot(lower[:2]), figure.add_subplot(lower[2])
    data = draw_data(SAMPLES)
    for column, (step, points) in enumerate(record.samples.items()):
        axes = figure.add_subplot(upper[column])
        axes.scatter(*data.T, s=4, color=GREY, lw=0)
        axes.scatter(*points.T, s=4, color=COLOURS["generator"], lw=0, alpha=0.5)
        axes.set(title=f"after {step} steps", xlabel=describe(points))
        axes.set(xticks=[], yticks=[], xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    for name in NAMES:
        steps = [step for step, skip in enumerate(record.skipped[name]) if skip]
        plot_scale(scale_axes, record.scales, steps, color=COLOURS[name], lw=1, label=name)
        loss_axes.plot(record.losses[name], color=COLOURS[name], lw=0.6, label=name)
    loss_axes.set(title="Losses", xlabel="step")
    finish_axes(scale_axes, loss_axes)
    caption = (
        "A step is skipped for the optimizer whose gradients overflow and for no other; the common "
        f"scale is then halved once. It doubles after {GROWTH_INTERVAL} good steps (default: 2000)."
    )
    write_figure(figure, caption, path)


def make_table(record: Record) -> str:
    """Formats the numbers of taken and skipped steps as a table."""
    table = [["optimizer", "steps", "skipped"]]
    for name in NAMES:
        skipped = sum(record.skipped[name])
        table.append([name, str(len(record.skipped[name]) - skipped), str(skipped)])
    return format_table(table)


def check(record: Record, quick: bool) -> dict[str, bool]:
    """Compares the measurements with the results that the example promises."""
    skips = list(zip(*record.skipped.values(), strict=True))
    updates = zip(skips, record.scales, record.scales[1:], strict=False)
    halved = [later == before / 2 for skip, before, later in updates if any(skip)]
    claims = {"every skip halved the scale once": all(halved) and halved != []}
    if not quick:
        each = (True, False) in skips and (False, True) in skips
        claims["each skipped steps that the other took"] = each
        count, near = reached(list(record.samples.values())[-1])
        claims["all places reached, two thirds near"] = count == PLACES and near >= 2 / 3
    return claims


def main() -> int:
    """Reads the command line, trains, and writes the figure."""
    quick = "a few seconds, judges no samples"
    arguments = read_options(make_parser(__doc__, "two_optimizers", quick, seeds=False))
    steps = QUICK_STEPS if arguments.quick else STEPS
    torch.set_num_threads(1)  # a second thread gains nothing with such small matrices

    record = train(steps, arguments.device)
    figure = arguments.out / "two_optimizers.png"
    draw(record, figure)
    return finish(make_table(record), figure, check(record, arguments.quick))


if __name__ == "__main__":
    sys.exit(main())
