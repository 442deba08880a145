#!/usr/bin/env bash
# torch-optimi 0.3.3, torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# optimi.AdamW keeps its moments under the names of torch.optim.AdamW, "exp_avg" and "exp_avg_sq",
# in the same dtype and shape, but they are other numbers: already divided by the bias correction,
# 1 - beta ** step. After the first step its "exp_avg" is the gradient itself, and torch's a tenth
# of it. Both optimizers make the same update of them. So moments that are copied from one to the
# other, with the step, make early updates that are several times too large or too small; after
# thousands of steps nobody would see it.
#
# Seen, after 3 steps with the same gradients and options:
#   parameters apart by less than 1e-6
#   exp_avg of optimi / exp_avg of torch: 3.69 = 1 / (1 - 0.9 ** 3)
#   exp_avg_sq of optimi / exp_avg_sq of torch: 33.67 = 1 / (1 - 0.99 ** 3)
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q torch-optimi==0.3.3 packaging
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import optimi
import torch

options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
generator = torch.Generator().manual_seed(0)
start = torch.randn(100, generator=generator)
grads = [torch.randn(100, generator=generator) for _ in range(3)]


def trained(kind):
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight], **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach(), optimizer.state_dict()["state"][0]


theirs, kept = trained(optimi.AdamW)
torchs, kept_by_torch = trained(torch.optim.AdamW)
apart = (theirs - torchs).abs().max().item()
print(f"parameters apart by {apart:.1g}")
same = apart < 1e-6
for name, beta in zip(("exp_avg", "exp_avg_sq"), options["betas"]):
    ratio = (kept[name] / kept_by_torch[name]).median().item()
    wanted = 1 / (1 - beta**3)
    print(f"{name} of optimi / {name} of torch: {ratio:.2f}, 1 / (1 - {beta} ** 3) = {wanted:.2f}")
    same = same and abs(ratio / wanted - 1) < 1e-3
sys.exit(0 if same else 1)
PYTHON
