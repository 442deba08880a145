#!/usr/bin/env bash
# MONAI's trainer replaces its gradient scaler at each run(), also one that was assigned or restored.
#
# monai 1.6.1, pytorch-ignite 0.5.5, torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# monai.engines.Trainer.run says that a second call "will continuously run from the previous state".
# The model, the optimizer and the counters go on, the loss scale does not: run() begins with
# `self.scaler = torch.cuda.amp.GradScaler() if self.amp else None`. So a scaler that a user assigns
# to the attribute `trainer.scaler` before run(), or fills from a checkpoint, is thrown away without
# a word; with amp=False it becomes None. On a GPU every resumed run starts at a scale of 65536 again
# and skips its first steps. A handler of Events.STARTED can assign it, since that comes later.
#
# Output seen:
#
# amp=True:  assigned before run() kept: False, after run(): GradScaler
# amp=False: assigned before run() kept: False, after run(): NoneType
# assigned by a handler of Events.STARTED kept: True
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy monai==1.6.1 pytorch-ignite==0.5.5
cat > "$folder/run.py" << 'END'
import sys

import torch
from ignite.engine import Events
from monai.engines import SupervisedTrainer


def trainer_with(amp):
    model = torch.nn.Linear(2, 1)
    return SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=[{"image": torch.ones(3, 2), "label": torch.ones(3, 1)}],
        network=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_function=torch.nn.functional.mse_loss,
        amp=amp,
    )


seen = []
for amp in (True, False):
    trainer, scaler = trainer_with(amp), torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.scaler = scaler
    trainer.run()
    after = type(trainer.scaler).__name__
    seen += [trainer.scaler is scaler, after]
    name = f"amp={amp}:"
    print(f"{name:10} assigned before run() kept: {trainer.scaler is scaler}, after run(): {after}")
trainer, scaler = trainer_with(False), torch.amp.GradScaler("cpu", init_scale=8.0)
trainer.add_event_handler(Events.STARTED, lambda engine: setattr(engine, "scaler", scaler))
trainer.run()
seen.append(trainer.scaler is scaler)
print(f"assigned by a handler of Events.STARTED kept: {trainer.scaler is scaler}")
sys.exit(seen != [False, "GradScaler", False, "NoneType", True])
END
cd "$folder"
env/bin/python -W ignore run.py
