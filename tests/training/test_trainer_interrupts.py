"""Ctrl-C at each line of a training step: it was taken with all that follows, or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trainer_cases as cases
from interrupts import IS_COMPLETE, interrupted_at_each_line
from rows import rows
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import amp_ext
from amp_ext.training import MixedPrecisionTrainer

*FIRST, THIS, NEXT = cases.batches(count=4)


def make_trainer(
    precision: str, optimizer: Any, scheduler: Any, accumulation: int
) -> MixedPrecisionTrainer:
    """Returns a trainer that has accumulated all batches of a step but the last."""
    torch.manual_seed(0)
    trainer = cases.new_trainer(
        precision,
        nn.Linear(6, 2),
        optimizer=optimizer,
        scheduler=scheduler,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=None if accumulation == 1 else 0.5,
        **({"growth_interval": 1} if precision == "fp16" else {}),
    )
    if hasattr(trainer.optimizer, "init_state"):  # one of ours
        trainer.optimizer.init_state()  # that states are there is no sign of a step
    cases.train_on(trainer, FIRST[: 1 if accumulation == 1 else 2])
    return trainer


def all_of(trainer: MixedPrecisionTrainer) -> str:
    """Returns the parameters and all that a checkpoint holds, its gradients included."""
    everything = (list(trainer.model.parameters()), trainer.state_dict())
    return repr(tree_map(lambda one: one.tolist() if isinstance(one, Tensor) else one, everything))


def after(trainer: MixedPrecisionTrainer, *calls: Callable[[Any], Any]) -> str:
    for call in calls:
        call(trainer)
    return all_of(trainer)


def train_next(trainer: MixedPrecisionTrainer) -> None:
    trainer.train_step(*NEXT)
    trainer.flush()


OPTIMIZERS = {
    "our-AdamW": functools.partial(amp_ext.optim.AdamW, lr=0.05),
    "torchs-SGD": cases.torchs_sgd,
    "torchs-fused-AdamW": cases.torchs_adamw,
}
SCHEDULERS = {
    "rates": cases.halving,
    "chained-rates": cases.two_schedules,
    "decays": cases.falling_decay,
}
FEW = {
    "fp16-our-AdamW-rates-1-clean",
    "fp16-torchs-SGD-chained-rates-3-clean",
    "bf16-our-AdamW-decays-1-clean",
    "fp32-torchs-SGD-rates-1-clean",
    "fp16-torchs-fused-AdamW-rates-1-clean",
}
ROWS = {
    f"{precision}-{of}-{by}-{accumulation}-{kind}": (
        functools.partial(make_trainer, precision, make, scheduler, accumulation),
        factor,
    )
    for precision in ("fp16", "bf16", "fp32")
    for of, make in OPTIMIZERS.items()
    for by, scheduler in SCHEDULERS.items()
    for accumulation in (1, 3)
    for kind, factor in {"clean": 1.0, "overflow": torch.inf}.items()
    if precision == "fp16" or kind == "clean"
}


@pytest.mark.parametrize(
    ("make", "factor"),
    rows({name: row for name, row in ROWS.items() if name in FEW or IS_COMPLETE}),
)
def test_an_interrupted_training_step_was_taken_with_all_that_follows_or_not_at_all(make, factor):
    def train_this(trainer: MixedPrecisionTrainer) -> None:
        trainer.train_step(THIS[0], factor * THIS[1])

    def discard(trainer: MixedPrecisionTrainer) -> None:
        trainer.discard()

    ways: list[list[Callable[[Any], Any]]] = [[], [discard], [train_this]]
    allowed = {after(make(), *way): after(make(), *way, train_next) for way in ways}
    found = set()
    for trainer, line in interrupted_at_each_line(make, train_this):
        state = all_of(trainer)
        assert state in allowed, line
        found.add(state)
        assert after(trainer, train_next) == allowed[state], line
    assert found == set(allowed)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_scheduler_that_has_come_to_its_end_does_not_keep_the_state_from_being_saved(precision):
    trainer = cases.new_trainer(
        precision,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=2, cycle_momentum=False
        ),
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Tried to step \d times"):
            cases.train_on(trainer, [THIS] * 4)
        trainer.state_dict()
