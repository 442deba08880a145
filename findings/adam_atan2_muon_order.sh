#!/usr/bin/env bash
# adam-atan2-pytorch 0.4.1 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# The state of an optimizer belongs to parameters by their position in the groups. torch's keep the
# order in which they got the parameters, so the same code loads each state where it was saved.
# MuonAdamAtan2 takes the parameters for Muon and all parameters, and removes the former from the latter
# with a difference of two Python sets. The order of a set of tensors follows their addresses, so the
# group for Adam has another order in each run, and in each optimizer of the same run. Loading a state
# dict then gives the moments of one bias to another one of the same size, without an error.
#
# Seen, 32 layers of 4 x 4, the i-th bias (from 1) with a gradient of i, saved after a step and loaded
# into an optimizer that was made in the same way (the count can differ by a few from run to run):
#   biases in the order of the model: False
#   biases with the moments of another one: 32 of 32
#   weights with the moments of another one: 0 of 32
# Exits with 1 if biases are in order or keep their moments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q adam-atan2-pytorch==0.4.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import io
import sys

import torch
from adam_atan2_pytorch import MuonAdamAtan2

LAYERS = 32


def made():
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(LAYERS))
    return layers, MuonAdamAtan2([layer.weight for layer in layers], layers.parameters(), lr=1e-3)


layers, optimizer = made()
for number, layer in enumerate(layers, 1):
    layer.weight.grad = torch.full_like(layer.weight, number)
    layer.bias.grad = torch.full_like(layer.bias, number)
optimizer.step()
file = io.BytesIO()
torch.save([layers.state_dict(), optimizer.state_dict()], file)
file.seek(0)

# All of the first run stays alive, so none of its addresses is used again.
resumed, loaded = made()
state_of_layers, state = torch.load(file)
resumed.load_state_dict(state_of_layers)
loaded.load_state_dict(state)

biases = [id(layer.bias) for layer in layers]
in_order = [id(param) for param in optimizer.param_groups[0]["params"]] == biases
wrong = {
    name: sum(
        not torch.equal(
            loaded.state[getattr(new, name)]["exp_avg"],
            optimizer.state[getattr(old, name)]["exp_avg"],
        )
        for old, new in zip(layers, resumed)
    )
    for name in ("bias", "weight")
}
print("biases in the order of the model:", in_order)
print(f"biases with the moments of another one: {wrong['bias']} of {LAYERS}")
print(f"weights with the moments of another one: {wrong['weight']} of {LAYERS}")
sys.exit(0 if not in_order and wrong["bias"] > 0 and wrong["weight"] == 0 else 1)
PYTHON
