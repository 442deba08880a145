#!/usr/bin/env bash
# madgrad 1.2 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# A group with lr=0 is frozen in the optimizers of torch: its parameters stay, bit by bit. MADGRAD adds eps, 1e-6
# unless given, to the rate of each group. And its steps grow: each gradient is weighted by the root of the
# number of the step, and the step goes with the power 2/3 of their sum. So a frozen group moves by a
# hundredth of the way of one with lr=0.001, through the whole run: visible after 1,000 steps. And a
# group whose rate a schedule brings to 0 still moves by a few of its usual steps: the parameter is an
# average that follows a point ahead of it. MirrorMADGRAD adds no eps and does the second only.
#
# Seen, weights of 1 with a gradient of 1, way after 1,000 and 10,000 steps with lr=0 and with lr=0.001
#   AdamW: 0.0, 0.0 and 1.005, 9.6108
#   MADGRAD: 0.0757, 0.7625 and 7.5715, 76.3002
#   MirrorMADGRAD: 0.0, 0.0 and 1.1326, 11.4346
# Seen, way of five steps with lr=0 after 1,000 with lr=0.001:
#   AdamW: 0.0
#   MADGRAD: 0.0282
#   MirrorMADGRAD: 0.0042
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q madgrad==1.2
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from madgrad import MADGRAD, MirrorMADGRAD


def step(optimizer, weight):
    weight.grad = torch.ones(4)
    optimizer.step()
    return weight.detach()[0].item()


def made(kind, lr):
    weight = torch.nn.Parameter(torch.ones(4))
    return kind([{"params": [weight], "lr": lr}], lr=1e-3), weight


def ways(kind, lr):
    pair = made(kind, lr)
    values = [1 - step(*pair) for _ in range(10_000)]
    return [round(values[steps - 1], 4) for steps in (1_000, 10_000)]


def after_schedule(kind):
    optimizer, weight = made(kind, 1e-3)
    for _ in range(1_000):
        start = step(optimizer, weight)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(5):
        end = step(optimizer, weight)
    return round(start - end, 4)


kinds = torch.optim.AdamW, MADGRAD, MirrorMADGRAD
frozen = [ways(kind, 0.0) for kind in kinds]
for kind, values in zip(kinds, frozen):
    print(f"{kind.__name__}: {', '.join(map(str, values))} and {', '.join(map(str, ways(kind, 1e-3)))}")
later = [after_schedule(kind) for kind in kinds]
for kind, value in zip(kinds, later):
    print(f"{kind.__name__}: {value}")
same = frozen[0] == frozen[2] == [0.0, 0.0] and frozen[1][1] > 0.5
sys.exit(0 if same and later[0] == 0 and min(later[1:]) > 0.001 else 1)
PYTHON
