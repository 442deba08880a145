#!/usr/bin/env bash
# lightning 2.6.6 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# With manual optimization, a LightningModule calls self.clip_gradients(optimizer, ...) between
# manual_backward() and optimizer.step(), as its documentation has it. Automatic optimization unscales first
# and clips then; clip_gradients() of a manual loop does not unscale, and step() does it afterwards. So with
# "16-mixed" a bound of 1 holds for the gradients times the loss scale, and the step has a norm of 1 over
# the scale: 1024 times shorter here, 65536 times with the usual scale. Adam hides it, since it divides
# by the size of its gradients, until the scale changes: then its moments are of another size.
#
# A scaler for the CPU stands for the one for CUDA, which would be disabled without a GPU.
#
# Seen, SGD with lr=1 and a gradient of norm 6, scale 1024; the norm of the first step
#   automatic, 32: 6.00000, clipped to 1: 1.00000
#   automatic, 16-mixed: 6.00000, clipped to 1: 1.00000
#   manual, 32: 6.00000, clipped to 1: 1.00000
#   manual, 16-mixed: 6.00000, clipped to 1: 0.00098
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q lightning==2.6.6
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import logging
import sys

import lightning
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

logging.disable(logging.WARNING)


class Module(lightning.LightningModule):
    def __init__(self, manual, bound):
        super().__init__()
        self.automatic_optimization = not manual
        self.bound = bound
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def training_step(self, batch, index):
        loss = 3 * self.weight.sum()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.bound:
            self.clip_gradients(optimizer, gradient_clip_val=self.bound, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def length(manual, precision, bound):
    module = Module(manual, bound)
    options = {}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options["plugins"] = [MixedPrecision(precision, "cpu", scaler=scaler)]
    if bound and not manual:
        options["gradient_clip_val"] = bound
    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(1, 1)))
    return module.weight.norm().item()


found = []
for manual in (False, True):
    for precision in ("32", "16-mixed"):
        free, clipped = (length(manual, precision, bound) for bound in (None, 1.0))
        found.append((free, clipped))
        name = "manual" if manual else "automatic"
        print(f"{name}, {precision}: {free:.5f}, clipped to 1: {clipped:.5f}")
right = all(abs(free - 6) < 0.01 for free, _ in found) and all(abs(each - 1) < 0.01 for _, each in found[:3])
sys.exit(0 if right and found[3][1] < 0.01 else 1)
PYTHON
