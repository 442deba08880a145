"""Shows how much an optimizer step changes each layer of a bf16 GPT, with and without masters.

    python examples/updates.py                                # half a minute on two cores

Trains the GPT of ``char_gpt.py`` twice by AdamW, with and without float32 masters. The weights
before and after the last step give for each layer the size of its update relative to the weights,
and the fraction of elements that the step left unchanged. Expect updates of about a thousandth of
the weights. Most of them are too small to change a bf16 parameter, but nearly all change the
float32 master. Prints both tables, writes ``updates.png``, checks these claims, and returns 1 if
one fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from char_gpt import GPT, LEARNING_RATE, QUICK, Settings, Text, loss_of, warm_up_and_cosine
from presentation import finish, finish_axes, make_parser, read_options, start_figure, write_figure

import amp_ext
from amp_ext.text_table import format_table

STEPS = 300


@dataclass(frozen=True)
class LayerUpdate:
    """The effect of a step on one parameter, whose weight is its master if it has one.

    Attributes:
        norm: Norm of the weight before the step.
        update: Norm of the change of the weight.
        unmoved: Fraction of the parameter's elements that the step did not change.
        unmoved_weight: The same fraction for the weight.
    """

    norm: float
    update: float
    unmoved: float
    unmoved_weight: float


def measure_last(text: Text, settings: Settings, masters: bool) -> dict[str, LayerUpdate]:
    """Trains the GPT with or without float32 masters, and measures its last step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GPT(len(text.alphabet), settings).bfloat16()
    rounding = None if masters else "nearest"
    optimizer = amp_ext.optim.AdamW(
        model.named_parameters(), lr=LEARNING_RATE, master_weights=masters, rounding=rounding
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(warm_up_and_cosine, settings=settings)
    )
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss_of(model, text.pieces(text.train, settings, generator)).backward()
        if step == settings.steps - 1:
            params_before = [param.detach().clone() for param in model.parameters()]
            before = [
                w.to(torch.float64, copy=True) for w in optimizer.master_params(model.parameters())
            ]
        optimizer.step()
        schedule.step()
    after = [w.double() for w in optimizer.master_params(model.parameters())]
    updates = {}
    rows = zip(model.named_parameters(), params_before, before, after, strict=True)
    for (name, param), param_before, was, now in rows:
        unmoved = [(a == b).double().mean().item() for a, b in ((param, param_before), (now, was))]
        updates[name] = LayerUpdate(was.norm().item(), (now - was).norm().item(), *unmoved)
    return updates


def table_of(updates: dict[str, LayerUpdate]) -> str:
    """Returns a table with a row for each parameter."""
    rows = [["", "norm", "update", "ratio", "unmoved", "unmoved weight"]]
    for name, layer in updates.items():
        numbers = [layer.norm, layer.update, layer.update / layer.norm]
        shares = [layer.unmoved, layer.unmoved_weight]
        rows.append([name, *(f"{n:.3g}" for n in numbers), *(f"{share:.1%}" for share in shares)])
    return format_table(rows)


def draw(updates: dict[str, LayerUpdate], path: Path) -> None:
    """Draws the norms of weights and updates, and the fractions of elements that stay."""
    rows, layers = range(len(updates)), updates.values()
    figure, (of_norms, of_shares) = start_figure(
        "What a step without masters does to each layer", 7, ncols=2, sharey=True
    )
    of_norms.plot([layer.norm for layer in layers], rows, "s", color="#777777", label="weight")
    of_norms.plot([layer.update for layer in layers], rows, "o", color="#004D7A", label="update")
    of_norms.set(title="Norms", xscale="log", yticks=rows, yticklabels=updates)
    of_norms.invert_yaxis()
    of_shares.barh(rows, [100 * layer.unmoved for layer in layers], color="#E69F00", height=0.6)
    of_shares.set(title="Elements that stay as they are, %", xlim=(0, 100))
    finish_axes(of_norms, of_shares)
    write_figure(figure, "", path)


def mean_share(updates: dict[str, LayerUpdate], of: str) -> float:
    """Returns the mean of the attribute ``of``, a fraction of elements, over all weights."""
    weights = [layer for name, layer in updates.items() if name.endswith("weight")]
    return sum(getattr(layer, of) for layer in weights) / len(weights)


def main() -> int:
    """Reads the command line, trains twice, prints both tables, and writes the figure."""
    quick = "a few seconds, judges nothing"
    arguments = read_options(make_parser(__doc__, "updates", quick, seeds=False, device=False))
    settings = QUICK if arguments.quick else replace(Settings(), steps=STEPS, layers=2)
    torch.set_num_threads(1)  # a second thread gains little with such small matrices
    text = Text("cpu")
    with_masters, alone = (measure_last(text, settings, masters) for masters in (True, False))
    figure = arguments.out / "updates.png"
    draw(alone, figure)
    table = f"With masters:\n{table_of(with_masters)}\n\nWithout:\n{table_of(alone)}"
    claims = {
        "without masters most elements stay": mean_share(alone, "unmoved") > 0.5,
        "masters take nearly all updates": mean_share(with_masters, "unmoved_weight") < 0.05,
    }
    return finish(table, figure, {} if arguments.quick else claims)


if __name__ == "__main__":
    sys.exit(main())
