"""Shows what a step does to each layer of a GPT in bf16, with masters and without.

    python examples/updates.py                                # half a minute on two cores

The GPT of ``char_gpt.py`` is trained twice, by AdamW with a learning rate that falls: with float32
masters, and with none. ``optimizer.inspect()`` tells, between the last backward pass and its step,
how large the update of each layer is beside its weights, and which share of the elements it leaves
as they are. Expect updates of about a thousandth of the weights, most of which bf16 parameters
alone can't store, while the masters take nearly all of them. Prints both tables, writes
``updates.png``, says whether that holds, and returns 1 if it does not.
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
    """Trains the GPT, with float32 masters or without; returns what its last step would do."""
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
    """Returns the mean over the layers' matrices of a share of elements that stay."""
    weights = {name: p for name, p in inspection.params.items() if name.endswith("weight")}
    return sum(getattr(param, of) for param in weights.values()) / len(weights)


def main() -> int:
    """Reads the command line, trains twice, prints both tables, and writes the figure."""
    quick = "a few seconds, judges nothing"
    arguments = read_options(make_parser(__doc__, "updates", quick, seeds=False, device=False))
    settings = QUICK if arguments.quick else replace(Settings(), steps=STEPS, layers=2)
    torch.set_num_threads(1)  # the matrices are too small to gain much from a second
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
