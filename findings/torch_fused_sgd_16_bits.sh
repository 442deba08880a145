#!/usr/bin/env bash
# torch 2.13.0, on a CPU (x86-64); Python 3.10 or newer.
#
# torch.optim.SGD(params, fused=True) takes parameters in bfloat16 and float16 on a CPU, and should do what
# it does without the option, only faster. But it leaves them as they are, except for the last few elements
# of each tensor, those that do not fill a vector: a bias of 7 elements learns, of a matrix of 70 elements
# the last few, and a matrix of 64 none. Momenta are wrong as well. There is no error, float32 is right,
# and so are AdamW and Adagrad. The scaler of a training in float16 notices nothing either.
#
# Seen, one step with lr=0.1 and a gradient of 1: elements that moved, without the option and with it
#   float32: 7 and 7 of 7, 64 and 64 of 64
#   bfloat16: 7 and 7 of 7, 64 and 0 of 64
#   float16: 7 and 7 of 7, 64 and 0 of 64
#   AdamW, bfloat16: 7 and 7 of 7, 64 and 64 of 64
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


def moved(kind, dtype, size, fused):
    weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    kind([weight], lr=0.1, fused=fused).step()
    return weight.detach().count_nonzero().item()


same = True
for kind, dtype in (
    (torch.optim.SGD, torch.float32),
    (torch.optim.SGD, torch.bfloat16),
    (torch.optim.SGD, torch.float16),
    (torch.optim.AdamW, torch.bfloat16),
):
    counts = {size: [moved(kind, dtype, size, fused) for fused in (None, True)] for size in (7, 64)}
    name = "AdamW, " if kind is torch.optim.AdamW else ""
    seen = ", ".join(f"{plain} and {fused} of {size}" for size, (plain, fused) in counts.items())
    print(f"{name}{str(dtype)[6:]}: {seen}")
    broken = kind is torch.optim.SGD and dtype is not torch.float32
    same = same and counts == {7: [7, 7], 64: [64, 0 if broken else 64]}
sys.exit(0 if same else 1)
PYTHON
