#!/usr/bin/env bash
# Ultralytics resumes a training from the average of its weights in float16, not from the weights.
#
# ultralytics 8.4.190, torch 2.13.0, seen on 2026-11-27, Python 3.11, on the CPU.
#
# last.pt, which train(resume=True) goes on from, has None under "model". Its weights are those of the
# exponential average, converted to float16, with a decay that rises to 0.9999: in a long training the
# average lies thousands of steps behind. The moments of the optimizer in the file are float32, and are
# those of the trained weights. So a resumed training is not the uninterrupted one: it goes on from
# other weights, and every update below half a unit of float16 that they had gained is lost. The
# recovery from a NaN loss loads the same file.
#
# Output seen:
#
# file: model None, average torch.float16, moments torch.float32
# at the start of the resumed training, of 40 weight matrices:
#   equal to the average in float16: 40
#   equal to the trained weights:    0
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy matplotlib pillow polars psutil pyyaml \
    requests opencv-python-headless
"$folder/env/bin/python" -m pip install -qq --no-deps ultralytics==8.4.190 ultralytics-thop==2.2.3 \
    torchvision==0.28.0
cat > "$folder/run.py" << 'END'
import logging
import pathlib
import shutil
import sys

import numpy as np
import torch
from PIL import Image

try:
    import torchvision  # its usual wheels do not load under a torch for the CPU
except RuntimeError:
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    torch.library.define("torchvision::nms", schema)
    torch.library.define("torchvision::qnms", schema)
from ultralytics import YOLO

logging.disable(logging.CRITICAL)
random = np.random.default_rng(0)
for split in ("train", "val"):
    for name in ("a", "b"):
        images = pathlib.Path("data", split, name)
        images.mkdir(parents=True)
        for number in range(16):
            pixels = random.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / f"{number}.png")


def weights_of(model):
    return [param.detach().clone() for param in model.parameters() if param.dim() > 1]


trained, resumed = [], []


def keep(trainer):
    if not trained:  # after the first epoch
        shutil.copy(trainer.last, "kept.pt")
        trained.extend(weights_of(trainer.model))


first = YOLO("yolo11n-cls.yaml")
first.add_callback("on_model_save", keep)
options = {"imgsz": 64, "batch": 8, "workers": 0, "device": "cpu", "plots": False}
first.train(data=str(pathlib.Path("data").resolve()), epochs=2, optimizer="AdamW", **options)

second = YOLO("kept.pt")
second.add_callback("on_train_start", lambda t: resumed.extend(weights_of(t.model)))
second.train(resume=True)

file = torch.load("kept.pt", weights_only=False)
average = weights_of(file["ema"])
moments = file["optimizer"]["state"][0]["exp_avg"].dtype
print(f"file: model {file['model']}, average {average[0].dtype}, moments {moments}")
equal_average = sum(map(torch.equal, resumed, (weight.float() for weight in average)))
equal_trained = sum(map(torch.equal, resumed, trained))
print(f"at the start of the resumed training, of {len(resumed)} weight matrices:")
print(f"  equal to the average in float16: {equal_average}")
print(f"  equal to the trained weights:    {equal_trained}")
of_average = file["model"] is None and average[0].dtype == torch.float16
sys.exit(not of_average or (equal_average, equal_trained) != (len(resumed), 0))
END
cd "$folder"
export YOLO_CONFIG_DIR=$folder YOLO_OFFLINE=true YOLO_VERBOSE=false
env/bin/python -W ignore run.py 2> stderr.txt || { tail -3 stderr.txt; exit 1; }
