#!/usr/bin/env bash
# ema-pytorch 0.8.3 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# An average of a model needs buffers as well: torch's AveragedModel copies all of them in each update,
# or averages all with use_buffers=True. EMA averages those of floats, and leaves out those of integers and
# booleans altogether: they are not even copied in the first update, which copies the rest. So a mask of
# pruned weights, a count, or a flag that a layer has set itself up keeps the value that it had when
# the EMA was made. A model that prunes during training comes out with the pruned channels at work, and
# the state dict that one ships has the old mask. Nothing says so.
#
# Seen, a mask of which one of two channels is switched off in training, and a count of 50 steps:
#   model: mask [True, False], count 50, norm has seen 50 batches
#   EMA: mask [True, True], count 0, norm has seen 0 batches
#   AveragedModel: mask [True, False], count 50, norm has seen 50 batches
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q ema-pytorch==0.8.3
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from ema_pytorch import EMA


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, inputs):
        return self.norm(inputs) * self.mask


model = Masked()
ema = EMA(model, beta=0.9, update_after_step=0, update_every=1)
average = torch.optim.swa_utils.AveragedModel(model)
for step in range(50):
    model.mask[1] = step < 10
    model.count += 1
    model(torch.randn(4, 2))
    ema.update()
    average.update_parameters(model)
found = []
for name, each in (("model", model), ("EMA", ema.ema_model), ("AveragedModel", average.module)):
    values = each.mask.tolist(), each.count.item(), each.norm.num_batches_tracked.item()
    found.append(values)
    print(f"{name}: mask {values[0]}, count {values[1]}, norm has seen {values[2]} batches")
trained = ([True, False], 50, 50)
sys.exit(0 if found == [trained, ([True, True], 0, 0), trained] else 1)
PYTHON
