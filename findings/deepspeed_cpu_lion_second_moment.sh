#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, on a CPU; Python 3.10 or newer, g++.
#
# Lion has one moment, which is why it is chosen where memory is short. DeepSpeedCPULion allocates
# two: "exp_avg", and an "exp_avg_sq" that no step reads or writes, which stays zero and is saved in
# every state dict. So its states take as much host memory as those of DeepSpeedCPUAdam.
#
# Seen, after 10 steps of a million float32 parameters:
#   DeepSpeedCPULion: 8.0 bytes per parameter in ['exp_avg', 'exp_avg_sq']; zero: ['exp_avg_sq']
#   DeepSpeedCPUAdam: 8.0 bytes per parameter in ['exp_avg', 'exp_avg_sq']; zero: []
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
from deepspeed.ops.lion import DeepSpeedCPULion

found = []
for kind in (DeepSpeedCPULion, DeepSpeedCPUAdam):
    param = torch.nn.Parameter(torch.ones(1_000_000))
    optimizer = kind([param], lr=1e-3)
    for step in range(10):
        param.grad = torch.full_like(param, step - 2.5)
        optimizer.step()
    moments = {
        name: value
        for name, value in optimizer.state_dict()["state"][0].items()
        if isinstance(value, torch.Tensor)
    }
    size = sum(moment.nbytes for moment in moments.values()) / param.numel()
    zero = [name for name, moment in moments.items() if not moment.any()]
    found.append((size, zero))
    print(f"{kind.__name__}: {size:.1f} bytes per parameter in {list(moments)}; zero: {zero}")
sys.exit(0 if found == [(8.0, ["exp_avg_sq"]), (8.0, [])] else 1)
PYTHON
