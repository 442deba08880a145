#!/usr/bin/env bash
# torch 2.13.0 with kron-torch 0.3.3, on a CPU; Python 3.10 or newer.
#
# Optimizer.load_state_dict() moves the tensors in a state to their parameter, also within lists and
# tuples, and should leave everything else as it is. Numbers and bytes it does leave. But text can be
# iterated, so it is taken for a list: str() is called with a generator, and "matrix" becomes the text
# "<generator object ... at 0x...>". No error, no warning; the state dict itself keeps the right text.
# So an optimizer that stores a mode or an expression as text is broken by each resume. Kron of
# kron_torch keeps the expressions of its einsums there: its first step after a load raises an error about
# a subscript. Of the other types that a state may have, an OrderedDict becomes a dict.
#
# Seen, what comes back of a state:
#   bytes: b'matrix'
#   a number: 3
#   text: <generator object
#   text in a list: ['<generator object
#   Kron, first step after the load: ValueError
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q kron-torch==0.3.3
cd "$folder"
TORCH_COMPILE_DISABLE=1 venv/bin/python -W ignore - <<'PYTHON'
import contextlib
import io
import sys

import torch
from kron_torch import Kron


def made(kind):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.arange(12.0).reshape(4, 3) + 1
    with contextlib.redirect_stdout(io.StringIO()):
        return weight, kind([weight], lr=0.01)


def loaded(kind, state_dict):
    weight, optimizer = made(kind)
    optimizer.load_state_dict(state_dict)
    return weight, optimizer


values = {"bytes": b"matrix", "a number": 3, "text": "matrix", "text in a list": ["matrix"]}
weight, optimizer = made(torch.optim.SGD)
optimizer.state[weight].update(values)
weight, optimizer = loaded(torch.optim.SGD, optimizer.state_dict())
found = {name: str(optimizer.state[weight][name]).split(" Optimizer.")[0] for name in values}
for name, value in found.items():
    print(f"{name}: {value}")

with contextlib.redirect_stdout(io.StringIO()):
    _, kron = made(Kron)
    kron.step()
    _, resumed = loaded(Kron, kron.state_dict())
    try:
        resumed.step()
        error = "none"
    except Exception as raised:
        error = type(raised).__name__
print("Kron, first step after the load:", error)
broken = all("generator object" in found[name] for name in ("text", "text in a list"))
kept = found["bytes"] == "b'matrix'" and found["a number"] == "3"
sys.exit(0 if broken and kept and error != "none" else 1)
PYTHON
