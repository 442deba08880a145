"""Ctrl-C at each line of a training step: the parameters are those of before or of after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import trainer_cases as cases
from harness.interrupts import IS_COMPLETE, interrupted_at_each_line
from harness.rows import rows
from torch import nn

import amp_ext
from amp_ext.training import MixedPrecisionTrainer

FIRST, THIS, NEXT = cases.batches(count=3)

OPTIMIZERS = {
    "fp16-ours": ("fp16", functools.partial(amp_ext.optim.AdamW, lr=0.05)),
    "fp16-torchs": ("fp16", cases.torchs_sgd),
    "fp32-ours": ("fp32", functools.partial(amp_ext.optim.AdamW, lr=0.05)),
}


@pytest.mark.parametrize(("precision", "optimizer"), rows(OPTIMIZERS))
def test_a_training_goes_on_after_an_interrupted_step(precision: str, optimizer: Any):
    def make() -> MixedPrecisionTrainer:
        torch.manual_seed(0)
        options = {"optimizer": optimizer, "scheduler": cases.halving, "max_grad_norm": 0.5}
        trainer = cases.new_trainer(
            precision, nn.Linear(6, 2), gradient_accumulation_steps=2, **options
        )
        cases.train_on(trainer, [FIRST])
        return trainer

    def train_this(trainer: MixedPrecisionTrainer) -> None:
        trainer.train_step(*THIS)

    def params_after(*calls: Callable[[Any], Any]) -> str:
        trainer = make()
        for call in calls:
            call(trainer)
        return str(cases.params_of(trainer))

    allowed, found = {params_after(), params_after(train_this)}, set()
    package = None if IS_COMPLETE else "training"
    for trainer, line in interrupted_at_each_line(make, train_this, package):
        found.add(str(cases.params_of(trainer)))
        assert found <= allowed, line
        trainer.discard()
        skipped = [metrics.skipped for metrics in cases.train_on(trainer, [NEXT, THIS])]
        assert skipped == [None, torch.tensor(False)], line
    assert found == allowed
