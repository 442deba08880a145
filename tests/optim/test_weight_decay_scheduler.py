"""Schedules of the weight decay: closed forms, torch's optimizers decayed by hand, resumed runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.optimizer_cases import assert_same_bits, make_params, ours, theirs, train, twins
from harness.rows import rows
from torch.nn import Parameter
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import amp_ext
from amp_ext.optim import (
    CorrectedWeightDecay,
    CosineAnnealingWeightDecay,
    LambdaWeightDecay,
    StepWeightDecay,
)

EPOCHS = 12
INITIAL = 0.3


def ramp(epoch: int) -> float:
    return min(1.0, (epoch + 1) / 5)


def half_cosine(final: float) -> list[float]:
    falls = [0.5 * (1 + math.cos(math.pi * epoch / 10)) for epoch in range(EPOCHS)]
    return [final + (INITIAL - final) * fall for fall in falls]


Make = Callable[..., Any]

cosine = partial(CosineAnnealingWeightDecay, T_max=10)
# How to make a scheduler, and the value after a number of steps from INITIAL.
VALUES = {
    "lambda": (partial(LambdaWeightDecay, weight_decay_lambda=ramp),
               [0.06, 0.12, 0.18, 0.24, *[0.3] * 8]),
    "step": (partial(StepWeightDecay, step_size=4, gamma=0.5),
             [*[0.3] * 4, *[0.15] * 4, *[0.075] * 4]),
    "cosine": (cosine, half_cosine(0.0)),
    "cosine-upwards": (partial(cosine, final_weight_decay=0.5), half_cosine(0.5)),
    "corrected": (partial(CorrectedWeightDecay, max_lr=0.2), [0.15] * 12),
}  # fmt: skip
SCHEDULERS = pytest.mark.parametrize(("make", "expected"), rows(VALUES))
CLOSE = {"rel": 1e-14, "abs": 1e-16}


def sgd(weight_decay: Any = INITIAL, groups: int = 1) -> torch.optim.Optimizer:
    params = [{"params": [Parameter(torch.ones(3))]} for _ in range(groups)]
    return torch.optim.SGD(params, lr=0.1, weight_decay=weight_decay)


def decays(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def run(scheduler: Any, epochs: int = EPOCHS) -> list[float]:
    """Returns the weight decay of the first group in some epochs, from the present one on."""
    values = []
    for _ in range(epochs):
        values.append(decays(scheduler.optimizer)[0])
        scheduler.step()
    return values


@SCHEDULERS
@pytest.mark.parametrize("initial", [INITIAL, torch.tensor(INITIAL, dtype=torch.float64)])
def test_values_follow_the_closed_form(make: Make, expected: list[float], initial: Any):
    scheduler = make(sgd(initial))
    assert scheduler.get_last_weight_decay() == decays(scheduler.optimizer)
    values = run(scheduler)
    assert values == pytest.approx(expected, **CLOSE)
    assert all(type(value) is float for value in values)
    assert scheduler.last_epoch == EPOCHS
    assert scheduler.get_last_weight_decay() == decays(scheduler.optimizer)


def test_the_ends_of_the_cosine_are_exact_and_groups_without_decay_stay_without():
    optimizer = sgd(0.04, groups=2)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    scheduler = CosineAnnealingWeightDecay(optimizer, T_max=3, final_weight_decay=0.4)
    values = run(scheduler, 7)
    assert (values[0], values[3], values[6]) == (0.04, 0.4, 0.04)
    assert decays(optimizer)[1] == 0.0


@pytest.mark.parametrize(
    "order", ["make optimizer schedule", "make schedule optimizer", "optimizer make schedule"]
)
@SCHEDULERS
@pytest.mark.parametrize("find", [ours, theirs], ids=["ours", "torch"])
def test_a_resumed_run_has_the_bits_of_one(find, make: Make, expected, order):
    whole = make_params(torch.float32, shapes=[(3, 5), (7,)])
    parts = twins(whole)
    kept, optimizer = (find("AdamW")(p, lr=0.05, weight_decay=INITIAL) for p in (whole, parts))
    kept_scheduler, scheduler = make(kept), make(optimizer)
    for epoch in range(EPOCHS):
        if epoch == 5:
            saved = cases.through_a_file([optimizer.state_dict(), scheduler.state_dict()])
            optimizer = find("AdamW")(parts, lr=0.9, weight_decay=0.7)
            for action in order.split():
                if action == "make":
                    scheduler = make(optimizer)
                elif action == "schedule":
                    scheduler.load_state_dict(saved[1])
                else:
                    optimizer.load_state_dict(saved[0])
            assert decays(optimizer) == decays(kept)
        train([kept, optimizer])
        kept_scheduler.step()
        scheduler.step()
    assert decays(optimizer) == decays(kept)
    assert_same_bits(optimizer, kept)


@SCHEDULERS
def test_a_new_scheduler_starts_from_the_value_before_the_earlier_one(make: Make, expected):
    scheduler = make(sgd())
    run(scheduler, 5)
    assert scheduler.last_epoch == 5
    assert run(make(scheduler.optimizer)) == pytest.approx(expected, **CLOSE)


@SCHEDULERS
def test_a_group_that_is_added_later_joins_at_the_next_step(make: Make, expected: list[float]):
    optimizer = ours("AdamW")(make_params(torch.float32), lr=0.1, weight_decay=INITIAL)
    scheduler = make(optimizer)
    run(scheduler, 4)
    late = make_params(torch.float32)
    optimizer.add_param_group({"params": late, "weight_decay": 2 * INITIAL})
    scheduler.step()
    now = [scheduler.weight_decay_at(5, INITIAL, 0), scheduler.weight_decay_at(5, 0.6, 0)]
    assert decays(optimizer) == scheduler.get_last_weight_decay() == now
    assert now[0] == pytest.approx(expected[5], rel=1e-14)
    assert [group["initial_weight_decay"] for group in optimizer.param_groups] == [INITIAL, 0.6]


def add_group(optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    optimizer.add_param_group({"params": [Parameter(torch.ones(3))], "weight_decay": weight_decay})


@SCHEDULERS
@pytest.mark.parametrize("find", [ours, theirs], ids=["ours", "torch"])
def test_a_run_goes_on_if_its_second_group_comes_after_the_schedules(find, make: Make, expected):
    """As torch's schedules of the learning rate do."""

    def parts() -> Any:
        optimizer = find("AdamW")([Parameter(torch.ones(3))], lr=0.1, weight_decay=INITIAL)
        return optimizer, make(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

    optimizer, scheduler, lr = run_of = parts()
    run(scheduler, 3)
    add_group(optimizer, 0.6)
    run(scheduler, 2)
    saved = cases.through_a_file([part.state_dict() for part in run_of])
    resumed, again, lr = parts()
    lr.load_state_dict(saved[2])
    again.load_state_dict(saved[1])
    assert again.state_dict() == saved[1]
    assert again.get_last_weight_decay() == decays(resumed) == decays(optimizer)[:1]
    add_group(resumed, 0.7)
    resumed.load_state_dict(saved[0])
    for _ in range(3):
        scheduler.step()
        again.step()
        assert decays(resumed) == decays(optimizer)


@SCHEDULERS
@pytest.mark.parametrize("index", [0, 1])
def test_a_group_that_is_taken_out_is_forgotten_and_the_other_goes_on(make: Make, expected, index):
    optimizer, alone = sgd(groups=2), sgd([INITIAL, 0.6][1 - index])
    optimizer.param_groups[1]["weight_decay"] = 0.6
    scheduler, of_one = make(optimizer), make(alone)
    run(scheduler, 3)
    run(of_one, 3)
    del optimizer.param_groups[index]
    run(scheduler, 2)
    run(of_one, 2)
    assert decays(optimizer) == scheduler.get_last_weight_decay() == decays(alone)
    add_group(optimizer, 0.5)
    scheduler.step()
    assert optimizer.param_groups[1]["initial_weight_decay"] == 0.5


LR_SCHEDULES = {
    "cosine": (partial(CosineAnnealingLR, T_max=EPOCHS),),
    "one-cycle": (partial(OneCycleLR, max_lr=0.5, total_steps=20, cycle_momentum=False),),
    "warmup": (partial(LambdaLR, lr_lambda=ramp),),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("schedule", rows(LR_SCHEDULES))
def test_corrected_decay_is_that_of_a_loop_in_float64_with_skips_and_a_resume(schedule, as_tensor):
    start = make_params(torch.float64, shapes=[(3, 5), (7,)])

    def parts(params: list[Parameter]) -> Any:
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        lr = torch.tensor(0.5, dtype=torch.float64) if as_tensor else 0.5
        options = {"lr": lr, "weight_decay": INITIAL, "decoupled_weight_decay": True}
        optimizer = ours("SGD")(groups, **options)
        return optimizer, schedule(optimizer), CorrectedWeightDecay(optimizer, [0.5, None])

    optimizer, rates, decay = run_of = parts(twins(start))
    expected = [param.detach().clone() for param in start]
    scaler = amp_ext.GradScaler("cpu", init_scale=4.0)
    for epoch in range(EPOCHS):
        if epoch == 5:
            saved = cases.through_a_file([part.state_dict() for part in run_of])
            optimizer, rates, decay = run_of = parts(cases.params_of(optimizer))
            for part, state in zip(run_of, saved, strict=True):
                part.load_state_dict(state)
        is_skipped = epoch in (3, 7)
        rate = [float(group["lr"]) for group in optimizer.param_groups]
        scale = scaler.scale(torch.ones(())).item()
        for param, value, each, factor in zip(
            cases.params_of(optimizer), expected, rate, (rate[0] / 0.5, 1.0), strict=True
        ):
            grad = torch.randn_like(param)
            param.grad = torch.full_like(grad, math.inf) if is_skipped else grad * scale
            if not is_skipped:
                value.mul_(1 - each * INITIAL * factor).sub_(grad, alpha=each)
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        decay.step()
    for param, value in zip(cases.params_of(optimizer), expected, strict=True):
        torch.testing.assert_close(param.detach(), value, rtol=1e-12, atol=1e-14)


def test_a_learning_rate_above_the_largest_gives_more_than_the_initial_decay():
    scheduler = CorrectedWeightDecay(sgd(), max_lr=0.05)
    assert decays(scheduler.optimizer) == pytest.approx([2 * INITIAL], **CLOSE)


STATE = cosine(sgd()).state_dict()
COSINE_LR = torch.optim.lr_scheduler.CosineAnnealingLR(sgd(), T_max=7).state_dict()
FOREIGN: list[tuple[Any, type[Exception], str]] = [
    (COSINE_LR, KeyError, "state_dict must have 'final_weight_decay', got ['T_max', "),
    (StepWeightDecay(sgd(), 3).state_dict(), KeyError, "state_dict must have 'T_max', got ['step"),
    ({}, KeyError, "state_dict must have 'T_max', got []"),
    ("checkpoint.pt", TypeError, "state_dict must be a dict, got 'checkpoint.pt': read the file"),
    (STATE | {"last_epoch": "3"}, ValueError, "last_epoch must be an int of at least 0, got '3'"),
    (STATE | {"last_epoch": -1}, ValueError, "last_epoch must be an int of at least 0, got -1"),
    (STATE | {"base_weight_decays": 0.3}, ValueError, "base_weight_decays and _last_weight_decay"),
    (STATE | {"_last_weight_decay": ["0.3"]}, ValueError, "base_weight_decays and _last_weight_de"),
]


@pytest.mark.parametrize(("state", "error", "message"), FOREIGN)
def test_what_is_not_a_state_of_the_class_is_refused_and_changes_nothing(state, error, message):
    scheduler = cosine(sgd())
    run(scheduler, 3)
    before = scheduler.state_dict(), decays(scheduler.optimizer)
    with pytest.raises(error) as caught:
        scheduler.load_state_dict(state)
    assert caught.type is error
    text = caught.value.args[0]
    assert text.startswith(f"CosineAnnealingWeightDecay.load_state_dict: {message}")
    assert (scheduler.state_dict(), decays(scheduler.optimizer)) == before


def test_a_checkpoint_without_a_schedule_does_not_disturb_one():
    plain = sgd(0.7)
    optimizer = sgd(INITIAL)
    scheduler = StepWeightDecay(optimizer, step_size=2, gamma=0.5)
    optimizer.load_state_dict(plain.state_dict())
    assert decays(optimizer) == [0.7]
    assert "initial_weight_decay" not in optimizer.param_groups[0]
    assert [(scheduler.step(), *decays(optimizer))[1] for _ in range(3)] == [0.3, 0.15, 0.15]
    assert optimizer.param_groups[0]["initial_weight_decay"] == INITIAL


def test_a_state_holds_no_functions():
    scheduler = LambdaWeightDecay(sgd(groups=2), [ramp, math.sqrt])
    run(scheduler, 2)
    state = scheduler.state_dict()
    assert not {"optimizer", "weight_decay_lambdas"} & state.keys()
    resumed = cases.loading(LambdaWeightDecay(sgd(groups=2), [ramp, math.sqrt]), state)
    scheduler.step()
    resumed.step()
    assert resumed.get_last_weight_decay() == scheduler.get_last_weight_decay()


BAD_ARGUMENTS = [
    (lambda: StepWeightDecay([Parameter(torch.ones(1))], 1), TypeError,
     "StepWeightDecay: optimizer must be a torch.optim.Optimizer, got list"),
    (lambda: StepWeightDecay(torch.optim.Rprop([Parameter(torch.ones(1))]), 1), ValueError,
     "StepWeightDecay: param_groups[0] must have weight_decay, got ['lr', 'etas', "),
    (lambda: LambdaWeightDecay(sgd(groups=3), [ramp, ramp]), ValueError,
     "LambdaWeightDecay: weight_decay_lambda must be one function, or one for each of 3 groups, "
     "got 2"),
    (lambda: LambdaWeightDecay(sgd(), lambda epoch: -1.0), ValueError,
     "LambdaWeightDecay.step: weight_decay of group 0 must be finite and at least 0, got -0.3 for "
     "epoch 0"),
    (lambda: CorrectedWeightDecay(sgd(groups=3), [0.1, None]), ValueError,
     "CorrectedWeightDecay: max_lr must be one number, or one for each of 3 groups, got 2"),
    *((partial(CorrectedWeightDecay, sgd(), wrong), ValueError,
       f"CorrectedWeightDecay: max_lr must be finite and above 0, got {wrong!r}")
      for wrong in (0.0, -0.1, math.nan, math.inf, None, True, "1e-3", [0.0])),
    (lambda: amp_ext.optim.WeightDecayScheduler(sgd()), TypeError, "abstract"),
]  # fmt: skip


def test_bad_arguments_are_refused():
    for make, error, message in BAD_ARGUMENTS:
        with pytest.raises(error, match=re.escape(message)):
            make()


def test_each_group_has_a_function_of_its_own_and_a_bad_value_changes_nothing():
    optimizer = sgd(groups=2)
    scheduler = LambdaWeightDecay(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 1 - epoch])
    assert decays(optimizer) == [0.3, 0.3]
    scheduler.step()
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match="weight_decay of group 1 must be finite"):
        scheduler.step()
    optimizer.add_param_group({"params": [Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="one for each of 3 groups, got 2"):
        scheduler.step()
    of_three = LambdaWeightDecay(sgd(groups=3), [ramp] * 3).state_dict()
    with pytest.raises(ValueError, match="one for each of 3 groups, got 2"):
        scheduler.load_state_dict(of_three)
    assert decays(optimizer)[:2] == scheduler.get_last_weight_decay() == [0.15, 0.0]
    assert scheduler.state_dict() == before
