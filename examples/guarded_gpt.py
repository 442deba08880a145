"""Trains a small GPT on partly corrupted data, with and without a guard of the gradient norm.

    python examples/guarded_gpt.py                            # about a minute on one core
    python examples/guarded_gpt.py --seeds 3                  # the figures of docs/watching.md

The model is a smaller version of the GPT of char_gpt.py, with fp16 parameters and a loss scale.
From step 200 on, about one step in seven gets a broken batch: all its targets are character 0, as
if a shard of the data contained zeros. Healthy batches are the same in all runs and have the same
learning rates, so a run that skips all broken batches learns from the same text as a run without
them.

The clean run has no broken batches. The plain run, a run with ``max_grad_norm=1`` and a run with
``norm_guard=NormGuard()`` do. Expect the guard to skip every broken batch and to end with the loss
of the clean run, and the plain run to end 0.2 nats above. Clipping ends within a few hundredths of
the clean run, but you need to know the right limit in advance. Writes ``guarded_gpt.png`` and
prints a table. With the default settings it also checks these claims, and returns 1 if one fails.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import torch
from char_gpt import GPT, LEARNING_RATE, Settings, Text, predict, validate, warm_up_and_cosine
from low_memory import SMALL_GPT
from presentation import (
    differences,
    finish,
    finish_axes,
    make_parser,
    read_options,
    run_all,
    start_figure,
    write_figure,
)
from torch.nn import functional

import amp_ext
from amp_ext.optim import AdamW, NormGuard
from amp_ext.text_table import format_table

# The limits below were chosen before the first run.
FIRST_BROKEN = 200  # healthy steps before the first broken batch can occur
BROKEN_SHARE = 0.15  # fraction of broken batches after FIRST_BROKEN
LARGEST_GAP = 0.02  # nats by which the guarded run may end above the clean run
LEAST_GAIN = 0.1  # nats by which the plain run must end above the guarded run

GUARDED_GPT = replace(SMALL_GPT, validate_every=50)
QUICK = replace(GUARDED_GPT, steps=210, warm_up=20, context=32, width=32)


@dataclass(frozen=True, eq=False)
class Recipe:
    """One of the compared training configurations."""

    name: str
    is_broken: bool  # whether broken batches are inserted between the healthy ones
    has_guard: bool
    max_grad_norm: float  # inf measures the norm without clipping
    colour: str


CLEAN = Recipe("no broken batches", False, False, math.inf, "#000000")
PLAIN = Recipe("broken batches", True, False, math.inf, "#D55E00")
CLIPPED = Recipe("broken, max_grad_norm=1", True, False, 1.0, "#56B4E9")
GUARDED = Recipe("broken, norm_guard", True, True, math.inf, "#009E73")
RECIPES = (CLEAN, PLAIN, CLIPPED, GUARDED)


@dataclass
class Run:
    """Measurements with one seed. Each list holds one value per step, healthy or broken."""

    norms: list[float] = field(default_factory=list)  # unscaled gradient norm, before clipping
    broken: list[bool] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)  # True if the guard skipped the step
    limits: list[float] = field(default_factory=list)  # norm above which the guard skips the step
    # Validation losses in nats per character, by the number of steps without a broken batch so far.
    validations: dict[int, float] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """Validation loss after the last step, in nats per character."""
        return self.validations[max(self.validations)]

    def skips(self, broken: bool) -> list[bool]:
        """Returns for all broken (or all healthy) batches whether the guard skipped the step."""
        return [skip for b, skip in zip(self.broken, self.skipped, strict=True) if b == broken]


def train(recipe: Recipe, text: Text, settings: Settings, seed: int) -> Run:
    """Trains one GPT until it has seen ``settings.steps`` healthy batches.

    The seed determines the initial parameters, the batches, and which steps are broken.
    """
    torch.manual_seed(seed)
    healthy, draw = (torch.Generator().manual_seed(number) for number in (seed, seed + 1_000))
    model = GPT(len(text.alphabet), settings).half()
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=recipe.max_grad_norm)
    if recipe.has_guard:
        optimizer.norm_guard = NormGuard()
    scaler = amp_ext.GradScaler("cpu")
    run, done = Run(), 0
    while done < settings.steps:
        if done % settings.validate_every == 0 and done not in run.validations:
            run.validations[done] = validate(model, text, settings)
        chance = torch.rand((), generator=draw).item() if done >= first_broken(settings) else 1.0
        is_broken = recipe.is_broken and chance < BROKEN_SHARE
        pieces = text.pieces(text.train, settings, draw if is_broken else healthy)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm_up_and_cosine(done, settings)
        optimizer.zero_grad()
        targets = torch.zeros_like(pieces[:, 1:]) if is_broken else pieces[:, 1:]
        logits = predict(model, pieces[:, :-1]).flatten(0, 1)
        scaler.scale(functional.cross_entropy(logits, targets.flatten())).backward()
        guard = optimizer.norm_guard
        run.limits.append(math.inf if guard is None else guard.stats(wait=True).limit)
        scaler.step(optimizer)
        scaler.update()
        run.norms.append(optimizer.grad_norm.item())
        run.broken.append(is_broken)
        run.skipped.append(guard is not None and guard.last_step_skipped(wait=True))
        done += not is_broken
    run.validations[done] = validate(model, text, settings)
    return run


def first_broken(settings: Settings) -> int:
    """Returns the number of healthy steps before the first broken batch can occur."""
    return FIRST_BROKEN * settings.steps // GUARDED_GPT.steps


Results = dict[Recipe, list[Run]]


def draw(results: Results, settings: Settings, path: Path) -> None:
    """Draws the validation losses, and the gradient norms of the first guarded run."""
    figure, (loss_axes, norm_axes) = start_figure(
        "A GPT on text of which a part is broken", 5, ncols=2
    )
    for recipe, runs in results.items():
        steps = list(runs[0].validations)
        losses = [mean(run.validations[step] for run in runs) for step in steps]
        label = f"{recipe.name}: {losses[-1]:.2f}"
        width = 5 if recipe is CLEAN else 2
        loss_axes.plot(steps, losses, color=recipe.colour, lw=width, label=label)
    loss_axes.set(title="Validation loss: nats per character", xlabel="healthy batches")

    run = results[GUARDED][0]
    for is_broken, colour, label in ((False, "#56B4E9", "healthy"), (True, "#D55E00", "broken")):
        chosen = [step for step, broken in enumerate(run.broken) if broken == is_broken]
        label = f"{label}: {sum(run.skips(is_broken))} of {len(chosen)} skipped"
        norm_axes.plot(chosen, [run.norms[step] for step in chosen], ".", color=colour, label=label)
    norm_axes.plot(run.limits, color="#000000", lw=1, label="limit")
    norm_axes.set(title="Norms of the gradients, with the guard", xlabel="step", yscale="log")
    finish_axes(loss_axes, norm_axes)
    norm_axes.legend(frameon=False, loc="center right")
    caption = (
        f"Left: mean of {len(results[CLEAN])} seeds; right: the first. From healthy batch "
        f"{first_broken(settings)} on, {BROKEN_SHARE:.0%} of the steps have zeros as all targets."
    )
    write_figure(figure, caption, path, dpi=110)


def make_table(results: Results) -> str:
    """Formats the results as a table: means over the seeds, and the worst seed."""
    table = [["run", "nats", "above clean", "at most", "broken skipped", "healthy skipped"]]
    for recipe, runs in results.items():
        above = differences(results, recipe, CLEAN, "last_loss")  # gap in nats, for each seed
        row = [recipe.name, f"{mean(run.last_loss for run in runs):.3f}"]
        row += [f"{mean(above):+.3f}", f"{max(above):+.3f}"]
        for is_broken in (True, False):
            skips = [skip for run in runs for skip in run.skips(is_broken)]
            row.append(f"{sum(skips)} of {len(skips)}")
        table.append(row)
    return format_table(table)


def check(results: Results) -> dict[str, bool]:
    """Compares the results of every seed with the limits that the example promises."""
    gap = max(differences(results, GUARDED, CLEAN, "last_loss"))
    gain = min(differences(results, PLAIN, GUARDED, "last_loss"))
    return {
        f"guarded at most {LARGEST_GAP} nats above no broken batches": gap <= LARGEST_GAP,
        f"plain at least {LEAST_GAIN} nats above the guarded": gain >= LEAST_GAIN,
    }


def main() -> int:
    """Reads the command line, trains, and writes the figure and the table."""
    parser = make_parser(__doc__, "guarded_gpt", "a few seconds, judges nothing", device=False)
    arguments = read_options(parser)
    torch.set_num_threads(1)  # a second thread gains little with such small matrices
    settings, text = QUICK if arguments.quick else GUARDED_GPT, Text("cpu")

    results = run_all(
        RECIPES, lambda recipe, seed: train(recipe, text, settings, seed), arguments.seeds
    )
    figure = arguments.out / "guarded_gpt.png"
    draw(results, settings, figure)
    return finish(make_table(results), figure, {} if arguments.quick else check(results))


if __name__ == "__main__":
    sys.exit(main())
