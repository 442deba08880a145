#!/usr/bin/env bash
# torch-ema 0.3 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# An average of bfloat16 weights has to be kept in float32, since a thousandth of a difference is lost in
# bfloat16; ema.to(dtype=torch.float32) does that. load_state_dict() casts the average to the dtype of
# the parameters, whatever the file has and whatever to() was called with before. So a run that is resumed
# goes on with an average in bfloat16, which comes to a standstill: no error, and the file has float32.
# Calling to() after the load brings the dtype back, and what the cast has rounded off is lost.
#
# Seen, weights that go from 0 to 1, decay=0.999, ten updates, then saved, and 3,000 updates more:
#   going on: torch.float32, 0.9508
#   loaded: torch.bfloat16, 0.25
#   in the file: torch.float32
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q torch-ema==0.3
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import io
import sys

import torch
from torch_ema import ExponentialMovingAverage


def made(value):
    weight = torch.nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
    average = ExponentialMovingAverage([weight], decay=0.999, use_num_updates=False)
    average.to(dtype=torch.float32)
    return weight, average


weight, going_on = made(0.0)
torch.nn.init.ones_(weight)
for _ in range(10):
    going_on.update()
file = io.BytesIO()
torch.save(going_on.state_dict(), file)
file.seek(0)
saved = torch.load(file)
other, loaded = made(1.0)
loaded.load_state_dict(saved)
found = []
for name, average in (("going on", going_on), ("loaded", loaded)):
    for _ in range(3_000):
        average.update()
    shadow = average.shadow_params[0]
    found.append((shadow.dtype, round(shadow[0].item(), 4)))
    print(f"{name}: {found[-1][0]}, {found[-1][1]}")
print("in the file:", saved["shadow_params"][0].dtype)
expected = [(torch.float32, 0.9508), (torch.bfloat16, 0.25)]
sys.exit(0 if found == expected and saved["shadow_params"][0].dtype == torch.float32 else 1)
PYTHON
