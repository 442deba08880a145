#!/usr/bin/env bash
# pytorch_optimizer 4.1.0 with torch 2.13.0, on a CPU; Python 3.11.
#
# maximize=True should walk like the usual optimizer on the negated loss, as 108 of the 110 optimizers
# of this package that have the option do within rounding. Adan does not. Its second momentum follows
# the difference of two gradients, which is 0 in the first step, because the memory of the last
# gradient starts with the first one. With maximize=True the memory is filled before the sign of the
# gradient is turned, so the first difference is twice the gradient instead of 0, and the moments carry
# it on: the walk is shorter.
#
# Seen, five steps of a parameter of 0 with a gradient of 1 (-1 with maximize=True) and lr=0.01:
#   minimize: -0.01, -0.02, -0.03, -0.04, -0.05
#   maximize: -0.01, -0.0189, -0.0274, -0.0359, -0.0444
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy pytorch_optimizer==4.1.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from pytorch_optimizer import load_optimizer


def walk(name, maximize):
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = load_optimizer(name)([param], lr=0.01, maximize=maximize)
    places = []
    for _ in range(5):
        param.grad = torch.full_like(param, -1.0 if maximize else 1.0)
        optimizer.step()
        places.append(round(param.item(), 4))
    return places


found = {name: [walk(name, maximize) for maximize in (False, True)] for name in ("adan", "adamw")}
for name, (down, up) in found.items():
    print(f"{name}: minimize {down}, maximize {up}")
down, up = found["adan"]
is_like_adamw = found["adamw"] == [down, down]
sys.exit(not (is_like_adamw and up[0] == down[0] and up[-1] > down[-1] + 0.003))
PYTHON
