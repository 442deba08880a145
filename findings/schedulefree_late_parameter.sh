#!/usr/bin/env bash
# schedulefree 1.4.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# A parameter that gets its first gradient late, such as a layer that is unfrozen after some epochs or a
# rarely chosen expert, starts with zero moments. torch.optim.AdamW counts the steps of each parameter,
# so the correction for that start fits and its first step has the length lr. The optimizers of
# schedulefree count the steps of the group. The second moment of the late parameter is then 1 - beta2
# of its squared gradient and not corrected any more, so after 1,000 steps of the others its first step
# is 25 times as long as lr, and up to 31.6 times (the root of 1 / (1 - .999)) later. RAdamScheduleFree,
# which is to do without a warmup, is no exception. The step goes to the sequence z; a tenth of it is
# seen in the weights at once, and the rest follows.
#
# Seen, the first step of a parameter after 0, 10, 100 and 1,000 steps of another one, lr=0.001:
#   torch.optim.AdamW: 0.001 0.001 0.001 0.001
#   AdamWScheduleFree: 0.001 0.003308 0.009804 0.025152
#   RAdamScheduleFree: 0.0 0.000177 0.002122 0.016238
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q schedulefree==1.4.1
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import schedulefree
import torch


def first_step_after(steps, make):
    early, late = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = make([early, late], lr=1e-3, weight_decay=0.0)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(steps):
        early.grad = torch.full((4,), 0.01)
        optimizer.step()
    late.grad = torch.full((4,), 0.01)
    optimizer.step()
    stepped = optimizer.state[late].get("z", late)
    return abs(round(stepped[0].item(), 6))


rows = {
    "torch.optim.AdamW": torch.optim.AdamW,
    "AdamWScheduleFree": schedulefree.AdamWScheduleFree,
    "RAdamScheduleFree": schedulefree.RAdamScheduleFree,
}
found = []
for name, make in rows.items():
    found.append([first_step_after(steps, make) for steps in (0, 10, 100, 1000)])
    print(f"{name}: {' '.join(map(str, found[-1]))}")
expected = [
    [0.001, 0.001, 0.001, 0.001],
    [0.001, 0.003308, 0.009804, 0.025152],
    [0.0, 0.000177, 0.002122, 0.016238],
]
sys.exit(0 if found == expected else 1)
PYTHON
