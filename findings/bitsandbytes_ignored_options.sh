#!/usr/bin/env bash
# bitsandbytes 0.50.2, torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Some options of the optimizers of bitsandbytes, which have the names of torch's, mean something
# else there or nothing at all:
#   * Adam(weight_decay=) decays decoupled, as AdamW does, and not through the gradient as
#     torch.optim.Adam does: it gives the same bits as bitsandbytes' AdamW.
#   * Adam(amsgrad=True) is plain Adam.
#   * SGD(nesterov=True) and SGD(dampening=0.5) are plain SGD with momentum.
# None of them warns. Here each pair is trained for 50 steps; the number is the distance of the
# second from the first, divided by the way that the first went.
#
# Seen:
#   Adam(weight_decay=0.1) from its own AdamW(weight_decay=0.1): 0
#   Adam(weight_decay=0.1) from torch.optim.Adam(weight_decay=0.1): 2.6
#   Adam(amsgrad=True) from its own Adam: 0
#   SGD(nesterov=True) from its own SGD: 0
#   SGD(dampening=0.5) from its own SGD: 0
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q bitsandbytes==0.50.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import bitsandbytes.optim as bnb
import torch


def trained(kind, **options):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 64, generator=generator)
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight], lr=1e-2, **options)
    for _ in range(50):
        weight.grad = 0.1 * torch.randn(64, 64, generator=generator)
        optimizer.step()
    return weight.detach() - start


def apart(one, other):
    return ((one - other).norm() / one.norm()).item()


decay, momentum = {"weight_decay": 0.1}, {"momentum": 0.9}
adam = trained(bnb.Adam, **decay)
sgd = trained(bnb.SGD, **momentum)
found = {
    "Adam(weight_decay=0.1) from its own AdamW(weight_decay=0.1)": (
        apart(adam, trained(bnb.AdamW, **decay)),
        0.0,
    ),
    "Adam(weight_decay=0.1) from torch.optim.Adam(weight_decay=0.1)": (
        apart(adam, trained(torch.optim.Adam, **decay)),
        None,
    ),
    "Adam(amsgrad=True) from its own Adam": (
        apart(trained(bnb.Adam), trained(bnb.Adam, amsgrad=True)),
        0.0,
    ),
    "SGD(nesterov=True) from its own SGD": (
        apart(sgd, trained(bnb.SGD, nesterov=True, **momentum)),
        0.0,
    ),
    "SGD(dampening=0.5) from its own SGD": (
        apart(sgd, trained(bnb.SGD, dampening=0.5, **momentum)),
        0.0,
    ),
}
for name, (distance, _) in found.items():
    print(f"{name}: {distance:.2g}")
same = all(
    distance == wanted if wanted is not None else distance > 0.5
    for distance, wanted in found.values()
)
sys.exit(0 if same else 1)
PYTHON
