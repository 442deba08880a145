"""Shows how much an optimizer step changes each layer of a bf16 GPT, with and without masters.

    python examples/updates.py                                # half a minute on two cores

Trains the GPT of ``char_gpt.py`` twice by AdamW, with and without float32 masters. After the last
backward pass, ``optimizer.inspect()`` reports for each layer the size of the coming update relative
to the weights, and the fraction of elements that it would leave unchanged. Expect updates of about
a thousandth of the weights. Most of them are too small to change a bf16 parameter, but nearly all
change the float32 master. Prints both tables, writes ``updates.png``, checks these claims, and
returns 1 if one fails.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
from char_gpt import GPT, LEARNING_RATE, QUICK, Settings, Text, loss_of, warm_up_and_cosine
from presentation import finish, make_parser, read_options

import amp_ext
from amp_ext.program import run_program

STEPS = 300


def inspect_last(text: Text, settings: Settings, masters: bool) -> amp_ext.optim.Inspection:
    """Trains the GPT with or without float32 masters; returns the inspection of its last step."""
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
        if step < settings.steps - 1:
            optimizer.step()
            schedule.step()
    return optimizer.inspect()


def mean_share(inspection: amp_ext.optim.Inspection, of: str) -> float:
    """Returns the mean of the attribute ``of``, a fraction of elements, over all weights."""
    weights = {name: p for name, p in inspection.params.items() if name.endswith("weight")}
    return sum(getattr(param, of) for param in weights.values()) / len(weights)


def main() -> int:
    """Reads the command line, trains twice, prints both tables, and writes the figure."""
    quick = "a few seconds, judges nothing"
    arguments = read_options(make_parser(__doc__, "updates", quick, seeds=False, device=False))
    settings = QUICK if arguments.quick else replace(Settings(), steps=STEPS, layers=2)
    torch.set_num_threads(1)  # a second thread gains little with such small matrices
    text = Text("cpu")
    with_masters, alone = (inspect_last(text, settings, masters) for masters in (True, False))
    figure = arguments.out / "updates.png"
    alone.plot(figure)
    table = f"With masters:\n{with_masters}\n\nWithout:\n{alone}"
    claims = {
        "without masters most elements stay": mean_share(alone, "unmoved") > 0.5,
        "masters take nearly all updates": mean_share(with_masters, "unmoved_master") < 0.05,
    }
    return finish(table, figure, {} if arguments.quick else claims)


if __name__ == "__main__":
    sys.exit(run_program(main))
