#!/usr/bin/env bash
# torch 2.13.0 with lion-pytorch 0.2.5, on a CPU; Python 3.10 or newer.
#
# copy.deepcopy() and pickle of an object take all of its attributes along. Of an optimizer they take
# three: defaults, state and groups. Whatever else a class keeps on itself is gone in the copy. Hooks of
# steps and of state dicts are, without a word: an average or a guard in a hook is not updated by the
# copy's steps. What a fused optimizer tells a GradScaler is gone too, so the scaler unscales by itself
# then. Classes that keep an option or their parameters on themselves fail at the copy's first
# step: torch's own LBFGS, and Lion of lion_pytorch. torch.save(optimizer) is such a copy.
#
# Seen, of the optimizer and of its copies by deepcopy and by pickle:
#   hooks called in a step of SGD: 1, 0, 0
#   AdamW(fused=True) divides by the scale: True, False, False
#   step of LBFGS: done, AttributeError, AttributeError
#   step of Lion: done, AttributeError, AttributeError
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q lion-pytorch==0.2.5
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import copy
import pickle
import sys

import torch
from lion_pytorch import Lion


def three(kind, look, **options):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=0.1, **options)
    if kind is torch.optim.SGD:
        optimizer.register_step_post_hook(count)
    pair = optimizer, weight
    pairs = [pair, copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))]
    return [look(*each) for each in pairs]


calls = []


def count(*_):
    calls.append(1)


def step(optimizer, weight):
    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    calls.clear()
    try:
        optimizer.step(closure)
    except AttributeError:
        return "AttributeError"
    return "done"


found = {
    "hooks called in a step of SGD": three(torch.optim.SGD, lambda *pair: [step(*pair), len(calls)][1]),
    "AdamW(fused=True) divides by the scale": three(
        torch.optim.AdamW, lambda each, _: getattr(each, "_step_supports_amp_scaling", False), fused=True
    ),
    "step of LBFGS": three(torch.optim.LBFGS, step),
    "step of Lion": three(Lion, step),
}
for name, values in found.items():
    print(f"{name}: {', '.join(map(str, values))}")
failing = ["done", "AttributeError", "AttributeError"]
sys.exit(0 if list(found.values()) == [[1, 0, 0], [True, False, False], failing, failing] else 1)
PYTHON
