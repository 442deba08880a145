#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, on a CPU; Python 3.10 or newer, g++.
#
# DeepSpeedCPUAdam.step() leaves a parameter that is not contiguous as it is: a convolution's weight
# in torch.channels_last, or a transposed matrix. It raises no error, and the step counter of the
# state advances, but the parameter and its moments keep their values, because the update is made on
# contiguous copies that nobody copies back. In a model in channels_last, biases and convolutions of
# 1 x 1 learn, and the other convolutions stay at their initial values. The engine of DeepSpeed
# flattens parameters and is not affected; a loop that uses the class alone is.
#
# Seen, after 3 steps with gradients of 1 and lr=0.1:
#   contiguous: contiguous True, step 3, moved by 0.30, first moment 0.271
#   channels_last: contiguous False, step 3, moved by 0.00, first moment 0.000
#   transposed: contiguous False, step 3, moved by 0.00, first moment 0.000
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy ninja "setuptools<82"
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cd "$folder"
export PATH=$folder/venv/bin:$PATH TORCH_EXTENSIONS_DIR=$folder/extensions DS_ACCELERATOR=cpu
python - <<'PYTHON'
import sys

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
starts = {
    "contiguous": weight,
    "channels_last": weight.to(memory_format=torch.channels_last),
    "transposed": weight.view(12, 9).t(),
}
found = []
for name, start in starts.items():
    param = torch.nn.Parameter(start.clone())
    optimizer = DeepSpeedCPUAdam([param], lr=0.1)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizer.state[param]
    moved = (start - param.detach()).mean().item()
    moment = state["exp_avg"].mean().item()
    found.append((param.is_contiguous(), state["step"], round(moved, 2), round(moment, 3)))
    print(
        f"{name}: contiguous {found[-1][0]}, step {found[-1][1]}, moved by {moved:.2f}, "
        f"first moment {moment:.3f}"
    )
same = found == [(True, 3, 0.3, 0.271), (False, 3, 0.0, 0.0), (False, 3, 0.0, 0.0)]
sys.exit(0 if same else 1)
PYTHON
