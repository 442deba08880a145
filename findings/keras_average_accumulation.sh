#!/usr/bin/env bash
# keras 3.15.1 on torch 2.13.0, on a CPU; Python 3.11 or newer.
#
# With gradient_accumulation_steps=4 an optimizer of Keras changes its variables in each fourth call,
# and the frequency of its average (use_ema) is said to count such updates. But the average itself
# moves in every call, so the weights of one update enter it four times, and ema_momentum=0.99 works as
# 0.99 ** 4 = 0.96. And ema_overwrite_frequency=3, which writes the average over the weights after the
# third update, does so in all of the four calls before that update is complete: the number of
# updates, rounded down, is the same in all of them. So the weights change in a call that was only
# to accumulate, back to an average without the third update, and that update starts from there.
#
# Seen, SGD from 0 that adds 1 in each update, ema_momentum=0.5:
#   average after updates 1 to 3: 1.0, 1.5, 2.25
#   average after updates 1 to 3 of 4 calls each: 1.0, 1.5, 2.4688
#   weights with ema_overwrite_frequency=3 after updates 1 to 3: 1.0, 2.0, 2.25
#   weights with it after calls 1 to 12: 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.75, 1.75, 1.75, 2.25
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q keras==3.15.1
cd "$folder"
KERAS_BACKEND=torch KERAS_HOME="$folder" venv/bin/python - <<'PYTHON'
import sys

import keras
import numpy as np


def walk(calls, **options):
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, **options)
    optimizer.build([variable])
    average = next(each for each in optimizer.variables if each.path.endswith("average"))
    weights, averages = [], []
    for _ in range(calls):
        optimizer.apply([-keras.ops.ones(1)])
        weights.append(keras.ops.convert_to_numpy(variable).item())
        averages.append(round(keras.ops.convert_to_numpy(average).item(), 4))
    return weights, averages


found = [
    walk(3)[1],
    walk(12, gradient_accumulation_steps=4)[1][3::4],
    walk(3, ema_overwrite_frequency=3)[0],
    walk(12, ema_overwrite_frequency=3, gradient_accumulation_steps=4)[0],
]
for name, values in zip(
    (
        "average after updates 1 to 3",
        "average after updates 1 to 3 of 4 calls each",
        "weights with ema_overwrite_frequency=3 after updates 1 to 3",
        "weights with it after calls 1 to 12",
    ),
    found,
):
    print(f"{name}: {', '.join(map(str, values))}")
expected = [
    [1.0, 1.5, 2.25],
    [1.0, 1.5, 2.4688],
    [1.0, 2.0, 2.25],
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.75, 1.75, 1.75, 2.25],
]
sys.exit(0 if found == expected else 1)
PYTHON
