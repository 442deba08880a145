#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# AveragedModel(use_buffers=True) averages buffers as well, and with an average of equal numbers one would
# guess that a buffer that never changes, such as position ids, the index of a relative position or a
# lookup table, stays as it is. For integers, get_ema_multi_avg_fn() and get_ema_avg_fn() compute
# decay * a + (1 - decay) * a in float32 and cut off what is behind the point. For many numbers the sum
# is a little less than a, so they are lowered by 1, and again until rounding is kind to one. With some
# decays, .99 and .999 among them, it happens to none of the first 50,000 numbers; with .9 or .9999 to a
# fifth of them. A model whose tables are averaged so looks up the wrong rows, without an error.
#
# Seen, a constant buffer of 0 to 1999, ten updates: numbers that are wrong, and the largest error
#   decay 0.9: 555, 1
#   decay 0.99: 0, 0
#   decay 0.999: 0, 0
#   decay 0.9995: 593, 1
#   decay 0.9999: 404, 1
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

found = {}
for decay in (0.9, 0.99, 0.999, 0.9995, 0.9999):
    values = []
    for options in (
        {"multi_avg_fn": get_ema_multi_avg_fn(decay)},
        {"avg_fn": get_ema_avg_fn(decay)},
    ):
        model = torch.nn.Linear(1, 1)
        model.register_buffer("index", torch.arange(2000))
        average = AveragedModel(model, use_buffers=True, **options)
        for _ in range(10):
            average.update_parameters(model)
        missing = model.index - average.module.index
        values.append((missing.count_nonzero().item(), missing.max().item()))
    assert values[0] == values[1]
    found[decay] = values[0]
    print(f"decay {decay}: {values[0][0]}, {values[0][1]}")
same = found[0.99][0] == found[0.999][0] == 0 and min(found[0.9][0], found[0.9999][0]) > 100
sys.exit(0 if same else 1)
PYTHON
