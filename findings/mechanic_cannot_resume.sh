#!/usr/bin/env bash
# mechanic-pytorch 0.0.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# mechanize() makes a class of an optimizer that finds the learning rate by itself, and is meant to be used
# like the class itself. What it has found out, and the weights at the start of the training, it keeps in
# the state under a name, in a dict whose keys are the parameters themselves. state_dict() replaces only the
# keys of the outer dict, so a checkpoint has a copy of each parameter as a key, and after a load no
# parameter of the new process is equal to one of them. The first step after load_state_dict() raises a KeyError,
# which prints all values of a parameter, after it has already moved the parameters: the base optimizer's step
# comes first, with lr=1. Without load_state_dict() the run starts with a scale of nearly 0 again.
#
# Seen, AdamW with lr=1.0, 20 steps, then saved and loaded:
#   keys of the saved state that are parameters: 1
#   going on: a step of the size 1.4e-05
#   loaded: KeyError, after a step of the size 0.65
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q mechanic-pytorch==0.0.1
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import io
import sys

import torch
from mechanic_pytorch import mechanize


def made(value):
    weight = torch.nn.Parameter(torch.full((8,), value))
    return weight, mechanize(torch.optim.AdamW, s_init=1e-6)([weight], lr=1.0, weight_decay=0.0)


def step(weight, optimizer, seed):
    before = weight.detach().clone()
    weight.grad = torch.randn(8, generator=torch.Generator().manual_seed(seed)) - 0.2
    error = ""
    try:
        optimizer.step()
    except KeyError:
        error = "KeyError, after "
    return error, (weight.detach() - before).abs().max().item()


weight, optimizer = made(0.0)
for seed in range(20):
    step(weight, optimizer, seed)
file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
saved = torch.load(file, weights_only=False)
keys = sum(isinstance(key, torch.Tensor) for key in saved["state"]["_mechanic"])
print("keys of the saved state that are parameters:", keys)
resumed, loaded = made(0.0)
resumed.data.copy_(weight.detach())
loaded.load_state_dict(saved)
found = []
for name, pair in (("going on", (weight, optimizer)), ("loaded", (resumed, loaded))):
    error, length = step(*pair, 20)
    found.append((error, length))
    print(f"{name}: {error}a step of the size {length:.2g}")
sys.exit(0 if keys == 1 and not found[0][0] and found[1][0] and found[1][1] > 10 * found[0][1] else 1)
PYTHON
