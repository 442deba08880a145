#!/usr/bin/env bash
# dadaptation 3.2 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# The optimizers of dadaptation estimate one step size for all groups. A group may have lr=0, to freeze
# it: those of them that look at the groups refuse all values of lr but the largest one and 0, with an
# error that says so. DAdaptAdam and DAdaptSGD leave such a group alone. DAdaptLion accepts the 0 and
# then steps the group with the rate of the others, like a group that is not frozen at all. DAdaptAdan
# and DAdaptAdaGrad read the lr of the first group only, and move the frozen one too, without a word.
#
# Seen, two parameters of 1, the second one in a group with lr=0, 10 steps with a gradient of 1:
#   DAdaptAdam: first moved, frozen stays
#   DAdaptSGD: first moved, frozen stays
#   DAdaptLion: both moved, to the same value
#   DAdaptAdan: both moved, to the same value
#   DAdaptAdaGrad: both moved, to the same value
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy "setuptools<82"
"$folder/venv/bin/pip" install -q --no-build-isolation dadaptation==3.2
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import dadaptation
import torch


def outcome(name):
    first, frozen = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [frozen], "lr": 0.0}]
    optimizer = getattr(dadaptation, name)(groups, lr=1.0, d0=1e-3)
    for _ in range(10):
        for param in (first, frozen):
            param.grad = torch.ones(4)
        optimizer.step()
    if (first == 1).any():
        return "first stays"
    if torch.equal(first, frozen):
        return "both moved, to the same value"
    return "first moved, frozen stays" if (frozen == 1).all() else "both moved"


names = ("DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdan", "DAdaptAdaGrad")
found = [outcome(name) for name in names]
for name, seen in zip(names, found):
    print(f"{name}: {seen}")
moved = ["both moved, to the same value"] * 3
sys.exit(0 if found == ["first moved, frozen stays"] * 2 + moved else 1)
PYTHON
