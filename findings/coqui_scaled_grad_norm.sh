#!/usr/bin/env bash
# Coqui's trainer logs a gradient norm that carries the loss scale, unless it clips.
#
# coqui-tts-trainer 0.4.0, torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# Trainer._grad_clipping calls scaler.unscale_() only if `grad_clip` is above 0, and 0 is the default.
# Without it the gradients are measured as backward() left them. `grad_norm` in the log and on the
# dashboard is then the true norm times the loss scale: it doubles when the scale grows, halves after
# an overflow, and one run cannot be compared with another. Training itself is right. In the same run
# with a `grad_clip` that never clips, `grad_norm` is the true norm.
#
# A scaler for the CPU stands for the one for CUDA, which would be disabled without a GPU.
#
# Output seen:
#
# grad_clip=0,   scale   128: grad_norm 256.0
# grad_clip=0,   scale 65536: grad_norm 131072.0
# grad_clip=1e9, scale   128: grad_norm 2.0
# grad_clip=1e9, scale 65536: grad_norm 2.0
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy coqui-tts-trainer==0.4.0
cat > "$folder/run.py" << 'END'
import logging
import sys

import torch
import trainer.trainer
from trainer import Trainer, TrainerArgs, TrainerConfig, TrainerModel

logging.disable()


class Model(TrainerModel):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.net(x)

    def train_step(self, batch, criterion):
        output = self(batch["x"])
        return {"output": output}, {"loss": criterion(output)}

    def get_criterion(self):
        return torch.sum

    def get_optimizer(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def get_scheduler(self, optimizer):
        return None

    def get_data_loader(self, *args, **kwargs):
        return torch.utils.data.DataLoader([{"x": torch.ones(1, 4)}] * 3, batch_size=None)


norms = []
for name, grad_clip in (("0,", 0.0), ("1e9,", 1e9)):
    for scale in (128.0, 65536.0):
        trainer.trainer.GradScaler = lambda: torch.amp.GradScaler("cpu", init_scale=scale)
        config = TrainerConfig(
            output_path="out", run_eval=False, epochs=1, use_grad_scaler=True, grad_clip=grad_clip
        )
        run = Trainer(
            TrainerArgs(), config, output_path="out", model=Model(), parse_command_line_args=False
        )
        run.fit()
        norms.append(float(run.keep_avg_train["avg_grad_norm"]))
        print(f"grad_clip={name:4} scale {scale:5.0f}: grad_norm {norms[-1]}")
sys.exit(norms != [256.0, 131072.0, 2.0, 2.0])
END
cd "$folder"
env/bin/python -W ignore run.py 2> stderr || { cat stderr && false; }
