#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0 and torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# create_loraplus_optimizer(model, optimizer_cls, lr=, loraplus_lr_ratio=, **kwargs) says that further keyword
# arguments are passed to the optimizer. weight_decay is, and does nothing: each group that the
# function makes has a weight_decay of its own, from an argument loraplus_weight_decay that its docstring
# does not name and that is 0 unless given. The default of AdamW, 0.01, is lost in the same way. The optimizer
# shows the decay that was asked for in `defaults`. Nothing warns.
#
# Seen, sum of the squares of LoRA's A, 100 steps with a gradient of 0 and lr=0.01:
#   weight_decay=0.5: defaults 0.5, groups [0.0, 0.0, 0.0, 0.0], 1.42 became 1.42
#   loraplus_weight_decay=0.5: defaults 0.01, groups [0.5, 0.5, 0.5, 0.0], 1.42 became 0.52
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
from peft.optimizers import create_loraplus_optimizer


def walk(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["0"]))
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16.0, **options
    )
    (a,) = [each for name, each in model.named_parameters() if "lora_A" in name]
    before = a.square().sum().item()
    for _ in range(100):
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        optimizer.step()
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return optimizer.defaults["weight_decay"], decays, before, a.square().sum().item()


found = {}
for name in ("weight_decay", "loraplus_weight_decay"):
    default, decays, before, after = found[name] = walk(**{name: 0.5})
    print(f"{name}=0.5: defaults {default}, groups {decays}, {before:.2f} became {after:.2f}")
ignored = found["weight_decay"][0] == 0.5 and found["weight_decay"][2] == found["weight_decay"][3]
decayed = found["loraplus_weight_decay"][3] < 0.5 * found["loraplus_weight_decay"][2]
sys.exit(0 if ignored and decayed else 1)
PYTHON
