"""Training through Accelerate equals the loop by hand, also where steps overflow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import (
    LR,
    assert_same_weights,
    client,
    make_batches,
    make_model,
    make_schedule,
    our_scaler,
    train_by_hand,
)

import amp_ext

accelerate = client("accelerate")

from amp_ext.integrations.accelerate import PreparedOptimizer, use_scaler  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

FUSED = [
    pytest.param(functools.partial(amp_ext.optim.AdamW, lr=LR), id="our-adamw"),
    pytest.param(functools.partial(amp_ext.optim.SGD, lr=LR, momentum=0.9), id="our-sgd"),
    pytest.param(functools.partial(torch.optim.AdamW, lr=LR, fused=True), id="torch-fused"),
]
LOOPING = [pytest.param(functools.partial(torch.optim.AdamW, lr=LR, foreach=True), id="torch")]

MakeOptimizer = Callable[..., torch.optim.Optimizer]


def make_accelerator(**options: Any) -> Any:
    return accelerate.Accelerator(mixed_precision="fp16", cpu=True, **options)


def train(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    schedule: Any,
    *,
    batches: Any = None,
    max_norm: float | None = None,
) -> list[bool]:
    """Trains as Accelerate's pages show it; returns for every step whether it was skipped."""
    skipped = []
    for x, y in make_batches() if batches is None else batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(optimizer.step_was_skipped)
    return skipped


def prepare(accelerator: Any, make_optimizer: MakeOptimizer) -> tuple[Any, Any, Any]:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    prepared: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, make_schedule(optimizer))
    return prepared


@pytest.mark.parametrize("make_optimizer", FUSED + LOOPING)
@pytest.mark.parametrize(
    ("max_norm", "accumulate"),
    [
        pytest.param(None, 1, id="plain"),
        pytest.param(0.5, 1, id="clipping"),
        pytest.param(0.5, 2, id="clipping-accumulating"),
    ],
)
def test_training_equals_the_loop_by_hand(make_optimizer, max_norm, accumulate):
    accelerator = make_accelerator(gradient_accumulation_steps=accumulate)
    scaler = use_scaler(accelerator, our_scaler())
    model, optimizer, schedule = prepare(accelerator, make_optimizer)
    skipped = train(accelerator, model, optimizer, schedule, max_norm=max_norm)

    expected = make_model()
    expected_optimizer = make_optimizer(expected.parameters())
    expected_schedule = make_schedule(expected_optimizer)
    expected_scaler = our_scaler()
    expected_skipped = train_by_hand(
        expected,
        expected_optimizer,
        expected_scaler,
        schedule=expected_schedule,
        max_norm=max_norm,
        accumulate=accumulate,
    )

    assert any(expected_skipped)
    assert not all(expected_skipped)
    assert skipped == expected_skipped
    assert scaler.history().skipped == expected_skipped
    assert scaler.get_scale() == expected_scaler.get_scale()
    assert schedule.get_last_lr() == expected_schedule.get_last_lr()
    assert schedule.scheduler.last_epoch == skipped.count(False)
    assert_same_weights(accelerator.unwrap_model(model), expected)


def switched_off(params: Any) -> torch.optim.Optimizer:
    """Our optimizer, under which the scaler unscales and decides whether to step."""
    optimizer = amp_ext.optim.AdamW(params, lr=LR)
    optimizer._step_supports_amp_scaling = False
    return optimizer


@pytest.mark.parametrize("make_optimizer", [*LOOPING, pytest.param(switched_off, id="our-adamw")])
def test_a_scaler_set_by_hand_tells_skipped_steps_of_optimizers_that_leave_them_to_it(
    make_optimizer,
):
    accelerator = make_accelerator()
    accelerator.scaler = our_scaler()
    accelerator.native_amp = True  # Accelerate says so on a GPU
    model, optimizer, schedule = prepare(accelerator, make_optimizer)
    skipped = train(accelerator, model, optimizer, schedule, max_norm=0.5)

    expected = make_model()
    expected_optimizer = make_optimizer(expected.parameters())
    expected_skipped = train_by_hand(
        expected,
        expected_optimizer,
        our_scaler(),
        schedule=make_schedule(expected_optimizer),
        max_norm=0.5,
    )
    assert any(expected_skipped)
    assert skipped == expected_skipped
    assert schedule.scheduler.last_epoch == skipped.count(False)
    assert_same_weights(accelerator.unwrap_model(model), expected)


def test_half_parameters_train_with_clipping_in_the_step():
    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        return amp_ext.optim.AdamW(params, lr=LR, max_grad_norm=0.5)

    accelerator = make_accelerator()
    use_scaler(accelerator, our_scaler())
    model = make_model().half()
    optimizer = make_optimizer(model.parameters())
    model, optimizer, schedule = accelerator.prepare(model, optimizer, make_schedule(optimizer))
    skipped = train(accelerator, model, optimizer, schedule)

    expected = make_model().half()
    expected_optimizer = make_optimizer(expected.parameters())
    expected_skipped = train_by_hand(
        expected, expected_optimizer, our_scaler(), schedule=make_schedule(expected_optimizer)
    )
    assert any(expected_skipped)
    assert skipped == expected_skipped
    assert torch.equal(optimizer.optimizer.grad_norm, expected_optimizer.grad_norm)
    for param, twin in zip(model.parameters(), expected.parameters(), strict=True):
        assert param.dtype == torch.float16
        assert torch.equal(param, twin)


@pytest.mark.parametrize("make_optimizer", FUSED + LOOPING)
def test_training_resumed_from_a_saved_state_ends_with_the_same_bits(make_optimizer, tmp_path):
    batches = make_batches()

    accelerator = make_accelerator()
    scaler = use_scaler(accelerator, our_scaler())
    whole = prepare(accelerator, make_optimizer)
    train(accelerator, *whole, batches=batches[:7])
    accelerator.save_state(str(tmp_path))
    train(accelerator, *whole, batches=batches[7:])

    fresh = make_accelerator()
    fresh_scaler = use_scaler(fresh, amp_ext.GradScaler("cpu", growth_interval=4))
    model, optimizer, schedule = prepare(fresh, make_optimizer)
    fresh.load_state(str(tmp_path))
    skipped = train(fresh, model, optimizer, schedule, batches=batches[7:])

    assert len(skipped) == len(batches) - 7
    assert fresh_scaler.state_dict() == scaler.state_dict()
    assert schedule.get_last_lr() == whole[2].get_last_lr()
    assert_same_weights(fresh.unwrap_model(model), accelerator.unwrap_model(whole[0]))


def test_each_of_two_optimizers_answers_for_itself():
    accelerator = make_accelerator()
    use_scaler(accelerator, amp_ext.GradScaler("cpu", init_scale=1.0))
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = accelerator.prepare(*(amp_ext.optim.SGD([param], lr=0.5) for param in params))
    assert not accelerator.optimizer_step_was_skipped
    accelerator.backward(params[0].sum() + params[1].sum() * float("inf"))
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [False, True]
    assert accelerator.optimizer_step_was_skipped
    torch.testing.assert_close(params[0].detach(), torch.full((3,), 0.5))
    torch.testing.assert_close(params[1].detach(), torch.ones(3))


def test_the_numbers_of_grad_scaler_kwargs_hold_for_our_scaler():
    handler = accelerate.utils.GradScalerKwargs(init_scale=512.0, growth_interval=3)
    accelerator = make_accelerator(kwargs_handlers=[handler])
    scaler = use_scaler(accelerator)
    assert accelerator.scaler is scaler
    assert scaler.state_dict() == {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 0,
    }


def test_an_optimizer_is_wrapped_once():
    accelerator = make_accelerator()
    use_scaler(accelerator)
    optimizer = accelerator.prepare(amp_ext.optim.SGD(make_model().parameters(), lr=LR))
    assert type(optimizer) is PreparedOptimizer
    assert accelerator.prepare(optimizer) is optimizer


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_precision_that_needs_no_scaler_is_refused(precision):
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    message = f"use_scaler: accelerator.mixed_precision must be 'fp16', got '{precision}'"
    with pytest.raises(ValueError, match=message):
        use_scaler(accelerator)
    assert accelerator.scaler is None


def test_a_scaler_of_torch_is_refused():
    message = "scaler must be an amp_ext.GradScaler, got torch.amp.grad_scaler.GradScaler"
    with pytest.raises(TypeError, match=message):
        use_scaler(make_accelerator(), torch.amp.GradScaler("cpu"))


def test_a_scaler_that_comes_after_prepare_is_refused():
    accelerator = make_accelerator()
    accelerator.prepare(amp_ext.optim.SGD(make_model().parameters(), lr=LR))
    with pytest.raises(RuntimeError, match=r"before accelerator\.prepare, got .* 1 prepared"):
        use_scaler(accelerator)


def test_training_that_brings_its_own_scaling_is_refused(monkeypatch):
    accelerator = make_accelerator()
    monkeypatch.setattr(
        accelerator.state, "distributed_type", accelerate.utils.DistributedType.FSDP
    )
    with pytest.raises(ValueError, match=r"distributed_type must be one of .*, got 'FSDP'"):
        use_scaler(accelerator)
