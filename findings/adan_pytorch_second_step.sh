#!/usr/bin/env bash
# adan-pytorch 0.1.0 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# The steps of adaptive optimizers are about as long as lr; that is their point. Adan of this
# package leaves out its moments in the first step, which changes nothing, and has empty ones in the
# second: there the update is gradient over |gradient + 0.92 * difference of the two gradients|, and
# nothing bounds that. Where the two nearly cancel out, the weight is thrown far away: with lr=0.001 a few
# weights of a million are off by more than 1, and nothing brings them back. In bfloat16 such sums are
# exactly 0 for some, and the update is divided by eps alone. So it happens once in each run, at the
# second step, to a few weights of each large matrix, and with a learning rate for which the
# others hardly move. From the third step on the steps are as usual.
#
# Seen, a million weights, gradients of noise, lr=0.001, the longest and the median move in steps 1 to 4:
#   float32, longest: 0, 3.8, 0.0016, 0.00087
#   float32, median: 0, 0.00073, 0.00046, 0.0003
#   bfloat16, longest: 0, 2.4e+03, 0.0018, 0.00089
#   bfloat16, median: 0, 0.00072, 0.00046, 0.0003
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q adan-pytorch==0.1.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from adan_pytorch import Adan

COUNT = 1_000_000
same = True
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.nn.Parameter(torch.zeros(COUNT, dtype=dtype))
    optimizer = Adan([weight], lr=1e-3)
    moves = []
    for step in range(4):
        before = weight.detach().clone()
        noise = torch.randn(COUNT, generator=torch.Generator().manual_seed(step))
        weight.grad = noise.to(dtype)
        optimizer.step()
        moved = (weight.detach() - before).abs().float()
        moves.append((moved.max().item(), moved.median().item()))
    for name, values in zip(("longest", "median"), zip(*moves)):
        print(f"{str(dtype)[6:]}, {name}: {', '.join(f'{value:.2g}' for value in values)}")
    longest = [move for move, _ in moves]
    same = same and longest[0] == 0 and longest[1] > 1 and max(longest[2:]) < 0.01
sys.exit(0 if same else 1)
PYTHON
