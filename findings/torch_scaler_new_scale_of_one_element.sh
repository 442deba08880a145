#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# GradScaler.update(new_scale) says that a new scale is a float or a tensor with one element, and its
# check counts elements. But the scale has no dimensions, and a tensor of shape (1,), which passes the
# check, fails afterwards in the copy, with an error about broadcasting that names neither the scale
# nor the argument. A scale that is kept as a tensor of one dimension, as in a buffer of a module, has
# to be reshaped before.
#
# Seen:
#   shape (): the scale is 8.0
#   shape (1,): RuntimeError: output with shape [] doesn't match the broadcast shape [1]
# Exits with 1 if this has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import torch


def result_of(new_scale):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    try:
        scaler.update(new_scale)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return f"the scale is {scaler.get_scale()}"


found = [f"shape {shape}: {result_of(torch.full(shape, 8.0))}" for shape in ((), (1,))]
print(*found, sep="\n")
failure = "RuntimeError: output with shape [] doesn't match the broadcast shape [1]"
sys.exit(found != ["shape (): the scale is 8.0", f"shape (1,): {failure}"])
PYTHON
