#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# The optimizers of torch take lr as a tensor, so that a compiled step or a graph of a GPU follows a schedule.
# With several groups that name no lr of their own, all of them and `defaults` have the same tensor object,
# not one each, and schedules write into tensors in place. A LambdaLR with one function for each group
# gives all groups the rate of the last one, and group["lr"] *= 0.1 for one group changes all. A group
# that is added later starts at the rate of that moment, not at the one of the constructor. With a float
# each does what it says. Nothing warns, and get_last_lr() has the wrong rates as well.
#
# Seen, lr=0.1, two groups with the factors 1 and 0.1: their rates, the way of their first step,
# and the rate of a group that is added after the schedule has set a rate of 0.01
#   float: [0.1, 0.01], [0.1, 0.01], 0.1
#   tensor: [0.01, 0.01], [0.01, 0.01], 0.01
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch


def rates(optimizer):
    return [round(float(group["lr"]), 4) for group in optimizer.param_groups]


def walk(lr):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights[:2]], lr=lr)
    factors = [lambda epoch: 1.0, lambda epoch: 0.1]
    torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    seen = rates(optimizer)
    for weight in weights[:2]:
        weight.grad = torch.ones(2)
    optimizer.step()
    lengths = [round(-weight.detach()[0].item(), 4) for weight in weights[:2]]
    optimizer.add_param_group({"params": weights[2:]})
    return seen, lengths, rates(optimizer)[2]


found = [walk(0.1), walk(torch.tensor(0.1))]
for name, values in zip(("float", "tensor"), found):
    print(f"{name}: {', '.join(map(str, values))}")
expected = [([0.1, 0.01], [0.1, 0.01], 0.1), ([0.01, 0.01], [0.01, 0.01], 0.01)]
sys.exit(0 if found == expected else 1)
PYTHON
