#!/usr/bin/env bash
# torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# torch.optim.Muon divides the update of a matrix by its norm, so the length of a gradient should not
# matter. But the squares behind the norm are summed in float32. From gradients of about 1e18 on, the
# norm of the update is inf, the update is divided by it and becomes 0, and the parameter stays where
# it is: no error, no NaN, and the momentum keeps the large values, so that later steps with usual
# gradients do not move the parameter either, for dozens of steps. At the other end, gradients of
# 1e-15 give a millionth of the usual step, because the norm is not allowed below eps.
# A loss scale that was not divided out makes gradients large; a mean over many tokens makes them
# small.
#
# Seen, the length of the first step (by root mean square) for gradients of noise times a factor,
# with a learning rate of 1, and whether the momentum is finite:
#   factor 1: 0.13, finite
#   factor 1e+10: 0.13, finite
#   factor 1e+20: 0, finite
#   factor 1e-15: 4.9e-07, finite
#   steps with usual gradients after one of 1e20 until the parameter moves: 46
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


def noise(seed):
    return torch.randn(32, 48, generator=torch.Generator().manual_seed(seed))


def stepped(gradients):
    """Yields how far each step moves a parameter, and whether the momentum is finite."""
    weight = torch.nn.Parameter(noise(0))
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0)
    for gradient in gradients:
        before = weight.detach().clone()
        weight.grad = gradient
        optimizer.step()
        moved = (weight.detach() - before).square().mean().sqrt().item()
        yield moved, bool(optimizer.state[weight]["momentum_buffer"].isfinite().all())


lengths = {}
for factor in (1.0, 1e10, 1e20, 1e-15):
    ((lengths[factor], is_finite),) = stepped([factor * noise(1)])
    print(f"factor {factor:g}: {lengths[factor]:.2g}, {'finite' if is_finite else 'not finite'}")
    assert is_finite
usual = [1e20 * noise(1), *(noise(seed) for seed in range(2, 400))]
waited = next(step for step, (moved, _) in enumerate(stepped(usual)) if moved > 0)
print("steps with usual gradients after one of 1e20 until the parameter moves:", waited)
same = abs(lengths[1e10] / lengths[1.0] - 1) < 0.05
sys.exit(not (same and lengths[1e20] == 0 and lengths[1e-15] < 0.01 * lengths[1.0] and waited > 5))
PYTHON
