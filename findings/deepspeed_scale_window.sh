#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# DeepSpeed's "loss_scale_window" and the growth_interval of torch.amp.GradScaler both are documented
# as the number of steps without an overflow after which the loss scale grows. For the same number,
# DeepSpeed grows one step later the first time after the start, and the first time after each
# overflow. From then on both grow after each window. The scale of a run that overflows regularly
# can so stay below torch's for good: with an overflow after each window of clean steps torch's
# grows in between, and DeepSpeed's only falls.
#
# Seen, with a window of 5, an overflow in step 13 and one from step 30 on in each sixth step:
#   DeepSpeed grows in steps [6, 11, 19, 24, 29]
#   torch grows in steps [5, 10, 18, 23, 28, 35, 41, 47]
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy "setuptools<82"
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cd "$folder"
MASTER_ADDR=localhost MASTER_PORT=29517 DS_ACCELERATOR=cpu venv/bin/python - <<'PYTHON'
import sys

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

# Its scaler asks for the rank before it prints that it skipped a step.
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, rank=0, world_size=1)
WINDOW, STEPS = 5, 50
overflows = {13, *range(30, STEPS, 6)}


def growths(scale, update):
    found, last = [], scale()
    for step in range(1, STEPS):
        update(step in overflows)
        if scale() > last:
            found.append(step)
        last = scale()
    return found


theirs = DynamicLossScaler(2.0**16, WINDOW, 1, 1, False)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=WINDOW)


def train_step(overflow):
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    if overflow:
        weight.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()


of_deepspeed = growths(lambda: theirs.loss_scale, theirs.update_scale)
of_torch = growths(scaler.get_scale, train_step)
print("DeepSpeed grows in steps", of_deepspeed)
print("torch grows in steps", of_torch)
same = of_deepspeed == [6, 11, 19, 24, 29] and of_torch == [5, 10, 18, 23, 28, 35, 41, 47]
sys.exit(0 if same else 1)
PYTHON
