#!/usr/bin/env bash
# ranger-adabelief 0.1.0 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Three things in step() of RangerAdaBelief that its signature and options do not tell. It takes a closure, and
# never calls it: where closures compute the gradients, as in many trainers, nothing is trained, and
# step() returns None. It subtracts from the gradient of a matrix the mean of each row (use_gc, on by default),
# which leaves 0 of a matrix with one column: the weight of a Linear with one input stays at its first
# values. And weight_decay, "decoupled", is multiplied by the correction for the start of the first moment,
# and in the first steps it is added into that moment: the first step decays 20 times as much as AdamW's.
#
# Seen, calls of the closure in a step:
#   AdamW: 1
#   RangerAdaBelief: 0
# Seen, Linear(1, 4) after 20 steps towards 3 * x + 1 with lr=0.1: way of the weight, of the bias
#   AdamW: 1.89, 1.00
#   RangerAdaBelief: 0.00, 0.16
# Seen, a weight of 1 with a gradient of 0, lr=0.001 and weight_decay=0.1: 1 minus the weight
#   AdamW: 0.0001 after 1 step, 0.0006 after 6
#   RangerAdaBelief: 0.002 after 1 step, 0.0051 after 6
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q ranger-adabelief==0.1.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import contextlib
import io
import sys

import torch
from ranger_adabelief import RangerAdaBelief


def made(kind, parameters, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        return kind(parameters, weight_decay=options.pop("weight_decay", 0.0), **options)


def calls(kind):
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    count = []
    made(kind, [weight], lr=0.1).step(lambda: count.append(1))
    return len(count)


def line(kind):
    torch.manual_seed(0)
    linear = torch.nn.Linear(1, 4)
    start = [each.detach().clone() for each in linear.parameters()]
    optimizer = made(kind, linear.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, 16).reshape(16, 1)
    for _ in range(20):
        optimizer.zero_grad()
        (linear(inputs) - 3 * inputs - 1).square().mean().backward()
        optimizer.step()
    return [(now.detach() - then).abs().mean().item() for now, then in zip(linear.parameters(), start)]


def decayed(kind):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = made(kind, [weight], lr=0.001, weight_decay=0.1)
    for step in range(6):
        weight.grad = torch.zeros(4)
        optimizer.step()
        if step in (0, 5):
            yield 1 - weight.detach()[0].item()


kinds = torch.optim.AdamW, RangerAdaBelief
found = {kind: (calls(kind), line(kind), list(decayed(kind))) for kind in kinds}
for kind, (count, _, _) in found.items():
    print(f"{kind.__name__}: {count}")
for kind, (_, (weight, bias), _) in found.items():
    print(f"{kind.__name__}: {weight:.2f}, {bias:.2f}")
for kind, (_, _, (first, sixth)) in found.items():
    print(f"{kind.__name__}: {first:.2g} after 1 step, {sixth:.2g} after 6")
torchs, ranger = found.values()
same = torchs[0] == 1 and ranger[0] == 0 and ranger[1][0] == 0 and ranger[1][1] > 0.1
sys.exit(0 if same and torchs[1][0] > 0.1 and ranger[2][0] > 10 * torchs[2][0] else 1)
PYTHON
