#!/usr/bin/env bash
# accelerate 1.15.0 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# In fp16 all optimizers of an Accelerator share one GradScaler, and clip_grad_norm_() unscales the
# gradients of all of them. step() of each one then steps through the scaler and updates the scaler as
# well, and an update forgets which optimizers were unscaled. So the step of the second optimizer
# unscales once more: its gradients are divided by the scale twice, 65536 at the start, after they were
# clipped. SGD then hardly moves, and for Adam they sink to its eps. With two optimizers, of a GAN or Muon and
# AdamW for one model, the one that is stepped first learns and the other one nearly does not, without
# an error; which one depends on the order of two lines. Without clipping both learn. The scale also
# grows after half as many steps as growth_interval says.
#
# An Accelerator makes a scaler for a GPU only; the script puts torch's scaler for the CPU in its place
# and takes the same way through Accelerator from there.
#
# Seen, two SGD with lr=1 from 0 and a gradient of -1, far below the bound of the clipping, 4 steps with
# a scale of 1024 and growth_interval=4:
#   one optimizer, clipped: 4.0, scale 2048.0
#   two optimizers: 4.0 and 4.0, scale 4096.0
#   two optimizers, clipped: 4.0 and 0.00293, scale 4096.0
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q accelerate==1.15.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from accelerate import Accelerator


def trained(count, clip):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    accelerator.native_amp = True
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]
    optimizers = [accelerator.prepare(torch.optim.SGD([param], lr=1.0)) for param in params]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(-sum(params).sum())
        if clip:
            accelerator.clip_grad_norm_(params, 100.0)
        for optimizer in optimizers:
            optimizer.step()
    return [round(param.item(), 5) for param in params], accelerator.scaler.get_scale()


found = trained(1, True), trained(2, False), trained(2, True)
for name, (values, scale) in zip(
    ("one optimizer, clipped", "two optimizers", "two optimizers, clipped"), found
):
    print(f"{name}: {' and '.join(map(str, values))}, scale {scale}")
expected = ([4.0], 2048.0), ([4.0, 4.0], 4096.0), ([4.0, 0.00293], 4096.0)
sys.exit(0 if found == expected else 1)
PYTHON
