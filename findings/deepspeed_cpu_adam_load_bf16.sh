#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, on a CPU; Python 3.10 or newer, g++.
#
# DeepSpeedCPUAdam(params, fp32_optimizer_states=True), the default, keeps the moments of bfloat16
# parameters in float32. After load_state_dict they are bfloat16, also if the file has float32, and
# stay so for the rest of the run: torch's load_state_dict casts states to the dtype of their
# parameter, and the step accepts moments of both dtypes. With the default decay of 0.999, a second
# moment in bfloat16 stays where it is when gradients become smaller, because a thousandth of it is
# lost in rounding. So a run that is resumed takes smaller steps than one that goes on.
#
# Seen, for 200 steps with gradients of 1 and 400 with gradients of 0.1 after them:
#   moments: torch.float32, in the file: torch.float32, after the load: torch.bfloat16
#   second moment at the load: 0.181, 400 steps later without a load: 0.125, with it: 0.182
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
import copy
import sys

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def train(param, optimizer, steps, gradient):
    for _ in range(steps):
        param.grad = torch.full_like(param, gradient)
        optimizer.step()


param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
optimizer = DeepSpeedCPUAdam([param], lr=1e-3)
train(param, optimizer, 200, 1.0)
file = copy.deepcopy(optimizer.state_dict())

resumed_param = torch.nn.Parameter(param.detach().clone())
resumed = DeepSpeedCPUAdam([resumed_param], lr=1e-3)
resumed.load_state_dict(copy.deepcopy(file))
state, resumed_state = optimizer.state[param], resumed.state[resumed_param]
dtypes = [each["exp_avg_sq"].dtype for each in (state, file["state"][0], resumed_state)]
print(f"moments: {dtypes[0]}, in the file: {dtypes[1]}, after the load: {dtypes[2]}")

train(param, optimizer, 400, 0.1)
train(resumed_param, resumed, 400, 0.1)
values = (file["state"][0], state, resumed_state)
squares = [round(each["exp_avg_sq"].float().mean().item(), 3) for each in values]
print(
    f"second moment at the load: {squares[0]:.3f}, 400 steps later without a load: "
    f"{squares[1]:.3f}, with it: {squares[2]:.3f}"
)
same = dtypes == [torch.float32, torch.float32, torch.bfloat16]
sys.exit(0 if same and squares == [0.181, 0.125, 0.182] else 1)
PYTHON
