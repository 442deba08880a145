#!/usr/bin/env bash
# sgd-sai 1.0.3 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# SGD_sai scales the learning rate of each tensor by a ratio that it takes from the first gradient, norm
# over standard deviation, and never again. One would guess that it is about the root of the number of elements
# for all. But a first gradient of 0 gives a ratio of 0, so that the tensor is frozen for the whole run:
# of a LoRA pair, whose B starts at 0, A has no gradient in the first step, and is never trained. And
# a tensor of one element (a temperature, the gain of a block) has no standard deviation: it
# is taken for 0, the ratio is the gradient over eps, and the first step ends far outside. A tensor whose
# first gradient comes later than the others' raises KeyError: 'gsnr'. Nothing else is said.
#
# Seen, a LoRA pair fitted for 500 steps with lr=0.01: how far A and B went, and the ratio of A
#   SGD: A 2.74, B 2.94
#   AdamW: A 3.19, B 2.49
#   SGD_sai: A 0.00, B 5.37, ratio of A 0.0
# Seen, a temperature of 1 after one step with a gradient of 0.5 and lr=0.01:
#   SGD: 0.995
#   AdamW: 0.99
#   SGD_sai: -249999.0
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q sgd-sai==1.0.3
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import contextlib
import io
import sys

import torch
from sgd_sai import SGD_sai


def quiet(call, *arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        return call(*arguments)


torch.manual_seed(0)
inputs = torch.randn(64, 8)
wanted = inputs @ torch.randn(8, 8)
start = torch.randn(2, 8) / 8**0.5, torch.zeros(8, 2)


def pair(kind, options):
    a, b = (torch.nn.Parameter(tensor.clone()) for tensor in start)
    optimizer = kind([a, b], lr=0.01, weight_decay=0.0, **options)
    for _ in range(500):
        optimizer.zero_grad()
        (inputs @ a.T @ b.T - wanted).square().mean().backward()
        quiet(optimizer.step)
    went = [(now.detach() - before).norm().item() for now, before in zip((a, b), start)]
    return went, optimizer.state[a].get("gsnr")


def temperature(kind, options):
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = kind([weight], lr=0.01, weight_decay=0.0, **options)
    weight.grad = torch.tensor(0.5)
    quiet(optimizer.step)
    return round(weight.item(), 4)


kinds = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (SGD_sai, {})]
pairs = {}
for kind, options in kinds:
    (a, b), ratio = pairs[kind] = pair(kind, options)
    print(f"{kind.__name__}: A {a:.2f}, B {b:.2f}" + (f", ratio of A {ratio}" if ratio is not None else ""))
values = [temperature(kind, options) for kind, options in kinds]
for (kind, _), value in zip(kinds, values):
    print(f"{kind.__name__}: {value}")
frozen = pairs[SGD_sai][0][0] == 0 and all(pairs[kind][0][0] > 1 for kind, _ in kinds[:2])
sys.exit(0 if frozen and values[2] < -1e4 and min(values[:2]) > 0.9 else 1)
PYTHON
