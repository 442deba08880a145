#!/usr/bin/env bash
# torch's GradScaler refuses a closure by name and takes it by position, where fused steps almost vanish.
#
# torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# scaler.step(optimizer, closure=closure) raises "Closure use is not currently supported if GradScaler
# is enabled." scaler.step(optimizer, closure) does not: only keywords are looked at. The closure
# computes new gradients, which nobody has checked for inf. An optimizer without fused=True gets them
# after the scaler has unscaled the old ones, so that a closure whose loss is not scaled makes the
# right step. With fused=True the optimizer divides the new gradients by the loss scale: SGD with a
# learning rate of 0.1 and a gradient of 1 moves by 0.1 / 65536. Nothing warns, and the scale stays.
#
# Output seen:
#
# by name:              RuntimeError
# by position:          moved by 0.1
# by position, fused:   moved by 1.5e-06
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy
cat > "$folder/run.py" << 'END'
import sys

import torch


def step(fused, by_name=False):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")

    def closure():
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    scaler.scale(weight.sum()).backward()
    try:
        scaler.step(optimizer, closure=closure) if by_name else scaler.step(optimizer, closure)
    except RuntimeError as error:
        return type(error).__name__
    return f"moved by {1 - weight[0].item():.2g}"


seen = [step(False, by_name=True), step(False), step(True)]
for name, what in zip(("by name:", "by position:", "by position, fused:"), seen):
    print(f"{name:21} {what}")
sys.exit(seen != ["RuntimeError", "moved by 0.1", "moved by 1.5e-06"])
END
cd "$folder"
env/bin/python -W ignore run.py
