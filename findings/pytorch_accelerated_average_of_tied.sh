#!/usr/bin/env bash
# pytorch-accelerated 0.1.61 with torch 2.13.0, on a CPU; Python 3.10 or newer.
#
# ModelEma of pytorch_accelerated averages everything in the state dict of a model. A parameter that two
# modules share, as the embedding and the head of most language models, is in the state dict once for
# each name, and the copied model shares it too. So it is averaged twice in each update: it forgets with
# decay ** 2 while the rest of the model has decay, and with decay=0.9999 the average of the embedding
# reaches half as far back. torch's AveragedModel goes through parameters(), which has it once.
#
# Seen, weights that go from 0 to 1, one update with decay=0.9:
#   ModelEma: embedding 0.19, bias of the head 0.1
#   AveragedModel of torch: embedding 0.1, bias of the head 0.1
# Exits with 1 if one of these has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q pytorch-accelerated==0.1.61 accelerate==1.15.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from pytorch_accelerated.utils import ModelEma
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(average_of, update):
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4)})
    model["head"].weight = model["embedding"].weight
    for param in model.parameters():
        torch.nn.init.zeros_(param)
    average = average_of(model)
    for param in model.parameters():
        torch.nn.init.ones_(param)
    update(average, model)
    params = average.module["embedding"].weight, average.module["head"].bias
    return [round(param.flatten()[0].item(), 4) for param in params]


def update_torchs(average, model):
    average.n_averaged.fill_(1)  # The first update of torch's copies.
    average.update_parameters(model)


found = {
    "ModelEma": averaged(lambda model: ModelEma(model, decay=0.9), ModelEma.update),
    "AveragedModel of torch": averaged(
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), update_torchs
    ),
}
for name, (embedding, bias) in found.items():
    print(f"{name}: embedding {embedding}, bias of the head {bias}")
sys.exit(0 if list(found.values()) == [[0.19, 0.1], [0.1, 0.1]] else 1)
PYTHON
