#!/usr/bin/env bash
# torch-optstate 0.1.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Hooks that register_step_post_hook() or register_step_pre_hook() adds run once in each step, after or
# before all parameters: averages of weights and counters are often updated there. The wrapper of
# torch_optstate steps a few parameters at a time, and hands the registration on to the optimizer
# inside, whose step() it calls for each such chunk. So a hook runs as often as there are chunks: once
# for each parameter in the first step, for each eighth one after that. An average in a hook moves that
# many times a step, each time with a model of which only a part is stepped.
#
# Seen, a model with 20 parameters, calls of a post hook in steps 1, 2 and 3:
#   AdamW: 1, 1, 1
#   wrapped: 20, 3, 3
# Seen, an average of the first parameter with a decay of 0.9, after steps that add 1 each:
#   SGD: 0.1, 0.29, 0.561
#   wrapped: 0.8784, 1.1824, 1.6749
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q torch-optstate==0.1.1
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from torch_optstate import wrap


def walk(kind, wraps, lr):
    weights = [torch.nn.Parameter(torch.zeros(4)) for _ in range(20)]
    optimizer = kind(weights, lr=lr)
    if wraps:
        optimizer = wrap(optimizer)
    calls, average = 0, 0.0

    def hook(*_):
        nonlocal calls, average
        calls += 1
        average = 0.9 * average + 0.1 * weights[0].detach()[0].item()

    optimizer.register_step_post_hook(hook)
    counts, averages = [], []
    for _ in range(3):
        calls = 0
        for weight in weights:
            weight.grad = -torch.ones(4)
        optimizer.step()
        counts.append(calls)
        averages.append(round(average, 4))
    return counts, averages


counts = [walk(torch.optim.AdamW, wraps, 0.001)[0] for wraps in (False, True)]
averages = [walk(torch.optim.SGD, wraps, 1.0)[1] for wraps in (False, True)]
for values, name in ((counts, "AdamW"), (averages, "SGD")):
    print(f"{name}: {', '.join(map(str, values[0]))}")
    print(f"wrapped: {', '.join(map(str, values[1]))}")
same = counts[0] == [1, 1, 1] and min(counts[1]) > 1 and averages[1][2] > 2 * averages[0][2]
sys.exit(0 if same else 1)
PYTHON
