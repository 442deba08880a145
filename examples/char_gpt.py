"""Trains a small GPT on characters with fp16 parameters, and resumes it from a checkpoint.

    python examples/char_gpt.py                               # about a minute on two cores
    python examples/char_gpt.py --optimizer muon              # about five minutes

The training text ships with Python: the topics that ``help()`` shows. Parameters and gradients are
fp16. amp_ext.optim.AdamW keeps fp32 masters and clips by norm inside its step, the trainer
accumulates gradients and scales the loss, and the learning rate warms up and then falls along a
cosine. Matrix products are computed in fp16 on a GPU and in fp32 on a CPU, because most CPUs take
10 times as long for fp16.

The loss scale starts too high on purpose. Expect about eight skipped steps, then a scale that
settles around its limit, and a validation loss near 2.1 nats per character. After half of the steps
the program writes a checkpoint. New objects load it and repeat the second half: every loss, scale,
parameter and state must be bit-identical, otherwise the program returns 1. Writes ``char_gpt.png``
and ``checkpoint.pt``, and prints a table.

With ``--optimizer muon``, the hidden matrices are stepped by Muon. The program then also trains
half as long with three learning rates for both, with Muon's momentum in 8 bits and with other
seeds, prints the validation losses, and draws them in ``muon.png``.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

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
from amp_ext.training import MixedPrecisionConfig, MixedPrecisionTrainer


@dataclass(frozen=True)
class Settings:
    """The size of the model and the length of the training."""

    steps: int = 600
    warm_up: int = 60  # steps until the learning rate reaches its peak
    accumulation: int = 2  # backward passes per optimizer step
    rows: int = 8  # batch size: number of text pieces in each backward pass
    context: int = 64  # length of a piece in characters
    width: int = 96
    layers: int = 3
    heads: int = 4
    validate_every: int = 50  # optimizer steps between two validations


QUICK = Settings(steps=40, warm_up=4, rows=8, context=32, width=32, layers=2)
LEARNING_RATE = 2e-3  # peak of the learning rate, after the warm-up
MAX_GRAD_NORM = 1.0
INITIAL_SCALE = 2.0**24  # too high on purpose (default: 2**16)
GROWTH_INTERVAL = 50  # steps without overflow before the scale doubles (default: 2000)
BLUE, DARK_BLUE, ORANGE = "#56B4E9", "#004D7A", "#D55E00"  # safe for colour-blind readers


class Block(nn.Module):
    """A transformer block: causal attention, then a two-layer MLP on each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention and MLP to ``x``, of shape ``[rows, context, width]``."""
        rows, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [rows, heads, context, width / heads]
        heard = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heard.transpose(1, 2).reshape(x.shape))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next character from the characters before it.

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, characters: int, settings: Settings) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, settings.width)
        self.position = nn.Embedding(settings.context, settings.width)
        blocks = [Block(settings.width, settings.heads) for _ in range(settings.layers)]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(settings.width))
        self.head = nn.Linear(settings.width, characters, bias=False)
        for embedding in (self.character, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Returns the logits of each next character, ``[rows, context, characters]``."""
        position = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.character(text) + self.position(position)))


def predict(model: GPT, text: Tensor) -> Tensor:
    """Returns the model's logits in float32, computed in fp16 on a GPU and in fp32 on a CPU."""
    if text.is_cuda:
        with torch.autocast("cuda", torch.float16):
            return model(text).float()
    widened = {name: param.float() for name, param in model.named_parameters()}
    return torch.func.functional_call(model, widened, (text,))


def loss_of(model: GPT, pieces: Tensor) -> Tensor:
    """Returns the mean cross-entropy of ``pieces``, ``[rows, context + 1]``, in nats."""
    logits = predict(model, pieces[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


class Loss(nn.Module):
    """Wraps a GPT so that its forward pass returns the loss, as the trainer expects."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, pieces: Tensor) -> Tensor:
        """Returns the loss of ``pieces``, ``[rows, context + 1]``."""
        return loss_of(self.model, pieces)


class Text:
    """The help topics as character indices: every tenth for validation, the others for training."""

    def __init__(self, device: str) -> None:
        names = sorted(topics)
        parts = {"validation": names[::10], "train": [n for i, n in enumerate(names) if i % 10]}
        self.alphabet = sorted(set().union(*topics.values()))
        number = {character: index for index, character in enumerate(self.alphabet)}
        self.train, self.validation = (
            torch.tensor([number[c] for name in parts[part] for c in topics[name]], device=device)
            for part in ("train", "validation")
        )

    def pieces(self, part: Tensor, settings: Settings, generator: torch.Generator) -> Tensor:
        """Draws random pieces of ``part``, a 1-D tensor: ``[rows, context + 1]``."""
        length = settings.context + 1
        starts = torch.randint(len(part) - length, (settings.rows, 1), generator=generator)
        return part[(starts + torch.arange(length)).to(part.device)]


@torch.no_grad()
def validate(model: GPT, text: Text, settings: Settings) -> float:
    """Returns the mean loss of 32 fixed batches of the validation text, in nats."""
    generator = torch.Generator().manual_seed(0)
    pieces = [text.pieces(text.validation, settings, generator) for _ in range(32)]
    return torch.stack([loss_of(model, piece) for piece in pieces]).mean().item()


@dataclass(frozen=True)
class Recipe:
    """An optimizer with its learning rate. Muon's other parameters are stepped by AdamW."""

    name: str
    rate: float
    state_dtype: Any = torch.float32
    seed: int = 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer of a model."""
        if self.name == "adamw":
            return amp_ext.optim.AdamW(model.named_parameters(), lr=self.rate)
        groups = amp_ext.optim.param_groups_for_muon(
            model, lr=self.rate, weight_decay=0.01, adamw={"lr": LEARNING_RATE}
        )
        return amp_ext.optim.Muon(groups, state_dtype=self.state_dtype)

    def __str__(self) -> str:
        """Returns the name in tables and pictures."""
        form = ", 8 bits" if self.state_dtype == "8bit" else ""
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{'AdamW' if self.name == 'adamw' else 'Muon'}, {self.rate:g}{form}{seed}"


RECIPES = {"adamw": Recipe("adamw", LEARNING_RATE), "muon": Recipe("muon", 0.01)}
COMPARED = [
    *(Recipe("adamw", rate) for rate in (1e-3, 2e-3, 4e-3)),
    *(Recipe("muon", rate) for rate in (0.005, 0.01, 0.02)),
    *(Recipe("muon", 0.01, seed=seed) for seed in (1, 2)),
    *(Recipe("muon", 0.01, "8bit", seed) for seed in (0, 1, 2)),
]


@dataclass
class Curves:
    """Measurements of a run. Each list holds one value per optimizer step."""

    losses: list[float] = field(default_factory=list)  # nats per character
    norms: list[float] = field(default_factory=list)  # unscaled gradient norm, before clipping
    scales: list[float] = field(default_factory=list)  # loss scale
    skipped: list[bool] = field(default_factory=list)
    # Maps the number of steps taken before a validation to its loss, in nats per character.
    validations: dict[int, float] = field(default_factory=dict)


class Training:
    """The training loop, and all objects that a checkpoint stores."""

    def __init__(
        self,
        text: Text,
        settings: Settings,
        seed: int,
        device: str,
        recipe: Recipe = RECIPES["adamw"],
    ) -> None:
        self.text, self.settings, self.curves = text, settings, Curves()
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)  # draws the training batches
        self.model = GPT(len(text.alphabet), settings).to(device, torch.float16)
        self.optimizer = recipe.optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, partial(warm_up_and_cosine, settings=settings)
        )
        self.scaler = amp_ext.GradScaler(
            device, init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL
        )
        config = MixedPrecisionConfig(
            "fp16", max_grad_norm=MAX_GRAD_NORM, gradient_accumulation_steps=settings.accumulation
        )
        self.trainer = MixedPrecisionTrainer(
            Loss(self.model), self.optimizer, config, scaler=self.scaler
        )

    def tensors(self) -> list[Tensor]:
        """Lists the parameters and all optimizer states: masters, moments and step counters."""
        params = list(self.model.parameters())
        states = [self.optimizer.state[param] for param in params]
        return params + [state[name] for state in states for name in sorted(state)]

    def save(self, path: Path) -> None:
        """Writes a checkpoint, with the schedule and the generator as extra data.

        The trainer does not step this schedule, because it must also advance at skipped steps.
        """
        extra = {"schedule": self.schedule.state_dict(), "generator": self.generator.get_state()}
        self.trainer.save(path, extra)

    def load(self, path: Path) -> None:
        """Restores the state from a checkpoint."""
        extra = self.trainer.load(path)
        self.schedule.load_state_dict(extra["schedule"])
        self.generator.set_state(extra["generator"])

    def run(self, steps: int) -> None:
        """Trains for ``steps`` steps; waits for a GPU only at validations and at the end."""
        settings, curves, part = self.settings, self.curves, self.text.train
        recorded: list[tuple[Tensor, ...]] = []
        for step in range(self.schedule.last_epoch, self.schedule.last_epoch + steps):
            if step % settings.validate_every == 0:
                curves.validations[step] = loss = validate(self.model, self.text, self.settings)
                print(f"{step} steps: {loss:.3f} nats per character", flush=True)
            step_loss = torch.zeros((), device=part.device)
            for _ in range(settings.accumulation):
                pieces = self.text.pieces(part, settings, self.generator)
                # The last call of this loop takes the step, which clips by norm and is skipped
                # after an overflow.
                metrics = self.trainer.train_step(pieces)
                step_loss += metrics.loss / settings.accumulation
            self.schedule.step()
            recorded.append((step_loss, metrics.grad_norm, metrics.loss_scale, metrics.skipped))
        curves.validations[self.schedule.last_epoch] = validate(
            self.model, self.text, self.settings
        )
        lists = (curves.losses, curves.norms, curves.scales, curves.skipped)
        for curve, values in zip(lists, zip(*recorded, strict=True), strict=True):
            curve += torch.stack(values).tolist()


def warm_up_and_cosine(step: int, settings: Settings) -> float:
    """Returns the learning rate of ``step``, counted from 0, as a fraction of its peak."""
    if step < settings.warm_up:
        return (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / (settings.steps - settings.warm_up)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2


def draw(first: Training, again: Training, path: Path) -> None:
    """Draws loss, loss scale and gradient norm of both runs."""
    curves, resumed, settings = first.curves, again.curves, first.settings
    middle = settings.steps - len(resumed.losses)
    figure, (loss_axes, scale_axes, norm_axes) = start_figure(
        "A GPT with fp16 parameters on Python's help", 5, ncols=3
    )
    for part, colour, start, width in ((curves, BLUE, 0, 3), (resumed, ORANGE, middle, 1)):
        again_or_not = ", resumed" if part is resumed else ""
        steps = range(start, settings.steps)
        loss_axes.plot(steps, part.losses, color=colour, lw=width, label="training" + again_or_not)
        norm_axes.plot(steps, part.norms, color=colour, lw=width)
        validated = part.validations.keys(), part.validations.values()
        label = "validation" + again_or_not
        loss_axes.plot(*validated, "o", color=colour, mec=DARK_BLUE, ms=2 + 2 * width, label=label)
    skipped = [step for step, skip in enumerate(curves.skipped) if skip]
    plot_scale(scale_axes, curves.scales, skipped, color=BLUE, lw=3)
    plot_scale(scale_axes, [math.nan] * middle + resumed.scales, [], color=ORANGE, lw=1)
    norm_axes.axhline(MAX_GRAD_NORM, color="#000000", ls="--", lw=1, label="max_grad_norm")
    loss_axes.set(title="Loss: nats per character", xlabel="step")
    norm_axes.set(title="Norm of the gradients before clipping", xlabel="step", yscale="log")
    finish_axes(loss_axes, scale_axes, norm_axes)
    caption = (
        f"Thin lines: new objects that resumed from the checkpoint after {middle} steps. The scale "
        f"starts at 2^24 (default: 2^16) and doubles after {GROWTH_INTERVAL} good steps (default: "
        "2000), to show its search and the steps it skips."
    )
    write_figure(figure, caption, path)


def make_table(training: Training) -> str:
    """Formats the measurements as a table for the terminal."""
    curves = training.curves
    first, last = curves.validations[0], curves.validations[len(curves.losses)]
    rows = [
        ["what", "measured"],
        ["validation loss, nats", f"{first:.2f} → {last:.2f}"],
        [
            "loss scale",
            " → ".join(f"2^{math.log2(s):g}" for s in (curves.scales[0], curves.scales[-1])),
        ],
        ["skipped steps", f"{sum(curves.skipped)} of {len(curves.skipped)}"],
        ["last gradient to overflow", f"{training.scaler.stats(wait=True).last_nonfinite}"],
    ]
    return format_table(rows, left=(0, 1))


def check(first: Training, again: Training, quick: bool) -> dict[str, bool]:
    """Compares the resumed run with the first one, bit for bit, and with what is promised."""
    curves, resumed = first.curves, again.curves
    half, steps = len(resumed.losses), len(curves.losses)
    states = zip(first.tensors(), again.tensors(), strict=True)
    claims = {
        "losses resumed bit for bit": curves.losses[-half:] == resumed.losses,
        "scales resumed bit for bit": curves.scales[-half:] == resumed.scales,
        "parameters, masters and moments resumed bit for bit": all(
            torch.equal(one, other) for one, other in states
        ),
    }
    if not quick:
        claims["skipped from 4 steps to a tenth"] = 4 <= sum(curves.skipped) <= steps / 10
        claims["validation loss below 2.3 nats"] = curves.validations[steps] < 2.3
    return claims


def compare(text: Text, settings: Settings, device: str, path: Path) -> str:
    """Trains half as long with each of COMPARED; draws the losses, and returns a table."""
    settings = replace(settings, steps=settings.steps // 2, warm_up=settings.warm_up // 2)
    rows = [["optimizer, learning rate", "validation loss, nats", "seconds"]]
    figure, axes = start_figure("A GPT with fp16 parameters: AdamW and Muon", 5, ncols=1)
    for recipe in COMPARED:
        print(recipe, flush=True)
        training = Training(text, settings, recipe.seed, device, recipe)
        start = time.perf_counter()
        training.run(settings.steps)
        seconds = time.perf_counter() - start
        losses = training.curves.validations
        rows.append([str(recipe), f"{losses[settings.steps]:.3f}", f"{seconds:.0f}"])
        if not recipe.seed:
            style = "--" if recipe.name == "adamw" else ":" if "8 bits" in str(recipe) else "-"
            axes.plot([*losses], [*losses.values()], style, label=str(recipe))
    axes.set(title="Validation loss: nats per character", xlabel="step", yscale="log")
    finish_axes(axes)
    write_figure(figure, "Muon steps the hidden matrices, AdamW all other parameters.", path)
    return format_table(rows)


def main() -> int:
    """Reads the command line, trains, resumes, and writes the checkpoint and the figure."""
    quick = "a few seconds, judges only the resumption"
    parser = make_parser(__doc__, "char_gpt", quick, seeds=False)
    parser.add_argument("--optimizer", choices=RECIPES, default="adamw", help="which trains")
    arguments = read_options(parser)
    recipe = RECIPES[arguments.optimizer]
    device = arguments.device
    settings = QUICK if arguments.quick else Settings()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)  # a second thread gains little with such small matrices

    checkpoint, figure = arguments.out / "checkpoint.pt", arguments.out / "char_gpt.png"
    text, half = Text(device), settings.steps // 2
    first = Training(text, settings, 0, device, recipe)
    first.run(settings.steps - half)
    first.save(checkpoint)
    first.run(half)
    print(f"Once more from {checkpoint}, by new objects")
    again = Training(text, settings, 1, device, recipe)  # another seed: only `load` makes it equal
    again.load(checkpoint)
    again.run(half)
    draw(first, again, figure)
    if recipe.name == "muon":
        print(compare(text, settings, device, arguments.out / "muon.png"))
    return finish(make_table(first), figure, check(first, again, arguments.quick))


if __name__ == "__main__":
    sys.exit(main())
