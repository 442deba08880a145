#!/usr/bin/env bash
# lion-pytorch 0.2.5 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# With decoupled_weight_decay=True, Lion divides weight_decay by the learning rate at the start, so that the
# decay follows a schedule and does not depend on the rate that was chosen. The rate at the start is the
# argument lr of the constructor for all groups, also for those that have a rate of their own. A group with
# ten times that rate decays ten times as much. If each group names its rate and the argument is left out, it
# is 1e-4: a group with lr=0.01 and weight_decay=0.1 then decays by 10 instead of 0.1, and its weights
# are multiplied by -9 in each step. No error is raised. Without the option lr * weight_decay is right.
#
# Seen, weights of 1 after a step with a gradient of 0 and weight_decay=0.1, groups with lr=1e-4, 1e-3 and 0.01:
#   decoupled_weight_decay=False: 0.99999, 0.9999, 0.999
#   decoupled_weight_decay=True: 0.9, 0.0, -9.0
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q lion-pytorch==0.2.5
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from lion_pytorch import Lion


def stepped(**options):
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, (1e-4, 1e-3, 0.01))]
    optimizer = Lion(groups, weight_decay=0.1, **options)
    for weight in weights:
        weight.grad = torch.zeros(4)
    optimizer.step()
    return [round(weight.detach()[0].item(), 5) for weight in weights]


found = {choice: stepped(decoupled_weight_decay=choice) for choice in (False, True)}
for choice, values in found.items():
    print(f"decoupled_weight_decay={choice}: {', '.join(map(str, values))}")
sys.exit(0 if found[False][2] > 0.99 and found[True][0] == 0.9 and found[True][2] < -8 else 1)
PYTHON
