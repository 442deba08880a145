#!/usr/bin/env bash
# adam-atan2-pytorch 0.4.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# AdamAtan2ClipGrok bounds the norm of each row of a matrix after the step, by clip_to_grok_max_norm,
# 2 unless given. One would guess that rows below the bound stay as they are and longer ones end at
# about 2. Instead each row is divided by its own norm, squashed into 1 to 2. A row with a norm of 1.5
# so gets one of 1, a row of 1 is not at rest either, and even a small one loses 0.25 % in each step. No row
# stays at a norm of 1, let alone 2. That happens in each step whatever lr is, with weight_decay=0 and a
# gradient of 0: for a small lr it is a decay by far more than any usual one.
#
# Seen, norm of a row after 1, 10, 100 and 1000 steps with a gradient of 0 and lr=1e-5:
#   from 3.0: 1.5019, 0.6345, 0.2337, 0.0125
#   from 1.0: 0.8935, 0.5988, 0.2308, 0.0125
#   from 0.2: 0.1989, 0.1895, 0.1256, 0.009
#   1.0 with clip_to_grok=False: 1.0, 1.0, 1.0, 1.0
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q adam-atan2-pytorch==0.4.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import torch
from adam_atan2_pytorch import AdamAtan2ClipGrok


def norms(start, **options):
    weight = torch.nn.Parameter(torch.full((3, 4), start / 2))
    optimizer = AdamAtan2ClipGrok([weight], lr=1e-5, **options)
    found = []
    for step in range(1, 1001):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        if step in (1, 10, 100, 1000):
            found.append(round(weight[0].norm().item(), 4))
    return found


found = {start: norms(start) for start in (3.0, 1.0, 0.2)}
unclipped = norms(1.0, clip_to_grok=False)
for start, after in found.items():
    print(f"from {start}: {', '.join(map(str, after))}")
print(f"1.0 with clip_to_grok=False: {', '.join(map(str, unclipped))}")
falling = all(
    before > after for start, seen in found.items() for before, after in zip([start, *seen], seen)
)
sys.exit(0 if falling and max(seen[-1] for seen in found.values()) < 0.02 and unclipped == [1.0] * 4 else 1)
PYTHON
