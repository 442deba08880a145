#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# Parameters that are views of one flat buffer have one version counter. A parameter that is given new
# memory through `.data` keeps that counter, although it no longer shares an element with the others.
# So a write to another former view counts as a write to it: a backward pass that has saved it is
# refused, with the words that it was modified by an inplace operation, although its memory is as it
# was. Two parameters that never shared a buffer are not tied to each other in this way.
#
# Seen:
#   former views: one memory False, versions after a write to the other (1, 1), backward refused
#   apart: one memory False, versions after a write to the other (0, 1), gradient [4.0, 4.0]
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
from torch.nn import Parameter


def result_of(first, other):
    first.data = torch.full((2,), 2.0)
    is_shared = first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    square = (first * first).sum()
    with torch.no_grad():
        other.add_(1.0)
    versions = first._version, other._version
    try:
        square.backward()
        end = f"gradient {first.grad.tolist()}"
    except RuntimeError as error:
        end = "backward refused" if "modified by an inplace operation" in str(error) else repr(error)
    return f"one memory {is_shared}, versions after a write to the other {versions}, {end}"


buffer = torch.ones(4)
views = result_of(Parameter(buffer[:2]), Parameter(buffer[2:]))
apart = result_of(Parameter(torch.ones(2)), Parameter(torch.ones(2)))
print(f"former views: {views}\napart: {apart}")
wanted = "one memory False, versions after a write to the other"
sys.exit((views, apart) != (f"{wanted} (1, 1), backward refused", f"{wanted} (0, 1), gradient [4.0, 4.0]"))
PYTHON
