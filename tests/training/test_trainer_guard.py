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

OPTIONS: dict[str, Any] = {"scheduler": cases.halving}


def guarded_trainer(precision: str = "fp32") -> Any:
    return new_trainer(precision, optimizer=cases.guarded_sgd(warmup_steps=4), **OPTIONS)


def corrupted(count: int, bad: set[int], factor: float = 30.0) -> Any:
    """Returns batches, some of which have targets that are far too large."""
    data = cases.batches(count=count)
    return [(x, factor * y if index in bad else y) for index, (x, y) in enumerate(data)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_outlier_is_skipped_and_the_schedule_waits(precision):
    trainer = guarded_trainer(precision)
    bad = {6, 7, 10}
    metrics = cases.train_on(trainer, corrupted(12, bad))
    trainer.flush()
    assert [bool(each.skipped) for each in metrics] == [index in bad for index in range(12)]
    assert all(each.grad_norm.item() > 0 for each in metrics)
    assert {each.loss_scale.item() for each in metrics} == {256.0 if precision == "fp16" else 1.0}
    assert trainer.scheduler.last_epoch == 9
    assert trainer.optimizer.norm_guard.stats().outliers == 3


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_goes_on_with_the_same_verdicts(precision, tmp_path):
    data = corrupted(12, {6, 9})
    whole, first, second = (guarded_trainer(precision) for _ in range(3))
    cases.train_on(whole, data)
    cases.train_on(first, data[:8])
    first.save(tmp_path / "file.pt")
    second.load(tmp_path / "file.pt")
    cases.train_on(second, data[8:])
    cases.assert_same(cases.params_of(second), cases.params_of(whole))
    guards = [trainer.optimizer.norm_guard for trainer in (second, whole)]
    assert guards[0].state_dict() == guards[1].state_dict()


def test_files_without_a_guard_are_loaded_and_a_refused_one_changes_nothing():
    trainer, plain = guarded_trainer(), new_trainer(scheduler=cases.halving)
    cases.train_on(trainer, corrupted(6, set()))
    before = trainer.optimizer.norm_guard.state_dict()
    trainer.load_state_dict(plain.state_dict())
    assert trainer.optimizer.norm_guard.state_dict() == before
    bad = trainer.state_dict()
    bad["norm_guard"] = before | {"mean": -1.0}
    with pytest.raises(ValueError, match=r"NormGuard\.load_state_dict: mean must be"):
        trainer.load_state_dict(bad)
    assert trainer.optimizer.norm_guard.state_dict() == before
    plain.load_state_dict(trainer.state_dict())


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
