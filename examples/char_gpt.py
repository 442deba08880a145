"""Trains a small GPT on characters, with fp16 parameters, and resumes it from a checkpoint.

    python examples/char_gpt.py                               # about a minute on two cores

The text ships with Python: the topics that ``help()`` shows. The model writes similar text at the
end. Parameters and gradients are fp16; amp_ext.optim.AdamW keeps fp32 masters and clips by norm
inside its step, the trainer accumulates and scales, and the learning rate warms up and falls along
a cosine. A GPU takes the matrix products in fp16, too; a CPU takes them in fp32, since without fp16
arithmetic they would last 10 times as long. Its gradients are rounded to fp16 and overflow there
all the same.

The loss scale starts too high on purpose. Expect eight or so overflows, whose steps are skipped,
then a scale that looks for its limit, and a validation loss near 2.1 nats per character. In the
middle of the run everything goes into a checkpoint. A second set of objects reads it and repeats
the second half: every loss, scale, parameter and state must come out the same, bit for bit, or the
program returns 1. Writes ``char_gpt.png`` and ``checkpoint.pt`` and prints what it measured and a
sample.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from presentation import finish, finish_axes, make_parser, read_options, start_figure, write_figure
from torch import Tensor, nn
from torch.nn import functional

import amp_ext
from amp_ext.program import format_table, run_program
from amp_ext.training import MixedPrecisionConfig, MixedPrecisionTrainer


@dataclass(frozen=True)
class Settings:
    """How large the model is and how long it trains."""

    steps: int = 600
    warm_up: int = 60  # steps until the learning rate is at its peak
    accumulation: int = 2  # backward passes for each step
    rows: int = 8  # pieces of text in each of them
    context: int = 64  # characters of a piece
    width: int = 96
    layers: int = 3
    heads: int = 4
    validate_every: int = 50  # steps
    written: int = 600  # characters that the trained model writes


QUICK = Settings(steps=40, warm_up=4, rows=8, context=32, width=32, layers=2, written=40)
LEARNING_RATE = 2e-3  # at its peak
MAX_GRAD_NORM = 1.0
INITIAL_SCALE = 2.0**24  # too high: the default is 2**16
GROWTH_INTERVAL = 50  # good steps before the scale doubles: not 2000, to show its search
COLOURS = {"train": "#56B4E9", "validation": "#004D7A", "resumed": "#D55E00", "other": "#000000"}


class Block(nn.Module):
    """Attention to the characters before, then two layers on each character by itself."""

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
        """Adds both to ``x``, ``[rows, context, width]``."""
        rows, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [rows, heads, context, width / heads]
        heard = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(heard.transpose(1, 2).reshape(x.shape))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next character from those before.

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
        """Returns the logits ``[rows, context, characters]`` of the characters that follow."""
        position = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.character(text) + self.position(position)))


def predict(model: GPT, text: Tensor) -> Tensor:
    """Calls the model in mixed precision; the logits are float32."""
    if text.is_cuda:
        with torch.autocast("cuda", torch.float16):
            return model(text).float()
    widened = {name: param.float() for name, param in model.named_parameters()}
    return torch.func.functional_call(model, widened, (text,))


def loss_of(model: GPT, pieces: Tensor) -> Tensor:
    """Returns the mean cross entropy of ``pieces``, ``[rows, context + 1]``, in nats."""
    logits = predict(model, pieces[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


class Loss(nn.Module):
    """Computes what is trained on: the loss of a GPT."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, pieces: Tensor) -> Tensor:
        """Returns the loss of ``pieces``, ``[rows, context + 1]``."""
        return loss_of(self.model, pieces)


class Text:
    """The topics as numbers: every tenth one to validate, the others to train on."""

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
        """Picks pieces of a part at random: ``[rows, context + 1]``."""
        length = settings.context + 1
        starts = torch.randint(len(part) - length, (settings.rows, 1), generator=generator)
        return part[(starts + torch.arange(length)).to(part.device)]

    def read(self, numbers: Tensor) -> str:
        """Turns numbers back into text."""
        return "".join(self.alphabet[number] for number in numbers.tolist())


@torch.no_grad()
def validate(model: GPT, text: Text, settings: Settings) -> float:
    """Returns the mean loss of the same unseen pieces each time, in nats."""
    generator = torch.Generator().manual_seed(0)
    pieces = [text.pieces(text.validation, settings, generator) for _ in range(32)]
    return torch.stack([loss_of(model, piece) for piece in pieces]).mean().item()


@dataclass
class Curves:
    """What a run measured; the lists hold a number for each of its steps."""

    losses: list[float] = field(default_factory=list)  # nats per character
    norms: list[float] = field(default_factory=list)  # of the unscaled gradients, before clipping
    rates: list[float] = field(default_factory=list)  # learning rate
    scales: list[float] = field(default_factory=list)  # loss scale
    skipped: list[bool] = field(default_factory=list)
    # Nats per character, by the number of steps before.
    validations: dict[int, float] = field(default_factory=dict)


class Training:
    """Everything that a checkpoint holds, and the loop."""

    def __init__(self, text: Text, settings: Settings, seed: int, device: str) -> None:
        self.text, self.settings, self.curves = text, settings, Curves()
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)  # picks the pieces
        self.model = GPT(len(text.alphabet), settings).to(device, torch.float16)
        self.optimizer = amp_ext.optim.AdamW(self.model.named_parameters(), lr=LEARNING_RATE)
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
        """Lists the parameters, and their masters, moments and step counters."""
        params = list(self.model.parameters())
        states = [self.optimizer.state[param] for param in params]
        return params + [state[name] for state in states for name in sorted(state)]

    def save(self, path: Path) -> None:
        """Writes a checkpoint; the schedule counts every step, so it is not the trainer's."""
        extra = {"schedule": self.schedule.state_dict(), "generator": self.generator.get_state()}
        self.trainer.save(path, extra)

    def load(self, path: Path) -> None:
        """Goes on from a checkpoint."""
        extra = self.trainer.load(path)
        self.schedule.load_state_dict(extra["schedule"])
        self.generator.set_state(extra["generator"])

    def run(self, steps: int) -> None:
        """Trains for some steps. Only a validation reads results, and so waits for a GPU."""
        settings, curves, part = self.settings, self.curves, self.text.train
        losses, norms = [], []
        for step in range(self.schedule.last_epoch, self.schedule.last_epoch + steps):
            if step % settings.validate_every == 0:
                curves.validations[step] = loss = validate(self.model, self.text, self.settings)
                print(f"{step} steps: {loss:.3f} nats per character", flush=True)
            curves.rates.append(self.optimizer.param_groups[0]["lr"])
            step_loss = torch.zeros((), device=part.device)
            for _ in range(settings.accumulation):
                pieces = self.text.pieces(part, settings, self.generator)
                # The last of them steps: clips by norm, and changes nothing after an overflow.
                metrics = self.trainer.train_step(pieces)
                step_loss += metrics.loss / settings.accumulation
            self.schedule.step()
            losses.append(step_loss)
            norms.append(metrics.grad_norm)
        curves.validations[self.schedule.last_epoch] = validate(
            self.model, self.text, self.settings
        )
        curves.losses += torch.stack(losses).tolist()
        curves.norms += torch.stack(norms).tolist()
        history = self.scaler.history(wait=True)
        curves.scales += history.scales[-steps:]
        curves.skipped += history.skipped[-steps:]

    @torch.no_grad()
    def write(self, beginning: str, length: int, seed: int) -> str:
        """Lets the model continue a text, one character after the other."""
        generator = torch.Generator(self.text.train.device).manual_seed(seed)
        alphabet = self.text.alphabet
        numbers = [alphabet.index(character) for character in beginning]
        text = torch.tensor([numbers], device=self.text.train.device)
        for _ in range(length):
            logits = predict(self.model, text[:, -self.settings.context :])[:, -1]
            likely = (logits / 0.7).softmax(dim=-1)  # below 1, rare characters become rarer
            text = torch.cat([text, likely.multinomial(1, generator=generator)], dim=1)
        return self.text.read(text[0])


def warm_up_and_cosine(step: int, settings: Settings) -> float:
    """Returns the learning rate of a step as a share of its peak."""
    if step < settings.warm_up:
        return (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / (settings.steps - settings.warm_up)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2


def compare(first: Training, again: Training) -> dict[str, bool]:
    """Compares the first run with the one that resumed in the middle of it, bit for bit."""
    curves, resumed = first.curves, again.curves
    half = len(resumed.losses)
    tensors = zip(first.tensors(), again.tensors(), strict=True)
    return {
        "losses resumed bit for bit": curves.losses[-half:] == resumed.losses,
        "scales resumed bit for bit": curves.scales[-half:] == resumed.scales,
        "parameters, masters and moments resumed bit for bit": all(
            torch.equal(bytes_of(one), bytes_of(other)) for one, other in tensors
        ),
    }


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns what is stored: 0 and -0 differ, and NaN equals itself."""
    return tensor.detach().flatten().view(torch.uint8)


def frequency_loss(text: Text) -> float:
    """Returns the validation loss of a guess by the frequencies of single characters, in nats."""
    seen = torch.bincount(text.train, minlength=len(text.alphabet)).double() + 1
    return -(seen / seen.sum()).log()[text.validation].mean().item()


def draw(
    curves: Curves, resumed: Curves, settings: Settings, guess: float, written: str, path: Path
) -> None:
    """Draws loss, loss scale, norm of the gradients and learning rate, and shows the sample."""
    middle = settings.steps - len(resumed.losses)
    skipped = [step for step, skip in enumerate(curves.skipped) if skip]
    first, last = curves.validations[0], curves.validations[settings.steps]
    title = f"validation loss {first:.2f} → {last:.2f}, {len(skipped)} skipped steps"
    figure = start_figure(f"A GPT with fp16 parameters on Python's help: {title}", 8)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.2, 1))
    loss_axes, text_axes = figure.add_subplot(grid[0, :2]), figure.add_subplot(grid[0, 2])
    scale_axes, norm_axes, rate_axes = (figure.add_subplot(grid[1, c]) for c in range(3))

    loss_axes.plot(curves.losses, color=COLOURS["train"], lw=3, label="training")
    again = range(middle, settings.steps)
    loss_axes.plot(again, resumed.losses, color=COLOURS["resumed"], lw=1, label="training, resumed")
    for part, colour, size in ((curves, "validation", 8), (resumed, "resumed", 4)):
        label = "validation" if part is curves else "validation, resumed"
        steps, losses = part.validations.keys(), part.validations.values()
        loss_axes.plot(steps, losses, "o", color=COLOURS[colour], ms=size, label=label)
    loss_axes.axhline(guess, color=COLOURS["other"], ls=":", label="guessing by frequency")
    loss_axes.axvline(middle, color=COLOURS["other"], ls="--", lw=1, label="checkpoint")
    loss_axes.set(title="Loss: nats per character", xlabel="step")

    scale_axes.plot(curves.scales, color=COLOURS["train"], lw=3, drawstyle="steps-post")
    scale_axes.plot(
        again,
        resumed.scales,
        color=COLOURS["resumed"],
        lw=1,
        drawstyle="steps-post",
        label="resumed",
    )
    marks = [curves.scales[step] for step in skipped]
    scale_axes.plot(skipped, marks, "v", color=COLOURS["validation"], ms=7, label="skipped step")
    scale_axes.set(title="Loss scale", xlabel="step")
    scale_axes.set_yscale("log", base=2)

    norms = [norm if math.isfinite(norm) else math.nan for norm in curves.norms]
    norm_axes.plot(norms, color=COLOURS["train"], lw=2, label="before clipping")
    norm_axes.axhline(MAX_GRAD_NORM, color=COLOURS["other"], ls="--", lw=1, label="max_grad_norm")
    norm_axes.set(title="Norm of the unscaled gradients", xlabel="step", yscale="log")
    rate_axes.plot(curves.rates, color=COLOURS["train"], lw=2)
    rate_axes.set(title="Learning rate", xlabel="step")
    finish_axes(loss_axes, scale_axes, norm_axes, rate_axes)

    lines = [part for line in written.splitlines() for part in textwrap.wrap(line, 44) or [""]]
    text_axes.set_title("What it writes at the end")
    text_axes.text(
        0, 1, "\n".join(lines[:24]), va="top", family="monospace", fontsize=8.5, parse_math=False
    )
    text_axes.set_axis_off()
    caption = (
        f"{settings.layers} layers of width {settings.width}, {settings.steps} steps of "
        f"{settings.accumulation} × {settings.rows} pieces of {settings.context} characters, AdamW "
        "with fp32 masters; parameters and gradients are fp16. Thin lines and small dots: new "
        f"objects that resumed from the checkpoint after {middle} steps. The scale starts at "
        f"2^{math.log2(INITIAL_SCALE):.0f} (default: 2^16) and doubles after {GROWTH_INTERVAL} "
        "good steps (default: 2000), to show its search and the steps it skips."
    )
    write_figure(figure, caption, path)


def make_table(training: Training, guess: float) -> str:
    """Says what was measured."""
    curves = training.curves
    first, last = curves.validations[0], curves.validations[len(curves.losses)]
    scales = [f"2^{math.log2(scale):.0f}" for scale in (curves.scales[0], curves.scales[-1])]
    clipped = sum(norm > MAX_GRAD_NORM for norm in curves.norms if math.isfinite(norm))
    rows = [
        ["what", "measured"],
        ["validation loss, nats", f"{first:.2f} → {last:.2f}"],
        ["of a guess by frequency", f"{guess:.2f}"],
        ["loss scale", " → ".join(scales)],
        ["skipped steps", f"{sum(curves.skipped)} of {len(curves.skipped)}"],
        ["last gradient to overflow", f"{training.scaler.stats(wait=True).last_nonfinite}"],
        ["clipped steps", f"{clipped} of {len(curves.norms)}"],
    ]
    return format_table(rows, left=(0, 1))


def check(curves: Curves, guess: float) -> dict[str, bool]:
    """Compares what was measured with what the example is to show."""
    steps = len(curves.losses)
    return {
        "skipped from 4 steps to a tenth": 4 <= sum(curves.skipped) <= steps / 10,
        "1 nat better than guessing by frequency": curves.validations[steps] <= guess - 1,
    }


def main() -> int:
    """Reads the command line, trains twice, and writes checkpoint and figure."""
    quick = "a few seconds, judges only the resumption"
    arguments = read_options(make_parser(__doc__, "char_gpt", quick, seeds=False))
    device = arguments.device
    settings = QUICK if arguments.quick else Settings()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the next line needs on CUDA
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)  # of the CPU: the matrices are too small to gain much from a second

    checkpoint, figure = arguments.out / "checkpoint.pt", arguments.out / "char_gpt.png"
    text = Text(device)
    first = Training(text, settings, 0, device)
    size = sum(p.numel() for p in first.model.parameters())
    print(f"{size:,} parameters; {len(text.train):,} characters to train on")
    half = settings.steps // 2
    first.run(settings.steps - half)
    first.save(checkpoint)
    first.run(half)
    print(f"Once more from {checkpoint}, by new objects")
    again = Training(text, settings, 1, device)  # all others, until `load`
    again.load(checkpoint)
    again.run(half)

    written = again.write("The ", settings.written, seed=0)
    guess = frequency_loss(text)
    draw(first.curves, again.curves, settings, guess, written, figure)
    table = f"{make_table(first, guess)}\n\n{written}"
    claims = compare(first, again)
    return finish(table, figure, claims if arguments.quick else claims | check(first.curves, guess))


if __name__ == "__main__":
    sys.exit(run_program(main))
