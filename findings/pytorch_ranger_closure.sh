#!/usr/bin/env bash
# pytorch-ranger 0.1.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# step(closure) of an optimizer calls the closure, which computes the loss and the gradients, and returns the
# loss. Ranger and RangerVA of this package take the argument and never call it; RangerQH does. A
# trainer that hands over its forward and backward pass as a closure then trains nothing: the first steps see no
# gradients, step() returns None, and no error is raised. If gradients are there from something else,
# all steps are made with the same ones.
#
# Seen, three steps with a closure from a weight of 1: calls, what the last step returned, and the weight
#   Adam: 3, 1.9208, 0.97
#   Ranger: 0, None, 1.0
#   RangerVA: 0, None, 1.0
#   RangerQH: 3, 1.9209, 0.9701
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q pytorch-ranger==0.1.1
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import pytorch_ranger
import torch


def walk(kind):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.01)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
    loss = loss if loss is None else round(loss.item(), 4)
    return len(calls), loss, round(weight.detach()[0].item(), 4)


kinds = [torch.optim.Adam] + [getattr(pytorch_ranger, name) for name in ("Ranger", "RangerVA", "RangerQH")]
found = [walk(kind) for kind in kinds]
for kind, values in zip(kinds, found):
    print(f"{kind.__name__}: {', '.join(map(str, values))}")
still = (0, None, 1.0)
sys.exit(0 if found[1:3] == [still, still] and found[0][0] == found[3][0] == 3 and found[3][2] < 1 else 1)
PYTHON
