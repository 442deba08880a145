#!/usr/bin/env bash
# ema-pytorch 0.8.3 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# KarrasEMA and PostHocEMA average with a decay that grows with the step: (1 - 1 / t) ** (gamma + 1) makes
# the average one of the last share of the run, whatever its length. update_every, 100 unless given, is
# to save time: the average is updated in each 100th call. It still takes the decay of a single step of
# all those calls, once for a hundred of them. So the exponent is a hundredth of the one asked for, and
# the average reaches back over the whole run and keeps a large part of the first weights.
# synthesize_ema_model() trusts the exponent, and what it returns is as far off.
#
# Seen, weights that rise evenly from 0 to 1 in 10,000 steps; the average, which should be 0.888 and 0.947:
#   update_every=1: 0.888, 0.947
#   update_every=10: 0.442, 0.642
#   update_every=100: 0.073, 0.151
# Seen, a PostHocEMA with sigma_rels=(0.05, 0.28) of such weights, made into one of 0.15; 0.820 is right:
#   update_every=1: 0.820
#   update_every=10: 0.242
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
from ema_pytorch import KarrasEMA, PostHocEMA


def averaged(make, steps, **options):
    weight = torch.nn.Linear(1, 1, bias=False)
    average = make(weight, **options)
    for step in range(steps):
        torch.nn.init.constant_(weight.weight, step / steps)
        average.update()
    return average


found = {}
for every in (1, 10, 100):
    found[every] = [
        averaged(KarrasEMA, 10_000, gamma=gamma, update_every=every).ema_model.weight.item()
        for gamma in (6.94, 16.97)
    ]
    print(f"update_every={every}: {', '.join(f'{value:.3f}' for value in found[every])}")
made = {}
for every in (1, 10):
    average = averaged(
        PostHocEMA,
        5_000,
        sigma_rels=(0.05, 0.28),
        update_every=every,
        checkpoint_every_num_steps=500,
        checkpoint_folder=f"every-{every}",
    )
    made[every] = average.synthesize_ema_model(sigma_rel=0.15).ema_model.weight.item()
    print(f"update_every={every}: {made[every]:.3f}")
right = max(abs(value - (gamma + 1) / (gamma + 2)) for value, gamma in zip(found[1], (6.94, 16.97))) < 0.001
wrong = found[10][0] < 0.6 and found[100][0] < 0.2 and made[10] < 0.4 and abs(made[1] - 0.82) < 0.01
sys.exit(0 if right and wrong else 1)
PYTHON
