#!/usr/bin/env bash
# grokadamw 0.1.2 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# GrokAdamW keeps the moments of a parameter not in the optimizer's state, but in its group, under the
# parameter itself. state_dict() then has an empty "state", and the group in it holds a whole copy of
# each parameter as a key. load_state_dict() takes that without a word: in the new process the keys are
# tensors of the file, which no parameter of the model is equal to, so each one starts with zero moments
# at step 1, as if nothing had been loaded. The entries of the file stay, unused, and are saved again:
# each resumed run adds another copy of parameters and moments to the next file.
#
# Seen, 20 steps with one gradient, then saved and loaded; one more step with the opposite gradient:
#   went on: -0.00936, resumed: 0.01
#   entries of one parameter in the file: 1, after resuming: 2
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q grokadamw==0.1.2
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import io
import sys

import grokadamw
import torch


def make(value):
    param = torch.nn.Parameter(torch.full((4,), value))
    return param, grokadamw.GrokAdamW([param], lr=0.01, weight_decay=0.0)


def distance(param, optimizer, steps, grad):
    before = param.detach().clone()
    for _ in range(steps):
        param.grad = torch.full((4,), grad)
        optimizer.step()
    return round((param - before)[0].item(), 5)


def entries(optimizer):
    return len(optimizer.state_dict()["param_groups"][0]["state"])


param, optimizer = make(1.0)
distance(param, optimizer, 20, 0.1)
file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
twin, resumed = make(param[0].item())
resumed.load_state_dict(torch.load(file, weights_only=False))
found = (
    distance(param, optimizer, 1, -0.1),
    distance(twin, resumed, 1, -0.1),
    entries(optimizer),
    entries(resumed),
)
print(f"went on: {found[0]}, resumed: {found[1]}")
print(f"entries of one parameter in the file: {found[2]}, after resuming: {found[3]}")
sys.exit(0 if found == (-0.00936, 0.01, 1, 2) else 1)
PYTHON
