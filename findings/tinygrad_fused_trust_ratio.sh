#!/usr/bin/env bash
# tinygrad 0.14.0 with its device PYTHON, which needs no compiler; Python 3.11 or newer.
#
# LARS and LAMB scale the update of each layer by the norm of that layer's weights over the norm of its
# update. In tinygrad all optimizers take fused=True (or FUSE_OPTIM=1), which is meant to save kernels:
# it joins all parameters into one buffer, makes the step there, and splits the result. AdamW and SGD
# do the same as without it. But LARS and LAMB then see one layer, and take one ratio of the norms over
# the whole model for all: the option makes another optimizer of them, without a word. (Muon refuses it.)
# The layers with small weights get steps as large as those with large weights.
#
# Seen, lr=0.01, 3 steps from a layer of 1 with a gradient of 1 and a layer of 100 with one of 0.01:
#   LAMB: 0.9703 and 97.0299, fused -0.7222 and 98.278
#   LARS: 0.9999 and 99.9944, fused 0.9961 and 99.9999
#   AdamW: 0.9697 and 99.94, fused 0.9697 and 99.94
#   SGD: 0.97 and 99.9997, fused 0.97 and 99.9997
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tinygrad==0.14.0
cd "$folder"
# tinygrad would read the variable PYTHON too.
env -u PYTHON DEV=PYTHON HOME="$folder" CACHEDB="$folder/cache.db" venv/bin/python - <<'PYTHON'
import sys

from tinygrad import Tensor
from tinygrad.helpers import Context
from tinygrad.nn.optim import LAMB, LARS, SGD, AdamW


def walk(kind, fused):
    small = Tensor([1.0] * 4).is_param_(True)
    large = Tensor([100.0] * 2).is_param_(True)
    optimizer = kind([small, large], lr=0.01, fused=fused)
    with Context(TRAINING=1):
        for _ in range(3):
            small.grad, large.grad = Tensor([1.0] * 4), Tensor([0.01] * 2)
            optimizer.step()
    return [round(param.tolist()[0], 4) for param in (small, large)]


found = {kind.__name__: [walk(kind, fused) for fused in (False, True)] for kind in (LAMB, LARS, AdamW, SGD)}
for name, (each, fused) in found.items():
    print(f"{name}: {each[0]} and {each[1]}, fused {fused[0]} and {fused[1]}")
same = [name for name, (each, fused) in found.items() if each == fused]
lamb, fused = found["LAMB"]
sys.exit(0 if same == ["AdamW", "SGD"] and lamb[0] > 0.9 and fused[0] < 0 else 1)
PYTHON
