#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# torch.optim.AdamW(params, fused=True) is no longer fused after it has loaded the state dict of an
# AdamW that was made without the option: load_state_dict takes `fused` from the file, where it is
# None, and the constructor's option is lost without a word. What the optimizer has told
# torch.amp.GradScaler, that it divides by the scale itself, stays; so the scaler hands over the
# scale, and the next step is refused. Without a scaler nothing is said at all.
#
# Seen:
#   fused before the load: True, after it: None
#   without a scaler: steps
#   under torch.amp.GradScaler: AssertionError: Expected grad_scale and found_inf to be None
#   under it, with group["fused"] = True after the load: steps
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import torch


def step(model, optimizer, scaler=None):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 4)).sum()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def outcome(with_scaler, is_set_again=False):
    model = torch.nn.Linear(4, 2)
    source = torch.optim.AdamW(model.parameters())
    step(model, source)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    fused.load_state_dict(source.state_dict())
    if is_set_again:
        for group in fused.param_groups:
            group["fused"] = True
    try:
        step(model, fused, torch.amp.GradScaler("cpu") if with_scaler else None)
    except AssertionError as error:
        return f"AssertionError: {error}"
    return "steps"


model = torch.nn.Linear(4, 2)
plain = torch.optim.AdamW(model.parameters())
fused = torch.optim.AdamW(model.parameters(), fused=True)
before = fused.param_groups[0]["fused"]
fused.load_state_dict(plain.state_dict())
after = fused.param_groups[0]["fused"]
found = [outcome(False), outcome(True), outcome(True, is_set_again=True)]
print(f"fused before the load: {before}, after it: {after}")
print("without a scaler:", found[0])
print("under torch.amp.GradScaler:", found[1])
print('under it, with group["fused"] = True after the load:', found[2])
refused = "AssertionError: Expected grad_scale and found_inf to be None"
sys.exit(0 if (before, after, *found) == (True, None, "steps", refused, "steps") else 1)
PYTHON
