"""A trainer whose optimizer has a guard of norms."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import trainer_cases as cases
from harness.trainer_cases import new_trainer

import amp_ext
from amp_ext.training import MixedPrecisionConfig, MixedPrecisionTrainer


def corrupted(count: int, bad: set[int], factor: float = 30.0) -> Any:
    """Returns batches, some of which have targets that are far too large."""
    data = cases.batches(count=count)
    return [(x, factor * y if index in bad else y) for index, (x, y) in enumerate(data)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_outlier_is_skipped_and_the_schedule_waits(precision):
    make = cases.guarded_sgd(warmup_steps=4)
    trainer = new_trainer(precision, optimizer=make, scheduler=cases.halving)
    bad = {6, 7, 10}
    metrics = cases.train_on(trainer, corrupted(12, bad))
    trainer.flush()
    assert [bool(each.skipped) for each in metrics] == [index in bad for index in range(12)]
    assert all(each.grad_norm.item() > 0 for each in metrics)
    assert {each.loss_scale.item() for each in metrics} == {256.0 if precision == "fp16" else 1.0}
    assert trainer.scheduler.last_epoch == 9
    assert trainer.optimizer.norm_guard.stats().outliers == 3


def test_an_optimizer_is_as_before_where_its_trainer_is_refused():
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = amp_ext.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    config = MixedPrecisionConfig(average_decay=0.9, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="model must have all parameters of the optimizer"):
        MixedPrecisionTrainer(model, optimizer, config)
    assert optimizer.param_groups[0]["max_grad_norm"] is None
    assert MixedPrecisionTrainer(torch.nn.Sequential(model, other), optimizer, config).average


class OwnStep(amp_ext.optim.SGD):
    """One whose step a scaler does not call after an overflow."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_is_not_called_counts_as_skipped():
    for bad in ({1}, {0}):
        make = functools.partial(OwnStep, lr=0.1, norm_guard=amp_ext.optim.NormGuard())
        metrics = cases.train_on(new_trainer("fp16", optimizer=make), corrupted(3, bad, torch.inf))
        assert [bool(each.skipped) for each in metrics] == [index in bad for index in range(3)]
