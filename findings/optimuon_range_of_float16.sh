#!/usr/bin/env bash
# optimuon 0.1.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Muon divides an update by its norm, so the length of the gradients should not matter. This Muon by default
# casts the update to float16 first and takes the norm then, in float16. So a matrix whose gradients are
# below 1e-7, as in a mean over many tokens, has an update of 0 and stays as it is, one of about 1e-7 gets
# what is left of it after rounding, and from a norm of 65504 on the norm is inf and nothing moves either. From
# elements of about 1e6 on (a loss scale that was not divided out) parameters become NaN. No message is
# given. With gram_ns=False the work is done in bfloat16, and the step has its length.
#
# Seen, the length of the first step (root mean square) for gradients of noise times a factor, lr=1:
#   1e-08: 0.00, with gram_ns=False 0.14
#   1e-07: 0.06, with gram_ns=False 0.14
#   0.0001: 0.15, with gram_ns=False 0.15
#   1: 0.15, with gram_ns=False 0.15
#   1000: 0.15, with gram_ns=False 0.15
#   100000: 0.00, with gram_ns=False 0.15
#   1e+06: nan, with gram_ns=False 0.15
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q optimuon==0.1.1
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from optimuon import Muon


def length(factor, **options):
    weight = torch.nn.Parameter(torch.zeros(32, 48))
    optimizer = Muon([weight], lr=1.0, weight_decay=0.0, **options)
    noise = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    weight.grad = factor * noise
    optimizer.step()
    return weight.detach().square().mean().sqrt().item()


factors = (1e-8, 1e-7, 1e-4, 1.0, 1e3, 1e5, 1e6)
found = {}
for factor in factors:
    found[factor] = length(factor), length(factor, gram_ns=False)
    print(f"{factor:g}: {found[factor][0]:.2f}, with gram_ns=False {found[factor][1]:.2f}")
usual = found[1.0][0]
even = all(abs(found[factor][0] / usual - 1) < 0.1 for factor in (1e-4, 1e3))
lost = found[1e-8][0] == found[1e5][0] == 0 and found[1e6][0] != found[1e6][0]
sys.exit(0 if even and lost and all(abs(each / usual - 1) < 0.1 for _, each in list(found.values())[2:]) else 1)
PYTHON
