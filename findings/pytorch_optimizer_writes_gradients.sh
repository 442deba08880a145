#!/usr/bin/env bash
# pytorch_optimizer 4.1.0 with torch 2.13.0, on a CPU; Python 3.11.
#
# A step of torch's optimizers reads the gradients and leaves them as they are. Nine optimizers of this
# package keep what they compute in param.grad: after step(), it holds a momentum, a clipped or a
# normalized gradient, or one with the decay added. For Adan this depends on an option that should
# only decide about speed: its loop over parameters (foreach=False, and all parameters that torch's
# foreach functions do not take) leaves the negative of the gradient, and the other way leaves the
# gradient. ScionLight documents it; the others are silent.
# What goes wrong: a norm that is logged after the step is of something else; and a loop that does not
# call zero_grad() before the next backward(), because it wants to step twice with one gradient or to
# keep a share of it, adds to that.
#
# Seen, the largest change of a gradient by three steps, relative to its largest element:
#   adalite 0.49, adan (foreach=False) 2.0, grokfastadamw 3.1, lars 1.7, novograd 0.84, ranger 0.38,
#   schedulefreeadamw 1.2, scionlight 0.10, stablespam 0.86; adamw, adan, lion and sgdw 0.0
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy pytorch_optimizer==4.1.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from pytorch_optimizer import load_optimizer

torch.set_num_threads(1)


def change(name, **options):
    """Returns how far three steps change gradients, relative to their largest element."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 6), (6,))]
    optimizer = load_optimizer(name)(params, lr=1e-2, **options)
    largest = 0.0
    for _ in range(3):
        grads = [torch.randn_like(param) for param in params]
        for param, grad in zip(params, grads):
            param.grad = grad.clone()
        optimizer.step()
        for param, grad in zip(params, grads):
            largest = max(largest, ((param.grad - grad).abs().max() / grad.abs().max()).item())
    return largest


loop = {"foreach": False}
writing = "adalite grokfastadamw lars novograd ranger schedulefreeadamw scionlight stablespam"
written = {name: change(name) for name in writing.split()}
written["adan (foreach=False)"] = change("adan", **loop)
reading = {name: change(name) for name in ("adamw", "adan", "lion", "sgdw")}
for name, far in {**written, **reading}.items():
    print(f"{name}: {far:.2g}")
sys.exit(not (min(written.values()) > 0.05 and max(reading.values()) == 0.0))
PYTHON
