#!/usr/bin/env bash
# RecBole makes a new gradient scaler in each epoch, and clips gradients that still carry its scale.
#
# recbole 1.2.1, numpy 1.26.4, torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# With `enable_scaler: True`, Trainer._train_epoch begins with `amp.GradScaler(enabled=True)`. Each
# epoch therefore starts at a scale of 65536 and has forgotten what the earlier ones found out: it
# skips the same first steps again. A scale that ought to grow does so only in epochs of more than
# 2000 steps. The scaler is in no checkpoint either.
#
# `clip_grad_norm: {"max_norm": 1.0}` is applied between backward() and step(), without unscale_().
# So the gradients are clipped to 1 / 65536 instead of 1, those of a norm far below 1 included. The
# run below has gradients of a norm of 0.0011 and SGD with lr=1, so the step has the norm of the
# gradients: without the scaler nothing is clipped, with it the step is 70 times as short. Adam and
# AdamW hide this, since they divide by the size of the gradients.
#
# A scaler for the CPU stands for the one for CUDA, which would be disabled without a GPU.
#
# Output seen:
#
# norm of the step, no clipping:                     1.1e-03
# norm of the step, max_norm=1, scaler disabled:     1.1e-03
# norm of the step, max_norm=1, scaler enabled:      1.5e-05
# 3 epochs: 3 scalers, at the end of each epoch the scale is [32768.0, 32768.0, 32768.0]
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy==1.26.4 'pandas<3' scipy scikit-learn \
    pyyaml tqdm psutil tabulate texttable plotly tensorboard colorlog==4.7.2 colorama==0.4.4 'setuptools<81'
"$folder/env/bin/python" -m pip install -qq --no-deps recbole==1.2.1 thop
cat > "$folder/run.py" << 'END'
import math
import sys

import torch

from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.general_recommender import BPR
from recbole.trainer import Trainer
from recbole.utils import init_seed

scalers = []


def scaler_for_cpu(enabled=True):
    scalers.append(torch.amp.GradScaler("cpu", enabled=enabled))
    return scalers[-1]


torch.cuda.amp.GradScaler = scaler_for_cpu


def train(epochs, enabled, **options):
    """Returns the norm of what training changed."""
    scalers.clear()
    options |= {"epochs": epochs, "use_gpu": False, "learner": "sgd", "learning_rate": 1.0}
    options |= {"train_batch_size": 10**6, "eval_step": 0, "state": "ERROR"}
    config = Config(model="BPR", dataset="ml-100k", config_dict=options)
    init_seed(1, True)
    data, *_ = data_preparation(config, create_dataset(config))
    init_seed(1, True)
    model = BPR(config, data.dataset)
    if overflows:
        model.item_embedding.weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(config, model)
    trainer.enable_scaler = enabled  # Trainer wants CUDA for True
    trainer.fit(data, saved=False)
    moved = [(p - q).norm() for p, q in zip(model.parameters(), before)]
    return torch.stack(moved).norm().item()


overflows = False
plain = train(1, False)
disabled = train(1, False, clip_grad_norm={"max_norm": 1.0})
enabled = train(1, True, clip_grad_norm={"max_norm": 1.0})
print(f"norm of the step, no clipping:                     {plain:.1e}")
print(f"norm of the step, max_norm=1, scaler disabled:     {disabled:.1e}")
print(f"norm of the step, max_norm=1, scaler enabled:      {enabled:.1e}")
overflows = True  # in each step
train(3, True)
scales = [scaler.get_scale() for scaler in scalers]
print(f"3 epochs: {len(scales)} scalers, at the end of each epoch the scale is {scales}")
as_seen = math.isclose(plain, disabled) and math.isclose(enabled, 1 / 65536, rel_tol=0.01)
sys.exit(not as_seen or scales != [32768.0] * 3)
END
cd "$folder"
env/bin/python -W ignore run.py
