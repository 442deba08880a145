#!/usr/bin/env bash
# jmp 0.0.4 with jax 0.10.0 on a CPU; Python 3.11 or newer.
#
# jmp.DynamicLossScale is meant to be passed through jitted train steps, and has min_loss_scale, below
# which overflows do not lower the scale. But as a tree it consists of the scale and the counter, with
# period and factor beside them, and min_loss_scale is left out. Whatever takes it apart and puts it
# together (jax.jit, pmap, scan, tree_map, a checkpoint that stores trees) returns one with the default
# bound of 1, also from then on. So the bound holds only where nothing is compiled.
#
# Seen, from a scale of 4096 with min_loss_scale=1024, after 3 and after 20 overflows in a row:
#   called directly: 1024.0, 1024.0
#   under jax.jit: 512.0, 1.0
#   min_loss_scale after jax.tree_util.tree_map(lambda x: x, scale): 1.0
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.0 jaxlib==0.10.0 jmp==0.0.4
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import sys

import jax
import jax.numpy as jnp
import jmp

start = jmp.DynamicLossScale(jnp.asarray(2.0**12), min_loss_scale=jnp.asarray(2.0**10))


def after_overflows(adjust):
    scale, found = start, []
    for step in range(1, 21):
        scale = adjust(scale, jnp.asarray(False))
        if step in (3, 20):
            found.append(float(scale.loss_scale))
    return found


directly = after_overflows(lambda scale, finite: scale.adjust(finite))
jitted = after_overflows(jax.jit(lambda scale, finite: scale.adjust(finite)))
mapped = float(jax.tree_util.tree_map(lambda x: x, start).min_loss_scale)
print(f"called directly: {directly[0]}, {directly[1]}")
print(f"under jax.jit: {jitted[0]}, {jitted[1]}")
print(f"min_loss_scale after jax.tree_util.tree_map(lambda x: x, scale): {mapped}")
sys.exit(0 if (directly, jitted, mapped) == ([1024.0, 1024.0], [512.0, 1.0], 1.0) else 1)
PYTHON
