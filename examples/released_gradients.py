"""Trains a character GPT with released gradients, and draws the memory over one iteration.

    python examples/released_gradients.py                     # a minute on one core

Trains the GPT of ``char_gpt.py``, wider, with bf16 parameters by AdamW: as usual, with
``release_gradients``, and with ``release_gradients``, split8 masters and 8-bit states. In the last
iteration, a hook of each parameter counts the bytes of all parameters, masters, gradients and
states. Expect 16, 14 and 5 bytes a parameter and one gradient, as ``amp_ext.memory`` calculates.
The first two runs must have the same losses bit for bit, and the third must end within 0.05 nats.
Writes ``released_gradients.png``, prints a table, and returns 1 if one of these claims fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from char_gpt import GPT, QUICK, Settings, Text, loss_of, validate
from presentation import finish, finish_axes, make_parser, read_options, start_figure, write_figure
from torch import Tensor

import amp_ext
from amp_ext.memory import training_memory
from amp_ext.text_table import format_table

WIDE = replace(Settings(), steps=400, rows=4, width=256)
LARGEST_GAP = 0.05  # nats by which the run with the least memory may end above the others
WINDOW = 10  # steps over which the curves of the losses are averaged


@dataclass(frozen=True)
class Recipe:
    """One of the compared training configurations."""

    name: str
    colour: str
    configuration: str  # name of a row of amp_ext.memory
    released: bool = True


PLAIN = Recipe("as usual", "#56B4E9", "16-bit + masters, fp32 states", released=False)
RELEASED = Recipe("released gradients", "#D55E00", "16-bit + masters, fp32 states")
LEAST = Recipe(
    "released, split8 masters, 8-bit states", "#004D7A", "16-bit + split8 masters, 8bit states"
)


@dataclass
class Run:
    """Measurements of a run."""

    calculated: int  # bytes, by amp_ext.memory
    parameters: int  # number of elements
    losses: list[float] = field(default_factory=list)  # nats per character, of each step
    # Bytes at the beginning of the last backward pass, in each hook, at the end of the pass, and
    # after optimizer.step() and zero_grad().
    live: list[int] = field(default_factory=list)
    last_loss: float = 0.0  # validation loss at the end, in nats


def live_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of parameters, masters, gradients and states, without step counters."""
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param].items()
            tensors += [param, *(tensor for name, tensor in state if name != "step")]
            tensors += [] if param.grad is None else [param.grad]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train(recipe: Recipe, text: Text, settings: Settings) -> Run:
    """Trains the GPT once, and counts the bytes of the last iteration."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GPT(len(text.alphabet), settings).bfloat16()
    rows = training_memory(model, released=recipe.released)
    (usage,) = [row for row in rows if row.configuration.name == recipe.configuration]
    options = {
        name: getattr(usage.configuration, name) for name in ("master_weights", "state_dtype")
    }
    optimizer = amp_ext.optim.AdamW(model.named_parameters(), lr=1e-3, **options)
    run = Run(usage.total, usage.parameter_count)
    is_last = False

    def count(_: Tensor | None = None) -> None:
        if is_last:
            run.live.append(live_bytes(optimizer))

    for param in model.parameters():  # before the hooks that free the gradients
        param.register_post_accumulate_grad_hook(count)
    if recipe.released:
        amp_ext.optim.release_gradients(optimizer)
    for step in range(settings.steps):
        is_last = step == settings.steps - 1
        loss = loss_of(model, text.pieces(text.train, settings, generator))
        count()
        loss.backward()
        count()
        optimizer.step()
        count()
        optimizer.zero_grad()
        count()
        run.losses.append(loss.item())
    run.last_loss = validate(model, text, settings)
    return run


def draw(runs: dict[Recipe, Run], settings: Settings, path: Path) -> None:
    """Draws the bytes over the last iteration, and the training losses."""
    title = "Released gradients: each parameter is stepped inside backward()"
    figure, (memory_axes, loss_axes) = start_figure(title, 5, ncols=2)
    for width, (recipe, run) in zip((6, 3, 1.2), runs.items(), strict=True):
        sizes = [size / 2**20 for size in run.live]
        label = f"{recipe.name}: {max(run.live) / run.parameters:.2f} bytes a parameter"
        memory_axes.plot(sizes, color=recipe.colour, lw=width, label=label)
        label = f"{recipe.name}: {run.last_loss:.2f}"
        steps = range(WINDOW // 2, settings.steps, WINDOW)
        losses = torch.tensor(run.losses).unfold(0, WINDOW, WINDOW).mean(1)
        loss_axes.plot(steps, losses, color=recipe.colour, lw=width, label=label)
    memory_axes.set(
        title="Parameters, masters, gradients and states: MiB", xlabel="hooks of backward()"
    )
    memory_axes.set_ylim(bottom=0)
    loss_axes.set(title="Training loss: nats per character. Legend: validation", xlabel="step")
    finish_axes(memory_axes, loss_axes)
    caption = (
        f"{runs[PLAIN].parameters:,} bf16 parameters. Left: the last iteration; each hook counts "
        "before it frees the gradient; activations are not counted. Right: means of "
        f"{WINDOW} steps; the losses of the first two runs are equal."
    )
    write_figure(figure, caption, path, dpi=110)


def make_table(runs: dict[Recipe, Run]) -> str:
    """Formats the measurements as a table for the terminal."""
    table = [["run", "MiB", "bytes a parameter", "calculated", "validation loss"]]
    for recipe, run in runs.items():
        live, each = max(run.live), 1 / run.parameters
        sizes = [f"{live / 2**20:.1f}", f"{live * each:.3f}", f"{run.calculated * each:.3f}"]
        table.append([recipe.name, *sizes, f"{run.last_loss:.3f}"])
    return format_table(table)


def main() -> int:
    """Reads the command line, trains three times, and writes the figure and the table."""
    quick = "a few seconds, judges only memory and bits"
    parser = make_parser(__doc__, "released_gradients", quick, seeds=False, device=False)
    arguments = read_options(parser)
    settings = QUICK if arguments.quick else WIDE
    torch.set_num_threads(1)  # gives the same bits on all machines, and leaves room for others
    text = Text("cpu")
    runs = {}
    for recipe in (PLAIN, RELEASED, LEAST):
        print(recipe.name, flush=True)
        runs[recipe] = train(recipe, text, settings)
    figure = arguments.out / "released_gradients.png"
    draw(runs, settings, figure)
    are_same = runs[PLAIN].losses == runs[RELEASED].losses
    claims = {
        "released gradients give the same losses bit for bit": are_same,
        "memory is as calculated": all(max(run.live) == run.calculated for run in runs.values()),
    }
    if not arguments.quick:
        gap = runs[LEAST].last_loss - runs[PLAIN].last_loss
        claims[f"the least memory ends at most {LARGEST_GAP} nats above"] = gap <= LARGEST_GAP
    return finish(make_table(runs), figure, claims)


if __name__ == "__main__":
    sys.exit(main())
