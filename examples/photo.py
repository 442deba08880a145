"""Fits a small network to a photograph in fp32 and in fp16, with and without loss scaling.

    python examples/photo.py                                  # matplotlib's sample photograph
    python examples/photo.py --image yours.jpg --seeds 3
    python examples/photo.py --checkpoint run.pt              # saves the run while it trains
    python examples/photo.py --resume run.pt --checkpoint run.pt    # goes on after Ctrl-C
    python examples/photo.py --write-start start.pt           # for the program in libtorch/

A picture of 1024 x 1024 pixels has 256 tiles of 64 x 64, over which gradients are accumulated. The
loss of each tile is divided by k = 256, so without loss scaling the gradients become too small for
fp16. A CPU trains on a single tile and divides by the same k. Writes ``photo.png`` and prints a
table. With the default settings it also checks that amp_ext is as good as fp32 and that fp16
without scaling is worse, and returns 1 if either check fails.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib import cbook
from PIL import Image, ImageOps
from presentation import (
    differences,
    finish,
    finish_axes,
    make_parser,
    plot_scale,
    positive,
    run_all,
    show_mean,
    start_figure,
    write_figure,
)
from torch import Tensor, nn
from torch.nn import functional

import amp_ext
from amp_ext.text_table import format_table
from amp_ext.training import MixedPrecisionConfig, MixedPrecisionTrainer


@dataclass(frozen=True, eq=False)
class Recipe:
    """The scaler, optimizer and dtypes of one run. All runs use the same training loop."""

    name: str
    dtype: torch.dtype  # dtype of the parameters and gradients
    scaler: Callable[..., torch.amp.GradScaler]
    optimizer: Callable[..., torch.optim.Optimizer]
    autocast: bool = True  # whether matrix products are computed in fp16


unscaled = partial(torch.amp.GradScaler, enabled=False)
FP32 = Recipe("fp32", torch.float32, unscaled, torch.optim.AdamW, autocast=False)
UNSCALED = Recipe("fp16 unscaled", torch.float32, unscaled, torch.optim.AdamW)
TORCH = Recipe("fp16 torch.amp", torch.float32, torch.amp.GradScaler, torch.optim.AdamW)
# torch's scaler refuses fp16 gradients. amp_ext's unscales them, and its AdamW keeps fp32 masters.
AMP_EXT = Recipe("fp16 amp_ext", torch.float16, amp_ext.GradScaler, amp_ext.optim.AdamW)
RECIPES = (FP32, UNSCALED, TORCH, AMP_EXT)

# Colours are safe for colour-blind readers. Thin lines are drawn over wide ones, so that both show.
COLOURS = {FP32: "#000000", UNSCALED: "#D55E00", TORCH: "#56B4E9", AMP_EXT: "#004D7A"}
WIDTHS = {FP32: 4.5, UNSCALED: 1.5, TORCH: 3.0, AMP_EXT: 1.2}


@dataclass(frozen=True)
class Settings:
    """The sizes of a run."""

    steps: int
    size: int  # height and width of the picture in pixels
    width: int  # units of each hidden layer, and number of Fourier features
    tiles: int  # divisor k of the loss


# Sizes for CPUs, which may take 10 to 100 times longer for an fp16 matrix product than for fp32.
DEFAULTS = {
    "quick": Settings(steps=40, size=32, width=32, tiles=256),
    "cpu": Settings(steps=200, size=64, width=64, tiles=256),
    "cuda": Settings(steps=200, size=1024, width=256, tiles=256),
}
TILE = 64  # height and width of a tile in pixels
LEARNING_RATE = 5e-3
SAVE_EVERY = 20  # steps between two checkpoints
GROWTH_INTERVAL = 10  # steps without overflow before the scale doubles (default: 2000)


@dataclass
class Result:
    """Result of one run with one seed."""

    psnr: float  # peak signal-to-noise ratio in dB
    losses: list[float]  # mean squared error of each step, before the division by k
    scales: list[float]  # loss scale of each step
    skipped: list[int]  # indices of the steps skipped after an overflow
    seconds: float  # duration of all steps except the first, in which libraries warm up
    picture: Tensor  # learned picture, [size, size, 3], values from 0 to 1


Results = dict[Recipe, list[Result]]  # each list holds one result per seed


@dataclass(frozen=True)
class Files:
    """The checkpoint files of the run with amp_ext."""

    resume: Path | None = None  # checkpoint to load before training
    checkpoint: Path | None = None  # checkpoint to write during training
    about: dict[str, Any] = field(default_factory=dict)  # settings that a resumed run must share


def train(
    recipe: Recipe,
    photo: Tensor,
    settings: Settings,
    seed: int,
    device: str,
    files: Files,
) -> Result:
    """Trains one network as ``recipe`` says, from parameters that depend only on ``seed``.

    The photo is float32, ``[size, size, 3]``, with values from 0 to 1.
    """
    frequency, model = make_start(settings, seed)
    order = tile_order(settings.size)
    # Shapes: features [tiles, pixels, width], colours [tiles, pixels, 3].
    features = fourier_features(settings.size, frequency)[order].to(device)
    colours = photo.view(-1, 3)[order].to(device)
    model = model.to(device, recipe.dtype)
    optimizer = recipe.optimizer(model.parameters(), lr=LEARNING_RATE)
    scaler = recipe.scaler(device, growth_interval=GROWTH_INTERVAL)

    losses, scales, skipped = [], [scaler.get_scale()], []
    start = time.perf_counter()
    # The trainer only saves and loads the run; all recipes share the loop below.
    if files.resume or files.checkpoint:
        trainer = MixedPrecisionTrainer(
            model, optimizer, MixedPrecisionConfig("fp16"), scaler=scaler
        )
    if files.resume:
        losses, scales, skipped, seconds = trainer.load(files.resume)["curves"]
        start -= seconds
    for step in range(len(losses), settings.steps):
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        for tile, target in zip(features, colours, strict=True):
            with torch.autocast(device, torch.float16, enabled=recipe.autocast):
                loss = functional.mse_loss(model(tile).float(), target)
            scaler.scale(loss / settings.tiles).backward()
            step_loss += loss.detach()
        scaler.step(optimizer)  # changes nothing if a gradient is inf or NaN
        scaler.update()

        # A fast training loop should not call `item` and `get_scale`, which wait for a GPU.
        losses.append(step_loss.item() / len(features))
        scales.append(scaler.get_scale())
        if step == 0:
            start = time.perf_counter()
        if scales[-1] < scales[-2]:
            skipped.append(step)
        seconds = time.perf_counter() - start
        if files.checkpoint and (step + 1 == settings.steps or step % SAVE_EVERY == 0):
            curves = [losses, scales, skipped, seconds]
            trainer.save(files.checkpoint, {"about": files.about, "curves": curves})
    seconds = time.perf_counter() - start

    picture = torch.empty(settings.size**2, 3)
    with torch.no_grad(), torch.autocast(device, torch.float16, enabled=recipe.autocast):
        for pixels, tile in zip(order, features, strict=True):
            picture[pixels] = model(tile).float().nan_to_num().clamp(0, 1).cpu()
    picture = picture.view_as(photo)
    psnr = -10 * math.log10(functional.mse_loss(picture, photo).item())
    return Result(psnr, losses, scales[:-1], skipped, seconds, picture)


def make_start(settings: Settings, seed: int) -> tuple[Tensor, nn.Module]:
    """Returns random wave frequencies along both axes, ``[2, width / 2]``, and a new network."""
    torch.manual_seed(seed)
    width = settings.width
    frequency = torch.randn(2, width // 2) * math.sqrt(settings.size)
    hidden = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return frequency, nn.Sequential(*hidden, nn.Linear(width, 3))


def coordinates(size: int) -> Tensor:
    """Returns the coordinates of all pixels, from -1 to 1: ``[size * size, 2]``."""
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    return torch.cartesian_prod(axis, axis)


def fourier_features(size: int, frequency: Tensor) -> Tensor:
    """Returns sines and cosines of random waves at all pixels: ``[size * size, width]``.

    Reference:
        Tancik et al., "Fourier Features Let Networks Learn High Frequency Functions in Low
        Dimensional Domains", 2020.
    """
    phase = coordinates(size) @ frequency  # radians
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def tile_order(size: int) -> Tensor:
    """Returns the pixel indices of each tile: ``[tiles, pixels]``."""
    side = min(TILE, size)
    pixels = torch.arange(size**2).view(size // side, side, size // side, side)
    return pixels.transpose(1, 2).reshape(-1, side**2)


def write_start(
    path: Path, photo: Tensor, settings: Settings, device: str, about: dict[str, Any]
) -> None:
    """Writes the starting state of the first seed as plain dicts, for the C++ program."""
    frequency, model = make_start(settings, seed=0)
    content = {
        "about": about,
        "steps": settings.steps,
        "device": device,
        "photo": photo,
        "order": tile_order(settings.size),
        "coordinates": coordinates(settings.size),
        "frequency": frequency,
        "model": dict(model.state_dict()),
    }
    torch.save(content, path)


def load_photo(path: Path | None, size: int) -> Tensor:
    """Reads a square crop of an image: float32 ``[size, size, 3]``, values from 0 to 1."""
    upper_middle = (0.5, 0.25)  # centre of the crop, where faces usually are
    with Image.open(path or cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)) as image:
        square = ImageOps.fit(image.convert("RGB"), (size, size), centering=upper_middle)
    return torch.from_numpy(np.array(square, dtype=np.float32) / 255)


def draw(results: Results, photo: Tensor, settings: Settings, path: Path) -> None:
    """Draws pictures and loss scales of the first seed, and losses averaged over the seeds."""
    figure, _ = start_figure("A photograph learned in fp16", 8)
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.2))
    upper, lower = grid[0].subgridspec(1, 5), grid[1].subgridspec(1, 2)
    pictures = [figure.add_subplot(upper[column]) for column in range(5)]
    loss_axes, scale_axes = (figure.add_subplot(lower[column]) for column in range(2))

    pictures[0].imshow(photo, interpolation="nearest")
    pictures[0].set(title="the photograph", xlabel=f"{settings.size} × {settings.size} pixels")
    for axes, recipe in zip(pictures[1:], RECIPES, strict=True):
        first = results[recipe][0]
        axes.imshow(first.picture, interpolation="nearest")
        axes.set(title=f"{recipe.name}: {first.psnr:.1f} dB", xlabel=f"parameters {holds(recipe)}")
        axes.spines[:].set(color=COLOURS[recipe], linewidth=3)
    for axes in pictures:
        axes.set(xticks=[], yticks=[])

    for recipe, runs in results.items():
        style: dict[str, Any] = {"color": COLOURS[recipe], "lw": WIDTHS[recipe]}
        losses = np.mean([run.losses for run in runs], axis=0)
        loss_axes.plot(losses, label=recipe.name, **style)
        if recipe.scaler is not unscaled:
            plot_scale(scale_axes, runs[0].scales, runs[0].skipped, label=recipe.name, **style)
    loss_axes.set(title="Loss: mean squared error", xlabel="step", yscale="log")
    finish_axes(loss_axes, scale_axes)

    caption = (
        f"The loss of a step is divided by k = {settings.tiles}, as gradient accumulation over k "
        "tiles does. Without scaling, gradients that are too small for fp16 become 0. The scale "
        f"doubles after {GROWTH_INTERVAL} good steps (default: 2000), to show its search and the "
        f"steps it skips. Seeds: {len(results[FP32])}."
    )
    write_figure(figure, caption, path)


def holds(recipe: Recipe) -> str:
    """Describes the precision in which a recipe stores parameters and gradients."""
    return "fp16, masters fp32" if recipe.dtype == torch.float16 else "fp32"


def make_table(results: Results) -> str:
    """Formats the results as a table for the terminal."""
    table = [["run", "parameters", "PSNR, dB", "vs fp32, dB", "skipped", "s"]]
    for recipe, runs in results.items():
        table.append(
            [
                recipe.name,
                holds(recipe),
                show_mean([run.psnr for run in runs], ".2f"),
                ""
                if recipe is FP32
                else show_mean(differences(results, recipe, FP32, "psnr"), "+.2f"),
                f"{mean(len(run.skipped) for run in runs):.1f}",
                f"{mean(run.seconds for run in runs):.1f}",
            ]
        )
    return format_table(table, left=(0, 1))


def check(results: Results) -> dict[str, bool]:
    """Compares the means over the seeds with the limits that the example promises."""
    return {
        "amp_ext within 0.3 dB of fp32": abs(mean(differences(results, AMP_EXT, FP32, "psnr")))
        <= 0.3,
        "without scaling at least 3 dB worse": mean(differences(results, UNSCALED, FP32, "psnr"))
        <= -3,
    }


def main() -> int:
    """Reads the command line, trains, and writes the figure and the table."""
    parser = make_parser(__doc__, "photo", "a few seconds, judges nothing")
    parser.add_argument("--image", type=Path, help="a picture (matplotlib's sample photograph)")
    parser.add_argument("--steps", type=positive, help="optimizer steps (200)")
    parser.add_argument("--tiles", type=positive, metavar="K", help="divides the loss (256)")
    parser.add_argument("--checkpoint", type=Path, help="file to save the run with amp_ext in")
    parser.add_argument("--resume", type=Path, help="such a file, from which that run goes on")
    parser.add_argument("--write-start", type=Path, help="file for libtorch/; trains nothing")
    arguments = parser.parse_args()
    device = arguments.device
    default = DEFAULTS["quick" if arguments.quick else device]
    settings = replace(
        default, steps=arguments.steps or default.steps, tiles=arguments.tiles or default.tiles
    )
    image = arguments.image.name if arguments.image else "grace_hopper.jpg"
    about = {"image": image, **asdict(settings)}
    del about["steps"]
    files = Files(arguments.resume, arguments.checkpoint, about)
    if (files.resume or files.checkpoint) and arguments.seeds > 1:
        parser.error(f"--checkpoint and --resume take one seed, got --seeds {arguments.seeds}")
    if files.resume and torch.load(files.resume)["extra"]["about"] != about:
        parser.error(f"--resume: {files.resume} has a run with another image or other sizes")
    figure = arguments.out / "photo.png"
    for path in filter(None, (arguments.write_start or figure, files.checkpoint)):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)

    photo = load_photo(arguments.image, settings.size)
    if arguments.write_start:
        write_start(arguments.write_start, photo, settings, device, about)
        return 0

    def train_one(recipe: Recipe, seed: int) -> Result:
        saved = files if recipe is AMP_EXT else Files()
        return train(recipe, photo, settings, seed, device, saved)

    results = run_all(RECIPES, train_one, arguments.seeds)
    draw(results, photo, settings, figure)
    # The claims are only promised for the default settings.
    is_default = settings == DEFAULTS[device] and not arguments.image
    return finish(make_table(results), figure, check(results) if is_default else {})


if __name__ == "__main__":
    sys.exit(main())
