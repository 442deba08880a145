"""Trains the networks of photo.py and char_gpt.py with 16 to 7 bytes of memory per parameter.

    python examples/low_memory.py                             # under two minutes on one core
    python examples/low_memory.py --seeds 3 --steps 2000      # the figures of docs/low_memory.md

AdamW with bf16 parameters stores a parameter, a gradient, a float32 master and two float32 moments:
16 bytes. Here both networks are trained in less memory, down to 7 bytes, with everything else
unchanged. The photograph is fitted as in photo.py, in bf16; it is small, because many CPUs are slow
at bf16 products. The GPT is a smaller version of the one in char_gpt.py, with parameters and
gradients in bf16, and matrix products in fp32.

Dithering rounds a value that is 30 % of the way between two storable ones up in 30 % of the steps.
Expect every configuration with split masters or with dithering to reach the result of float32
masters and moments, up to the noise between seeds. The last configuration rounds everything to
nearest, as torch does, and ends clearly worse. Writes ``low_memory.png`` and prints a table. With
the default settings it also checks these claims, and returns 1 if one fails.
"""

from __future__ import annotations

import math
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import photo
import torch
from char_gpt import GPT, LEARNING_RATE, Settings, Text, loss_of, validate, warm_up_and_cosine
from presentation import (
    differences,
    finish,
    finish_axes,
    make_parser,
    positive,
    read_options,
    run_all,
    start_figure,
    write_figure,
)
from torch import Tensor
from torch.nn import functional

from amp_ext.optim import AdamW
from amp_ext.text_table import format_table

BF16 = torch.bfloat16


@dataclass(frozen=True, eq=False)
class Configuration:
    """A way to store parameters and optimizer states."""

    name: str
    options: dict[str, Any]  # keyword arguments of AdamW
    dtype: torch.dtype = BF16  # dtype of the parameters and gradients


def in_bf16(name: str, **options: Any) -> Configuration:
    """Returns a configuration with bf16 parameters."""
    return Configuration(name, options)


MASTERS = in_bf16("bf16 + masters, fp32 states")  # the baseline of all comparisons
# Every configuration must end as well as MASTERS, except AS_TORCH, which is expected to end worse.
AS_TORCH = in_bf16("bf16, all to nearest, as torch", master_weights=False, state_dtype=None)
CONFIGURATIONS = (
    Configuration("fp32, fp32 states", {}, torch.float32),
    Configuration("fp32, bf16 states", {"state_dtype": BF16}, torch.float32),
    MASTERS,
    in_bf16("bf16 + split, fp32 states", master_weights="split"),
    in_bf16("bf16 + split, bf16 states", master_weights="split", state_dtype=BF16),
    in_bf16("bf16 + split8, bf16 states", master_weights="split8", state_dtype=BF16),
    in_bf16("bf16 + split, 8bit-bf16 states", master_weights="split", state_dtype="8bit-bf16"),
    in_bf16("bf16 + split8, 8bit states", master_weights="split8", state_dtype="8bit"),
    in_bf16("bf16, no masters, bf16 states", master_weights=False, state_dtype=BF16),
    AS_TORCH,
)

PHOTO = photo.Settings(steps=1000, size=64, width=64, tiles=1)
PHOTO_LEARNING_RATE = 5e-3  # first learning rate; it falls along a cosine to 1 % of this
SMALL_GPT = Settings(accumulation=1, width=64, layers=2, validate_every=100)
QUICK_PHOTO = replace(PHOTO, steps=20, size=32, width=32)
QUICK_GPT = replace(SMALL_GPT, steps=20, warm_up=2, context=32, width=32, validate_every=10)
LARGEST_PSNR_GAP = 0.3  # allowed PSNR difference of the photograph in dB, mean over the seeds
LARGEST_LOSS_GAP = 0.01  # allowed loss increase of the GPT in nats, mean over the seeds


@dataclass
class Run:
    """Result of training the GPT with one seed."""

    validations: dict[int, float]  # maps the steps taken to the validation loss in nats
    bytes: int  # memory per parameter between steps, including the gradient

    @property
    def last_loss(self) -> float:
        """Validation loss after the last step, in nats per character."""
        return self.validations[max(self.validations)]


def train_gpt(configuration: Configuration, text: Text, settings: Settings, seed: int) -> Run:
    """Trains one GPT; the seed determines the initial parameters and the batches."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(len(text.alphabet), settings).to(configuration.dtype)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, **configuration.options)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(warm_up_and_cosine, settings=settings)
    )
    validations = {}
    for step in range(settings.steps):
        if step % settings.validate_every == 0:
            validations[step] = validate(model, text, settings)
        optimizer.zero_grad()
        loss = loss_of(model, text.pieces(text.train, settings, generator))
        loss.backward()
        optimizer.step()
        schedule.step()
    validations[settings.steps] = validate(model, text, settings)
    return Run(validations, bytes_stored(model, optimizer))


def bytes_stored(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes per parameter between steps (parameter, gradient and states), rounded."""
    params = list(model.parameters())
    tensors = [tensor for param in params for tensor in optimizer.state[param].values()]
    kept = sum(tensor.nbytes for tensor in tensors if tensor.dim() > 0)  # without step counters
    held = sum(2 * param.nbytes for param in params)
    return round((held + kept) / sum(param.numel() for param in params))


def train_photo(
    configuration: Configuration, picture: Tensor, settings: photo.Settings, seed: int
) -> float:
    """Fits one network to ``picture``; returns the peak signal-to-noise ratio in dB."""
    frequency, model = photo.make_start(settings, seed)
    features = photo.fourier_features(settings.size, frequency).to(configuration.dtype)
    colours = picture.view(-1, 3)
    model = model.to(configuration.dtype)
    optimizer = AdamW(model.parameters(), lr=PHOTO_LEARNING_RATE, **configuration.options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, settings.steps, eta_min=PHOTO_LEARNING_RATE / 100
    )
    for _ in range(settings.steps):
        optimizer.zero_grad()
        functional.mse_loss(model(features).float(), colours).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        learned = model(features).float().clamp(0, 1)
    return -10 * math.log10(functional.mse_loss(learned, colours).item())


Photos = dict[Configuration, list[float]]  # dB, one per seed
Gpts = dict[Configuration, list[Run]]


def draw(photos: Photos, gpts: Gpts, settings: Settings, path: Path) -> None:
    """Draws the GPT's losses, and each configuration's difference to MASTERS, a dot per seed."""
    sizes = [gpts[each][0].bytes for each in CONFIGURATIONS]
    title = f"A photograph and a GPT in {min(sizes)} to {max(sizes)} bytes a parameter"
    figure, (loss_axes, photo_axes, gap_axes) = start_figure(title, 5.6, ncols=3)
    for place, each in enumerate(CONFIGURATIONS):
        colour = colour_of(each)
        runs, places = gpts[each], [place] * len(gpts[each])
        steps = [step for step in runs[0].validations if step >= settings.warm_up]
        means = [mean(run.validations[step] for run in runs) for step in steps]
        loss_axes.plot(steps, means, color=colour, lw=4 if each is MASTERS else 1.5)
        dots: dict[str, Any] = {"color": colour, "ls": "", "marker": "o", "ms": 7, "alpha": 0.7}
        photo_axes.plot(differences(photos, each, MASTERS), places, **dots)
        gap_axes.plot(differences(gpts, each, MASTERS, "last_loss"), places, **dots)
    loss_axes.set(title="GPT: validation loss, nats", xlabel="step")
    labels = [f"{each.name}: {size} B" for each, size in zip(CONFIGURATIONS, sizes, strict=True)]
    rows = range(len(CONFIGURATIONS))
    photo_axes.set_yticks(rows, [textwrap.fill(label, 24) for label in labels])
    photo_axes.set(title="photograph: Δ PSNR, dB", xlabel="more is better")
    gap_axes.set_yticks(rows, [])
    gap_axes.set(title="GPT: Δ validation loss, nats", xlabel="less is better")
    for axes, largest in ((photo_axes, LARGEST_PSNR_GAP), (gap_axes, LARGEST_LOSS_GAP)):
        axes.axvspan(-largest, largest, color="#EEEEEE", zorder=0)
        axes.set_xscale("symlog", linthresh=largest, linscale=2)
        axes.set_xticks([factor * largest for factor in (-10, -1, 0, 1, 10)])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(-14 * largest, 14 * largest)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.axvline(0, color=colour_of(MASTERS), lw=1)
    finish_axes(loss_axes, photo_axes, gap_axes)
    caption = (
        f"Δ: against bf16 parameters with float32 masters and states, the wide line, with the same "
        f"seed; {len(photos[MASTERS])} of them. Grey: {LARGEST_PSNR_GAP} dB and {LARGEST_LOSS_GAP} "
        "nats, beyond which scales are logarithmic."
    )
    write_figure(figure, caption, path, dpi=130)


def colour_of(configuration: Configuration) -> Any:
    """Returns black for MASTERS, red for AS_TORCH, and colours of a colour map for the others."""
    place = CONFIGURATIONS.index(configuration) / len(CONFIGURATIONS)
    known = {MASTERS: "#000000", AS_TORCH: "#D55E00"}
    return known.get(configuration, plt.colormaps["viridis"](place))


def make_table(photos: Photos, gpts: Gpts) -> str:
    """Formats the means over the seeds as a table; Δ is the difference to the third row."""
    table = [["how it is stored", "B", "photo, dB", "Δ", "GPT, nats", "Δ"]]
    for each in CONFIGURATIONS:
        psnr, loss = mean(photos[each]), mean(r.last_loss for r in gpts[each])
        gain = mean(differences(photos, each, MASTERS))
        gap = mean(differences(gpts, each, MASTERS, "last_loss"))
        cells = [f"{psnr:.2f}", f"{gain:+.2f}", f"{loss:.4f}", f"{gap:+.4f}"]
        table.append([each.name, str(gpts[each][0].bytes), *cells])
    return format_table(table)


def check(photos: Photos, gpts: Gpts) -> dict[str, bool]:
    """Compares the means over the seeds with the limits that the example promises."""
    judged = [each for each in CONFIGURATIONS if each not in (MASTERS, AS_TORCH)]
    gain = max(abs(mean(differences(photos, each, MASTERS))) for each in judged)
    gap = max(mean(differences(gpts, each, MASTERS, "last_loss")) for each in judged)
    nearest = mean(differences(photos, AS_TORCH, MASTERS))
    return {
        f"photographs within {LARGEST_PSNR_GAP} dB of float32 masters and states": gain
        <= LARGEST_PSNR_GAP,
        f"GPTs at most {LARGEST_LOSS_GAP} nats above": gap <= LARGEST_LOSS_GAP,
        "to nearest at least 1 dB worse": nearest <= -1,
    }


def main() -> int:
    """Reads the command line, trains, and writes the figure and the table."""
    parser = make_parser(__doc__, "low_memory", "a few seconds, judges nothing", device=False)
    parser.add_argument(
        "--steps", type=positive, help=f"optimizer steps of the GPT ({SMALL_GPT.steps})"
    )
    arguments = read_options(parser)
    torch.set_num_threads(1)  # a second thread gains little with such small matrices

    of_photo, of_gpt = (QUICK_PHOTO, QUICK_GPT) if arguments.quick else (PHOTO, SMALL_GPT)
    of_gpt = replace(of_gpt, steps=arguments.steps or of_gpt.steps)
    picture, text = photo.load_photo(None, of_photo.size), Text("cpu")

    def train_one(each: Configuration, seed: int) -> tuple[float, Run]:
        return train_photo(each, picture, of_photo, seed), train_gpt(each, text, of_gpt, seed)

    results = run_all(CONFIGURATIONS, train_one, arguments.seeds)
    photos = {each: [psnr for psnr, _ in runs] for each, runs in results.items()}
    gpts = {each: [run for _, run in runs] for each, runs in results.items()}
    figure = arguments.out / "low_memory.png"
    draw(photos, gpts, of_gpt, figure)
    # The claims are only promised for the default settings.
    claims = check(photos, gpts) if of_gpt == SMALL_GPT else {}
    return finish(make_table(photos, gpts), figure, claims)


if __name__ == "__main__":
    sys.exit(main())
