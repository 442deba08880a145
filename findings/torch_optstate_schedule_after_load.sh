#!/usr/bin/env bash
# torch-optstate 0.1.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# The wrapper of torch_optstate has the groups of the optimizer inside, and a schedule of torch, which
# writes lr into the wrapper's groups, works. load_state_dict() gives the optimizer inside new groups, and
# the wrapper keeps the old ones. From then on a schedule, a warmup or a change by hand is written where
# no step looks: get_last_lr() and the log fall, and each step is as long as the rate in the file. So a
# run that is resumed trains on at one rate to its end. Nothing warns.
#
# Seen, a schedule that divides lr by 10 after each step, from 0.001: lr of the groups and length of the step
#   a new run: 0.001, 0.0001, 1e-05 and 0.001, 0.0001, 1e-05
#   resumed after a step: 0.001, 0.0001, 1e-05 and 0.0001, 0.0001, 0.0001
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q torch-optstate==0.1.1
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from torch_optstate import wrap


def made():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = wrap(torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
    return weight, optimizer, schedule


def walk(weight, optimizer, schedule, steps):
    rates, lengths = [], []
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = torch.ones(4)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        lengths.append((weight.detach() - before).abs().max().item())
    return [[float(f"{each:.3g}") for each in values] for values in (rates, lengths)]


first = made()
walk(*first, 1)
saved = first[0].detach().clone(), first[1].state_dict(), first[2].state_dict()
resumed = made()
with torch.no_grad():
    resumed[0].copy_(saved[0])
for each, state_dict in zip(resumed[1:], saved[1:]):
    each.load_state_dict(state_dict)

found = [walk(*made(), 3), walk(*resumed, 3)]
for name, (rates, lengths) in zip(("a new run", "resumed after a step"), found):
    print(f"{name}: {', '.join(map(str, rates))} and {', '.join(map(str, lengths))}")
expected = [[[1e-3, 1e-4, 1e-5]] * 2, [[1e-3, 1e-4, 1e-5], [1e-4] * 3]]
sys.exit(0 if found == expected else 1)
PYTHON
