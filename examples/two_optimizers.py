"""Trains a generator against a discriminator in fp16: two optimizers under one loss scale.

    python examples/two_optimizers.py                         # about half a minute on two cores

The data are points around eight places on a ring. The generator turns noise into such points, the
discriminator tells them from the data; each has its own loss and its own Adam. ``scaler.step`` is
called for each optimizer and ``scaler.update`` once: a step whose gradients overflow is skipped
for that optimizer alone, while the other one goes on, and the common scale is halved once.

Matrix products are fp16 by autocast, parameters are fp32. The scale starts too high and doubles
often, to show the skips. Expect the samples to reach all eight places, and each optimizer to skip
steps that the other one takes. Writes ``two_optimizers.png``, says whether all of that holds, and
returns 1 if something does not.
"""

import math
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from presentation import finish, finish_axes, make_parser, read_options, start_figure, write_figure
from torch import Tensor, nn
from torch.nn import functional

import amp_ext
from amp_ext.program import format_table, run_program

STEPS = 3000
QUICK_STEPS = 160
WIDTH = 64  # of both networks
NOISE = 8  # numbers that the generator makes a point from
ROWS = 256  # points of a step
PACK = 2  # points that the discriminator sees together: copies of one point give themselves away
LEARNING_RATE = 2e-3
INITIAL_SCALE = 2.0**24  # too high: the default is 2**16
GROWTH_INTERVAL = 50  # good steps before the scale doubles: not 2000, to show its search

PLACES = 8
SPREAD = 0.08  # standard deviation of the points around a place, on a ring of radius 1
SHOWN = 5  # pictures of samples
SAMPLES = 2000  # points of each

NAMES = ("discriminator", "generator")
# Colours that colour-blind people can tell apart.
COLOURS = {"discriminator": "#D55E00", "generator": "#004D7A", "data": "#B8BEC6"}


@dataclass
class Record:
    """What a run measured; the lists hold a number for each step."""

    scales: list[float] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=lambda: {n: [] for n in NAMES})
    skipped: dict[str, list[bool]] = field(default_factory=lambda: {n: [] for n in NAMES})
    samples: dict[int, Tensor] = field(default_factory=dict)  # [SAMPLES, 2] by the steps before


def make_network(inputs: int, outputs: int) -> nn.Module:
    """Builds three layers."""
    hidden = [nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*hidden, nn.LeakyReLU(0.2), nn.Linear(WIDTH, outputs))


def places() -> Tensor:
    """Returns the middles of the data: ``[PLACES, 2]``."""
    angle = torch.arange(PLACES) * (2 * math.pi / PLACES)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def draw_data(points: int) -> Tensor:
    """Draws ``[points, 2]`` from the distribution that is to be learned."""
    return places()[torch.randint(PLACES, (points,))] + SPREAD * torch.randn(points, 2)


def train(steps: int, device: str) -> Record:
    """Trains both networks; each of them takes a step in every pass of the loop."""
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

        scaler.update()  # once, after both steps
        for name, optimizer in optimizers.items():
            # For the figure only: to be exact at once, this waits for a GPU, as `item` above does.
            record.skipped[name].append(scaler.last_step_skipped(optimizer, wait=True) is True)
    record.samples[steps] = sample(generator, device)
    record.scales = scaler.history(wait=True).scales
    return record


@torch.no_grad()
def sample(generator: nn.Module, device: str) -> Tensor:
    """Makes points from noise that is the same each time."""
    noise = torch.randn(SAMPLES, NOISE, generator=torch.Generator().manual_seed(0))
    with torch.autocast(device, torch.float16):
        return generator(noise.to(device)).float().cpu()


def reached(points: Tensor) -> tuple[int, float]:
    """Returns how many places have 2 % of the points or more, and the share of points near one."""
    distance, place = torch.cdist(points, places()).min(dim=1)
    near = distance < 3 * SPREAD
    share = torch.bincount(place[near], minlength=PLACES) / len(points)
    return int((share >= 0.02).sum()), near.float().mean().item()


def describe(points: Tensor) -> str:
    """Says where samples are."""
    count, near = reached(points)
    return f"{count} of {PLACES} places, {near:.0%} near"


def draw(record: Record, path: Path) -> None:
    """Draws samples over time, the loss scale with the skipped steps, and both losses."""
    counts = ", ".join(f"{name} {sum(record.skipped[name])}" for name in NAMES)
    figure = start_figure(f"Two optimizers under one loss scale; skipped steps: {counts}", 7.4)
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.3))
    upper, lower = grid[0].subgridspec(1, SHOWN), grid[1].subgridspec(1, 3)
    scale_axes, loss_axes = figure.add_subplot(lower[:2]), figure.add_subplot(lower[2])

    torch.manual_seed(0)
    data = draw_data(SAMPLES)
    for column, (step, points) in enumerate(record.samples.items()):
        axes = figure.add_subplot(upper[column])
        axes.scatter(*data.T, s=4, color=COLOURS["data"], lw=0, label="data")
        axes.scatter(*points.T, s=4, color=COLOURS["generator"], lw=0, alpha=0.5, label="samples")
        axes.set(title=f"after {step} steps", xlabel=describe(points))
        axes.set(xticks=[], yticks=[], xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
        axes.spines[:].set(color=COLOURS["data"])
    figure.axes[-1].legend(loc="center", frameon=False, markerscale=4, handletextpad=0.1)

    scale_axes.plot(
        record.scales, color="#000000", lw=1, drawstyle="steps-post", label="loss scale"
    )
    for name, marker, size in zip(NAMES, "v^", (9, 6), strict=True):
        steps = [step for step, skip in enumerate(record.skipped[name]) if skip]
        scales = [record.scales[step] for step in steps]
        label = f"skipped step of the {name}"
        scale_axes.plot(steps, scales, marker, color=COLOURS[name], ms=size, label=label)
        loss_axes.plot(record.losses[name], color=COLOURS[name], lw=0.6, label=name)
    scale_axes.set(title="Loss scale, the same for both", xlabel="step")
    scale_axes.set_yscale("log", base=2)
    loss_axes.set(title="Losses", xlabel="step")
    finish_axes(scale_axes, loss_axes)
    caption = (
        f"{len(record.scales)} steps of Adam for each network, three layers of {WIDTH}, matrix "
        f"products in fp16 by autocast. Data: {PLACES} places on a ring. A step is skipped for the "
        "optimizer whose gradients overflow and for no other; the common scale is then halved "
        f"once. It doubles after {GROWTH_INTERVAL} good steps (default: 2000), to show its search."
    )
    write_figure(figure, caption, path)


def halvings(record: Record) -> tuple[int, int]:
    """Counts the updates with a skipped step, and those of them that halved the scale once."""
    skips = [any(both) for both in zip(*record.skipped.values(), strict=True)]
    after = zip(skips, record.scales, record.scales[1:], strict=False)
    halved = [later == before / 2 for skip, before, later in after if skip]
    return len(halved), sum(halved)


def make_table(record: Record) -> str:
    """Sums the steps up for the terminal."""
    both = sum(all(pair) for pair in zip(*record.skipped.values(), strict=True))
    table = [["optimizer", "steps", "skipped", "while the other stepped"]]
    for name in NAMES:
        skipped = sum(record.skipped[name])
        steps = len(record.skipped[name]) - skipped
        table.append([name, *map(str, (steps, skipped, skipped - both))])
    return format_table(table)


def check(record: Record, quick: bool) -> dict[str, bool]:
    """Compares what was measured with what the example is to show."""
    updates, halved = halvings(record)
    claims = {"every skip halved the scale once": updates == halved > 0}
    if not quick:
        skips = list(zip(*record.skipped.values(), strict=True))
        count, near = reached(list(record.samples.values())[-1])
        claims |= {
            "each skipped steps that the other took": (
                (True, False) in skips and (False, True) in skips
            ),
            "all places reached, two thirds of the samples near": (
                count == PLACES and near >= 2 / 3
            ),
        }
    return claims


def main() -> int:
    """Reads the command line, trains, and writes the figure."""
    quick = "a few seconds, judges no samples"
    arguments = read_options(make_parser(__doc__, "two_optimizers", quick, seeds=False))
    steps = QUICK_STEPS if arguments.quick else STEPS
    torch.set_num_threads(1)  # of the CPU: the matrices are too small to gain from a second

    record = train(steps, arguments.device)
    figure = arguments.out / "two_optimizers.png"
    draw(record, figure)
    return finish(make_table(record), figure, check(record, arguments.quick))


if __name__ == "__main__":
    sys.exit(run_program(main))
