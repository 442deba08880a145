#!/usr/bin/env bash
# nadir 0.1.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Optimizers of torch take their options from the group, so that biases and norms can be in a group with
# weight_decay=0. Those of nadir accept such groups, keep the options in them and save them, and read
# nothing but lr: weight_decay, momentum and betas come from the config for all. So a group with
# weight_decay=0 decays like the others, and betas that a schedule or a loaded state dict writes into a
# group have no effect. Also, eps of Adam is added below the root: 1e-8 bounds the denominator at 1e-4, and
# gradients of 1e-6 get a hundredth of the step that torch.optim.Adam makes of them.
#
# Seen, weights of 1 with a gradient of 0, lr=0.1, a decay of 0.1, and 0 in the group of the second one
#   AdamW of torch: 0.99, 1.0
#   Adam: 0.99, 0.99
#   SGD: 0.99, 0.99
#   Lion: 0.99, 0.99
#   RMSProp: 0.99, 0.99
# Seen, the first step of Adam with lr=0.1 and gradients of 1, 1e-4 and 1e-6:
#   torch: -0.1, -0.1, -0.099
#   nadir: -0.1, -0.0707, -0.001
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q nadir==0.1.1
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import nadir
import torch


def decayed(make):
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = make([{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}])
    assert optimizer.param_groups[1]["weight_decay"] == 0
    for weight in weights:
        weight.grad = torch.zeros(4)
    optimizer.step()
    return [round(weight.detach()[0].item(), 4) for weight in weights]


def first_step(make, size):
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), size)
    make([weight]).step()
    return float(f"{weight.detach()[0].item():.3g}")


def maker(name, **options):
    config = getattr(nadir, f"{name}Config")(lr=0.1, **options)
    return lambda parameters: getattr(nadir, name)(parameters, config)


kinds = {"AdamW of torch": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)}
for name in ("Adam", "SGD", "Lion", "RMSProp"):
    kinds[name] = maker(name, weight_decay=0.1)
found = {name: decayed(make) for name, make in kinds.items()}
for name, values in found.items():
    print(f"{name}: {', '.join(map(str, values))}")
steps = {
    "torch": [first_step(lambda each: torch.optim.Adam(each, lr=0.1), size) for size in (1.0, 1e-4, 1e-6)],
    "nadir": [first_step(maker("Adam"), size) for size in (1.0, 1e-4, 1e-6)],
}
for name, values in steps.items():
    print(f"{name}: {', '.join(map(str, values))}")
same = found.pop("AdamW of torch") == [0.99, 1.0] and all(each == [0.99, 0.99] for each in found.values())
sys.exit(0 if same and steps["torch"][2] < -0.09 and steps["nadir"][2] > -0.01 else 1)
PYTHON
