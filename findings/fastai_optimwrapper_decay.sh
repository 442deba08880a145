#!/usr/bin/env bash
# fastai's wd_bn_bias=False has no effect on an optimizer of torch: biases and norms decay.
#
# fastai 2.8.12, torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# Learner(wd_bn_bias=False), the default, says that weight decay is not applied to normalisation
# layers and biases. It marks them with `do_wd` in the state of fastai's optimizer, and the steps of
# fastai's own optimizers read that. OptimWrapper, which takes an optimizer of torch, has such a state
# too and gets the marks, but the optimizer inside it never sees them: it is constructed with all
# parameters in one group, and `wd=` of the Learner sets the decay of that group. So the same Learner
# with opt_func=partial(OptimWrapper, opt=torch.optim.AdamW) decays everything, without a warning.
# Here all gradients are 0, so nothing but decay moves a parameter.
#
# Output seen, with the value of a bias and of a weight of BatchNorm1d, both 1 at first:
#
# Adam         wd_bn_bias=False: bias 1.0000, norm 1.0000
# Adam         wd_bn_bias=True:  bias 0.6561, norm 0.6561
# OptimWrapper wd_bn_bias=False: bias 0.6561, norm 0.6561
# OptimWrapper wd_bn_bias=True:  bias 0.6561, norm 0.6561
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy packaging \
    fastcore==2.2.41 fasttransform==0.0.5 fastprogress==1.1.6 plum-dispatch cloudpickle \
    matplotlib pandas scikit-learn scipy pyyaml pillow requests fastdownload
"$folder/env/bin/python" -m pip install -qq --no-deps fastai==2.8.12 torchvision==0.28.0
cat > "$folder/run.py" << 'END'
import sys
from functools import partial

import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam, OptimWrapper

rows = [(torch.ones(6), torch.zeros(1))] * 8
optimizers = {"Adam": Adam, "OptimWrapper": partial(OptimWrapper, opt=torch.optim.AdamW)}
seen = []
for name, opt_func in optimizers.items():
    for decays in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.BatchNorm1d(1))
        torch.nn.init.ones_(model[0].bias)
        learn = Learner(
            DataLoaders(DataLoader(rows, bs=2), DataLoader(rows, bs=2), device="cpu"),
            model,
            loss_func=lambda output, target: 0 * output.sum(),
            opt_func=opt_func,
            wd=1.0,
            wd_bn_bias=decays,
        )
        with learn.no_logging():
            learn.fit(1, lr=0.1)
        bias, norm = (f"{param.item():.4f}" for param in (model[0].bias, model[1].weight))
        seen.append(bias == norm == "0.6561")
        print(f"{name:12} {f'wd_bn_bias={decays}:':17} bias {bias}, norm {norm}")
sys.exit(seen != [False, True, True, True])
END
cd "$folder"
env/bin/python -W ignore run.py
