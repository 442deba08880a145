#!/usr/bin/env bash
# pytorch-accelerated 0.1.61 with accelerate 1.15.0 and torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Two micro-batches with gradient_accumulation_steps=2 should train like one batch of twice the size,
# and without clipping they do. With gradient_clip_value the Trainer clips after the backward pass of
# every micro-batch, not before the step: the sum so far is cut, and the next micro-batch is added to
# what is left and cut again. So the gradient of a step depends on the order of its micro-batches, and
# can be 0 or of the opposite sign where the whole batch has a large one.
#
# Seen, SGD with lr=1 from 0, two steps, each on a sample with a gradient of -6 and one of 2:
#   without a bound: 4.0 for batches of 2, 4.0 accumulated
#   gradient_clip_value=1: 2.0 for batches of 2, 0.0 accumulated
#   gradient_clip_value=0.5: 1.0 for batches of 2, -1.0 accumulated
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q pytorch-accelerated==0.1.61 accelerate==1.15.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from pytorch_accelerated import Trainer

rows = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.tensor([[-6.0], [2.0]] * 2))


def trained(batch, clip):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    trainer = Trainer(
        model,
        loss_func=lambda output, gradient: (output * gradient).mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        callbacks=(),
    )
    trainer.train(
        rows,
        num_epochs=1,
        per_device_batch_size=batch,
        gradient_accumulation_steps=2 // batch,
        gradient_clip_value=clip,
        train_dataloader_kwargs={"shuffle": False, "num_workers": 0},
    )
    return model.weight.item()


found = {clip: (trained(2, clip), trained(1, clip)) for clip in (None, 1.0, 0.5)}
for clip, (whole, accumulated) in found.items():
    name = f"gradient_clip_value={clip:g}" if clip else "without a bound"
    print(f"{name}: {whole} for batches of 2, {accumulated} accumulated")
sys.exit(0 if found == {None: (4.0, 4.0), 1.0: (2.0, 0.0), 0.5: (1.0, -1.0)} else 1)
PYTHON
