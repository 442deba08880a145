#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Adafactor divides a gradient by the root of its mean square, so the length of the gradient should not
# matter: a matrix moves by lr times its own root mean square. torch.optim.Adafactor leaves the first
# eps at None, which stands for the machine epsilon of the parameter's dtype, and bounds that root from
# below with it: 1.2e-7 for float32, but .0078 for bfloat16 and .00098 for float16. The gradients of
# large models are smaller than that in most layers. There the step shrinks in proportion to the
# gradient, and is then lost when the parameter is rounded: in pure bfloat16, for which people choose
# Adafactor, the weights stay as they are, without an error, and the same code trains in float32. A
# first eps of 1e-7 gives bfloat16 the distance of float32 (float16 becomes NaN with it, because the
# square of 1e-7 is 0 there).
#
# Seen, matrices of ones, lr=0.1, 4 steps with gradients of 0.1, 0.01, 0.001 and 0.0001; how far they moved:
#   float32: 0.3439 0.3439 0.3439 0.3439
#   bfloat16: 0.3477 0.3477 0.0469 0.0
#   float16: 0.3438 0.3438 0.3438 0.0405
#   bfloat16, eps=(1e-7, 1e-3): 0.3477 0.3477 0.3477 0.3477
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


def moved(dtype, size, **options):
    param = torch.nn.Parameter(torch.ones(16, 16, dtype=dtype))
    optimizer = torch.optim.Adafactor([param], lr=0.1, weight_decay=0.0, **options)
    for _ in range(4):
        param.grad = torch.full_like(param, size)
        optimizer.step()
    return round(1.0 - param.float().mean().item(), 4)


rows = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "bfloat16, eps=(1e-7, 1e-3)": (torch.bfloat16, {"eps": (1e-7, 1e-3)}),
}
found = []
for name, (dtype, options) in rows.items():
    found.append([moved(dtype, size, **options) for size in (0.1, 0.01, 0.001, 0.0001)])
    print(f"{name}: {' '.join(map(str, found[-1]))}")
expected = [
    [0.3439, 0.3439, 0.3439, 0.3439],
    [0.3477, 0.3477, 0.0469, 0.0],
    [0.3438, 0.3438, 0.3438, 0.0405],
    [0.3477, 0.3477, 0.3477, 0.3477],
]
sys.exit(0 if found == expected else 1)
PYTHON
