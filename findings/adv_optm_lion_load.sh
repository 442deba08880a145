#!/usr/bin/env bash
# adv-optm 2.5.16 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# load_state_dict() of these optimizers puts the dtypes of their states right after torch's load has cast
# them, and asks the group for its state precision. Lion_adv is the only one without such an option, and
# with the same call: so it can save a state dict, and can't load any, its own of the same build
# included, whatever its options are. The KeyError names a key that is in no documentation. One finds out
# at the first resume. The other seven optimizers load theirs.
#
# Seen, a state dict that is loaded into an optimizer of the same class and options:
#   AdamW_adv: loaded
#   Adopt_adv: loaded
#   Prodigy_adv: loaded
#   AdaMuon_adv: loaded
#   Muon_adv: loaded
#   SignSGD_adv: loaded
#   SinkSGD_adv: loaded
#   Lion_adv: KeyError: 'actual_state_precision'
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q adv-optm==2.5.16
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import adv_optm
import torch

names = "AdamW Adopt Prodigy AdaMuon Muon SignSGD SinkSGD Lion"
found = []
for name in (f"{each}_adv" for each in names.split()):
    optimizers = []
    for _ in range(2):
        weight = torch.nn.Parameter(torch.ones(8, 8))
        optimizers.append(getattr(adv_optm, name)([weight], lr=1e-3))
        weight.grad = torch.arange(64.0).reshape(8, 8) + 1
    optimizers[0].step()
    try:
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        optimizers[1].step()
        found.append("loaded")
    except KeyError as error:
        found.append(f"KeyError: {error}")
    print(f"{name}: {found[-1]}")
sys.exit(0 if found[:-1] == ["loaded"] * 7 and found[-1].startswith("KeyError") else 1)
PYTHON
