#!/usr/bin/env bash
# SpeechBrain clips the first parameter group of an optimizer only; often that is the biases.
#
# speechbrain 1.1.2, torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# Brain.optimizers_step calls clip_grad_norm_ with `opt.param_groups[0]["params"]`, so `max_grad_norm`
# (5.0 by default) does nothing for all other groups. The option remove_vector_weight_decay=True of
# Brain makes two groups itself and puts the vectors first, which are the biases and the weights of
# norms: the matrices are then never clipped. Below SGD with lr=1 shows the clipped gradients. With
# one group they have the norm 1 in all, with two the bias alone has the norm 1, and the weight keeps
# its own. No warning is shown. fp16 with a gradient scaler takes the same path.
#
# Output seen:
#
# remove_vector_weight_decay=False: gradients of the bias 0.32, of the weight 0.95, of both 1.00
# remove_vector_weight_decay=True:  gradients of the bias 1.00, of the weight 60.00, of both 60.01
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy scipy tqdm joblib packaging requests \
    hyperpyyaml sentencepiece soundfile huggingface_hub
"$folder/env/bin/python" -m pip install -qq --no-deps speechbrain==1.1.2 torchaudio==2.11.0
# Nothing of torchaudio is used here, and its compiled part needs a torch for CUDA.
rm -f "$folder"/env/lib/python*/site-packages/torchaudio/lib/*.so
cat > "$folder/run.py" << 'END'
import functools
import math
import sys

import speechbrain
import torch


class Brain(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch)

    def compute_objectives(self, predictions, batch, stage):
        return 10 * predictions.sum()


both_norms = []
for two_groups in (False, True):
    net = torch.nn.Linear(9, 1)
    before = [p.detach().clone() for p in (net.bias, net.weight)]
    brain = Brain(
        {"net": net},
        functools.partial(torch.optim.SGD, lr=1.0),
        run_opts={
            "device": "cpu",
            "max_grad_norm": 1.0,
            "remove_vector_weight_decay": two_groups,
            "noprogressbar": True,
        },
    )
    brain.fit(range(1), [torch.full((2, 9), 1.0)])
    bias, weight = [(p - q).norm().item() for p, q in zip((net.bias, net.weight), before)]
    both_norms.append(math.hypot(bias, weight))
    name = f"remove_vector_weight_decay={two_groups}:"
    print(
        f"{name:33} gradients of the bias {bias:.2f}, of the weight {weight:.2f}, "
        f"of both {both_norms[-1]:.2f}"
    )
sys.exit(not math.isclose(both_norms[0], 1.0, rel_tol=1e-3) or both_norms[1] < 10)
END
cd "$folder"
env/bin/python -W ignore run.py
