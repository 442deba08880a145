#!/usr/bin/env bash
# Under torch's GradScaler a wrapper that delegates attributes to a fused optimizer steps with scaled gradients.
#
# torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# Wrappers of optimizers (for quantisation, look-ahead, logging) often pass on every attribute that
# they lack to the optimizer inside. With fused=True that one has `_step_supports_amp_scaling`, so the
# scaler neither unscales nor skips: it sets `grad_scale` and `found_inf` on the object that it was
# given, and calls its step. The optimizer inside sees neither. One step of SGD with a learning rate of
# 0.1 and a gradient of 1 takes a weight from 1 to -101.4 at a scale of 1024, and a gradient of inf is
# written into the parameters. The same wrapper around the same optimizer without fused=True steps
# right. No error, no warning.
#
# Output seen:
#
# fused=False: 0.9, after an overflow 0.9
# fused=True:  -101.4, after an overflow -inf
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy
cat > "$folder/run.py" << 'END'
import math
import sys

import torch


class Wrapper:
    def __init__(self, inside):
        self.inside = inside

    def __getattr__(self, name):
        return getattr(self.__dict__["inside"], name)

    def step(self):
        return self.inside.step()


seen = []
for fused in (False, True):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Wrapper(torch.optim.SGD([weight], lr=0.1, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    values = []
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append(round(weight[0].item(), 4))
    seen.append(values)
    name = f"fused={fused}:"
    print(f"{name:12} {values[0]}, after an overflow {values[1]}")
sys.exit(seen != [[0.9, 0.9], [-101.4, -math.inf]])
END
cd "$folder"
env/bin/python -W ignore run.py
