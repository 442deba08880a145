#!/usr/bin/env bash
# keras 3.15.1 on torch 2.13.0, on a CPU; Python 3.11 or newer.
#
# set_weights() of an optimizer of Keras takes arrays for its variables, in the order of `variables`, and
# so puts back what was kept of an optimizer. LossScaleOptimizer, which Keras puts around the optimizer
# of each model with the policy "mixed_float16", lists in `variables` its own four and then all of the
# optimizer inside. Its set_weights() however goes through its own only, side by side with the arrays,
# and ends when they do. So it accepts the full list, restores the scale and its counter, and leaves
# the moments, the learning rate and the iteration of the optimizer inside as they are, without an
# error, although a wrong shape is one.
#
# Seen, Adam after 3 steps with a gradient of 1, put into an Adam of the same build:
#   Adam: iteration 3, momentum 0.271, velocity 0.002997
#   LossScaleOptimizer(Adam): step_counter 3, iteration 0, momentum 0.0, velocity 0.0
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


def built(wrap):
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = keras.optimizers.Adam(0.1)
    if wrap:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    optimizer.build([variable])
    return optimizer


def restored(wrap):
    """The state of an optimizer that was given all variables of one that made three steps."""
    first, second = built(wrap), built(wrap)
    for _ in range(3):
        first.apply([keras.ops.ones(2)])
    second.set_weights([keras.ops.convert_to_numpy(variable) for variable in first.variables])
    inner = second.inner_optimizer if wrap else second
    state = {} if not wrap else {"step_counter": int(second.step_counter)}
    state["iteration"] = int(inner.iterations)
    for variable in inner.variables:
        for name in ("momentum", "velocity"):
            if variable.path.endswith(name):
                state[name] = round(keras.ops.convert_to_numpy(variable)[0].item(), 6)
    return state


found = restored(False), restored(True)
for name, state in zip(("Adam", "LossScaleOptimizer(Adam)"), found):
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in state.items())}")
expected = (
    {"iteration": 3, "momentum": 0.271, "velocity": 0.002997},
    {"step_counter": 3, "iteration": 0, "momentum": 0.0, "velocity": 0.0},
)
sys.exit(0 if found == expected else 1)
PYTHON
