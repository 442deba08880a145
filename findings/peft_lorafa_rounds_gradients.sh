#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0 and torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# LoRA-FA's optimizer multiplies the gradient of B by a small matrix before Adam's update. It does so in
# an autocast region for bfloat16, whatever dtype the training has: only the hardware is asked. A training
# in float32, without autocast, so gets gradients with 8 bits. Both moments are made of them, and the states
# are float32 and look as usual. There is no option for it, and torch.autocast("cpu", enabled=False) around
# step() has no effect.
#
# Seen, the first moment of B after a step, beside the same product in float64: relative error
#   float32 model: 0.0037
#   float32 model, autocast switched off around step(): 0.0037
#   a product in float32: 0.0000003
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q peft==0.21.2 transformers==5.24.0 accelerate==1.15.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer


def error(moment, wanted):
    return ((moment.double() - wanted).norm() / wanted.norm()).item()


torch.manual_seed(0)
start = torch.nn.Linear(64, 64)
inputs = torch.randn(16, 64)
found = []
for switched_off in (False, True):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=["0"]))
    optimizer = create_lorafa_optimizer(model, r=8, lora_alpha=8, lr=1e-3)
    model(inputs).square().mean().backward()
    named = dict(model.named_parameters())
    (a,) = [each.detach() for name, each in named.items() if "lora_A" in name]
    (b,) = [each for name, each in named.items() if "lora_B" in name]
    grad = b.grad.clone()
    with torch.autocast("cpu", enabled=False) if switched_off else torch.no_grad():
        optimizer.step()
    ((name, state),) = [each for each in optimizer.state.items() if "exp_avg_B" in each[1]]
    moment = state["exp_avg_B"]
    assert moment.dtype == torch.float32
    exact = 0.1 * grad.double() @ torch.linalg.pinv(a.double() @ a.double().T)
    found.append(error(moment, exact))
product = error(0.1 * grad @ torch.linalg.pinv(a @ a.T), exact)
print(f"float32 model: {found[0]:.4f}")
print(f"float32 model, autocast switched off around step(): {found[1]:.4f}")
print(f"a product in float32: {product:.7f}")
sys.exit(0 if min(found) > 5e-4 and product < 1e-5 else 1)
PYTHON
