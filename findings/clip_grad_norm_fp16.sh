#!/usr/bin/env bash
# clip_grad_norm_ of fp16 gradients makes all of them 0, or NaN, where their norm is above 65504.
#
# torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# torch.nn.utils.clip_grad_norm_ computes the norm in the gradients' dtype. 4,096 elements of 2,000
# have a norm of 128,000, which float16 can't hold: the norm is inf, though every gradient is finite.
# Then the coefficient is max_norm / inf. With max_norm=1.0 it is 0, and the clipped gradients have a
# norm of 0 instead of 1: the step is lost, and nothing says so. With max_norm=inf, which is in use to
# measure the norm alone, it is inf / inf: finite gradients become NaN. float32 and bfloat16
# gradients of the same size are clipped to 1, and left alone by inf. Under a loss scale such
# gradients are the usual case. error_if_nonfinite=True raises instead.
#
# Output seen:
#
# float16  max_norm=1.0  returned inf     gradient 0.0
# float16  max_norm=inf  returned inf     gradient nan
# bfloat16 max_norm=1.0  returned 128000  gradient 0.015625
# bfloat16 max_norm=inf  returned 128000  gradient 2000.0
# float32  max_norm=1.0  returned 128000  gradient 0.015625
# float32  max_norm=inf  returned 128000  gradient 2000.0
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy
cat > "$folder/run.py" << 'END'
import math
import sys

import torch

seen = []
for name in ("float16", "bfloat16", "float32"):
    for limit in (1.0, math.inf):
        param = torch.nn.Parameter(torch.zeros(4096, dtype=getattr(torch, name)))
        param.grad = torch.full_like(param, 2000.0)
        norm = torch.nn.utils.clip_grad_norm_([param], limit).item()
        (grad,) = set(map(str, param.grad.tolist()))
        seen.append((f"{norm:.0f}", grad))
        print(f"{name:8} max_norm={limit}  returned {norm:<7.0f} gradient {grad}")
of_16_bits = [("inf", "0.0"), ("inf", "nan")]
sys.exit(seen != of_16_bits + [("128000", "0.015625"), ("128000", "2000.0")] * 2)
END
cd "$folder"
env/bin/python -W ignore run.py
