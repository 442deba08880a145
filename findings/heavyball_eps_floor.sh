#!/usr/bin/env bash
# heavyball 3.2.1, torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# eps of heavyball.AdamW is not added to the denominator, as torch.optim.AdamW, the paper and the
# option's name have it, but is the least value that the denominator may have: an update is
# m / max(sqrt(v), eps) there and m / (sqrt(v) + eps) in torch. With the default of 1e-8 the two are
# alike. With the larger ones that are chosen for stability they are not: gradients of eps get the
# whole update in heavyball and half of it in torch.
#
# Seen, the first update with lr=1 and gradients of 4, 1 and 0.25, and eps=1:
#   heavyball: -1.00 -1.00 -0.25
#   torch: -0.80 -0.50 -0.20
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q heavyball==3.2.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import heavyball
import torch

wanted = {"heavyball": [-1.0, -1.0, -0.25], "torch": [-0.8, -0.5, -0.2]}
same = True
for name, kind, more in (
    ("heavyball", heavyball.AdamW, {"compile_step": False}),
    ("torch", torch.optim.AdamW, {}),
):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = kind([weight], lr=1.0, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0, **more)
    weight.grad = torch.tensor([4.0, 1.0, 0.25])
    optimizer.step()
    print(f"{name}:", *(f"{each:.2f}" for each in weight.tolist()))
    same = same and torch.allclose(weight, torch.tensor(wanted[name]), atol=1e-4)
sys.exit(0 if same else 1)
PYTHON
