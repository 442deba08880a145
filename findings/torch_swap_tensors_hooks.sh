#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# torch.utils.swap_tensors exchanges everything between two tensors, and Module.to() uses it when
# torch.__future__.set_swap_module_params_on_conversion(True) is set. A post-accumulate-grad hook is
# torn apart by it: the parameter still lists the hook in `_post_accumulate_grad_hooks`, but autograd
# no longer calls it, and a second hook that is registered afterwards is listed and not called
# either. Code that steps parameters in such hooks silently stops. Assigning the dict to itself
# brings both hooks back.
#
# Seen:
#   before the conversion: 1 of 1 hooks called
#   after it: 0 of 1 hooks called
#   with another hook: 0 of 2 hooks called
#   after assigning the dict to itself: 2 of 2 hooks called
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

torch.__future__.set_swap_module_params_on_conversion(True)
layer = torch.nn.Linear(2, 2, bias=False)
calls = []
seen = []


def report(what):
    calls.clear()
    layer(torch.ones(1, 2, dtype=layer.weight.dtype)).sum().backward()
    listed = len(layer.weight._post_accumulate_grad_hooks)
    seen.append(f"{what}: {len(calls)} of {listed} hooks called")
    print(seen[-1])


layer.weight.register_post_accumulate_grad_hook(lambda param: calls.append("first"))
report("before the conversion")
layer.to(torch.bfloat16)
report("after it")
layer.weight.register_post_accumulate_grad_hook(lambda param: calls.append("second"))
report("with another hook")
layer.weight._post_accumulate_grad_hooks = layer.weight._post_accumulate_grad_hooks
report("after assigning the dict to itself")
sys.exit(
    seen
    != [
        "before the conversion: 1 of 1 hooks called",
        "after it: 0 of 1 hooks called",
        "with another hook: 0 of 2 hooks called",
        "after assigning the dict to itself: 2 of 2 hooks called",
    ]
)
PYTHON
