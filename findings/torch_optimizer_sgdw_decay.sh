#!/usr/bin/env bash
# torch_optimizer 0.3.0, torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# weight_decay of torch_optimizer.SGDW does not shrink weights: each step subtracts
# lr * weight_decay from every weight, whatever its value, so that positive weights become smaller,
# negative ones larger in size, and weights of 0 leave it. Decoupled weight decay multiplies by
# 1 - lr * weight_decay instead, as torch.optim.AdamW does, and as the paper has it that the docstring
# names.
#
# Seen, one step with lr=0.1, weight_decay=0.5 and gradients of 0, from weights 2, 0 and -2:
#   torch_optimizer.SGDW: 1.95 -0.05 -2.05
#   torch.optim.AdamW: 1.90 0.00 -1.90
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps torch_optimizer==0.3.0 pytorch_ranger==0.1.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import torch
import torch_optimizer

wanted = {"torch_optimizer.SGDW": [1.95, -0.05, -2.05], "torch.optim.AdamW": [1.9, 0.0, -1.9]}
same = True
for name, kind in (
    ("torch_optimizer.SGDW", torch_optimizer.SGDW),
    ("torch.optim.AdamW", torch.optim.AdamW),
):
    weight = torch.nn.Parameter(torch.tensor([2.0, 0.0, -2.0]))
    optimizer = kind([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros(3)
    optimizer.step()
    print(f"{name}:", *(f"{each:.2f}" for each in weight.tolist()))
    same = same and torch.allclose(weight, torch.tensor(wanted[name]), atol=1e-6)
sys.exit(0 if same else 1)
PYTHON
