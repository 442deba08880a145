#!/usr/bin/env bash
# In sentence-transformers' old_fit the schedule also stands still at steps at which the loss scale grows.
#
# sentence-transformers 6.2.0, transformers 5.23.0, torch 2.13.0, seen on 2026-11-27, Python 3.11, on
# the CPU.
#
# With use_amp=True the loop leaves the learning rate alone after a skipped step. It takes a step for
# skipped if the scale before it and after update() differ, and the scale differs as well after 2,000
# good steps, when it doubles. So each growth costs the schedule one of its steps, although the
# optimizer has stepped: a linear warm-down over 2,002 steps ends one step above its last value. The
# usual comparison is `scale after < scale before`. CrossEncoder.old_fit has the same line.
#
# Output seen, with the learning rate of a linear schedule in units of its last value:
#
# steps 2002, scale 131072
# rate at steps 1999 to 2002: 4, 3, 3, 2
#
# Exits with 1 if the behaviour has changed. Not run by CI.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq torch==2.13.0 numpy transformers==5.23.0 \
    sentence-transformers==6.2.0
cat > "$folder/run.py" << 'END'
import sys

import torch
from sentence_transformers import InputExample, SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

STEPS = 2002
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, "dog": 2}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
embedding = StaticEmbedding(tokenizer, embedding_dim=4)
model = SentenceTransformer(modules=[embedding], device="cpu")
rates, scales = [], []


class AdamW(torch.optim.AdamW):
    def step(self, *arguments, **options):
        rates.append(self.param_groups[0]["lr"])
        return super().step(*arguments, **options)


update = torch.amp.GradScaler.update


def recording_update(self, *arguments):
    update(self, *arguments)
    scales.append(self.get_scale())


torch.amp.GradScaler.update = recording_update
examples = [InputExample(texts=["cat", "dog"], label=0.5)] * STEPS
model.old_fit(
    [(DataLoader(examples, batch_size=1), CosineSimilarityLoss(model))],
    optimizer_class=AdamW,
    optimizer_params={"lr": 1e-3},
    warmup_steps=0,
    use_amp=True,
    show_progress_bar=False,
)
last = [round(rate / 1e-3 * STEPS) for rate in rates[-4:]]
print(f"steps {len(rates)}, scale {scales[-1]:.0f}")
print(f"rate at steps 1999 to 2002: {', '.join(map(str, last))}")
sys.exit((len(rates), scales[-1], last) != (STEPS, 2.0**17, [4, 3, 3, 2]))
END
cd "$folder"
HF_HUB_OFFLINE=1 env/bin/python -W ignore run.py
