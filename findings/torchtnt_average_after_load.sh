#!/usr/bin/env bash
# torchtnt 0.2.4 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# torchtnt's AveragedModel with use_lit=True starts with a small decay, (1 + n) / (10 + n) in update n,
# which grows to ema_decay, so that the first weights are soon forgotten. Its state has a count of
# updates, "n_averaged", which torch's AveragedModel keeps, but the decay is made of another count,
# which is a plain attribute and neither saved nor loaded. So the average of a run that is resumed from
# a checkpoint starts its warmup again: the first update after loading replaces 82 % of the average by
# the weights of that moment, the next one 75 % of the rest, and after a few steps nothing is left of
# thousands of updates. "n_averaged" is right all the while, and nothing warns.
#
# Seen, with weights of 0 in 10000 updates and of 1 after that, ema_decay=0.999:
#   going on: 0.001, 0.002, 0.003 after 1, 2, 3 more updates, n_averaged 10003
#   loaded: 0.8182, 0.9545, 0.986 after 1, 2, 3 more updates, n_averaged 10003
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy "setuptools<82"
"$folder/venv/bin/pip" install -q torchtnt==0.2.4
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import io
import sys

import torch
from torchtnt.utils.swa import AveragedModel

weight = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(weight.weight)
going_on = AveragedModel(weight, ema_decay=0.999, use_lit=True)
for _ in range(10_000):
    going_on.update_parameters(weight)
file = io.BytesIO()
torch.save(going_on.state_dict(), file)
file.seek(0)
loaded = AveragedModel(weight, ema_decay=0.999, use_lit=True)
loaded.load_state_dict(torch.load(file))

torch.nn.init.ones_(weight.weight)
found = []
for name, average in (("going on", going_on), ("loaded", loaded)):
    values = []
    for _ in range(3):
        average.update_parameters(weight)
        values.append(round(average.module.weight.item(), 4))
    found.append((values, average.n_averaged.item()))
    seen = ", ".join(map(str, values))
    print(f"{name}: {seen} after 1, 2, 3 more updates, n_averaged {average.n_averaged.item()}")
expected = [([0.001, 0.002, 0.003], 10_003), ([0.8182, 0.9545, 0.986], 10_003)]
sys.exit(0 if found == expected else 1)
PYTHON
