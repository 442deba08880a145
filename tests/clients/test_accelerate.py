"""Training through Accelerate equals the loop by hand, also where steps overflow."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
from typing import Any

import pytest
import small_training as small
import torch

import amp_ext

accelerate = small.client("accelerate")

from amp_ext.integrations.accelerate import PreparedOptimizer, use_scaler  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def make_accelerator(**options: Any) -> Any:
    return accelerate.Accelerator(mixed_precision="fp16", cpu=True, **options)


def make_sgd() -> amp_ext.optim.SGD:
    return amp_ext.optim.SGD(small.make_model().parameters(), lr=small.LR)


class Training:
    """A model, optimizer and schedule that an accelerator has prepared."""

    def __init__(self, accelerator: Any, make_optimizer: small.MakeOptimizer, dtype=torch.float32):
        self.accelerator = accelerator
        model = small.make_model().to(dtype)
        optimizer = make_optimizer(model.parameters())
        prepared = accelerator.prepare(model, optimizer, small.make_schedule(optimizer))
        self.model, self.optimizer, self.schedule = prepared

    def run(self, batches: Any = None, max_norm: float | None = None) -> list[bool]:
        """Trains as Accelerate's pages show it; returns for every step whether it was skipped."""
        skipped = []
        for x, y in small.make_batches() if batches is None else batches:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and max_norm is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    skipped.append(self.optimizer.step_was_skipped)
        return skipped

    def assert_as_by_hand(self, skipped: list[bool], make_optimizer: Any, **options: Any) -> Any:
        """Asserts that the loop by hand skips the same steps and gets the same bits."""
        model = self.accelerator.unwrap_model(self.model)
        expected = small.make_model().to(next(model.parameters()).dtype)
        optimizer, scaler = make_optimizer(expected.parameters()), small.our_scaler()
        schedule = small.make_schedule(optimizer)
        options["schedule"] = schedule
        assert skipped == small.train_by_hand(expected, optimizer, scaler, **options)
        assert any(skipped)
        assert not all(skipped)
        assert self.accelerator.scaler.get_scale() == scaler.get_scale()
        assert self.schedule.get_last_lr() == schedule.get_last_lr()
        assert self.schedule.scheduler.last_epoch == skipped.count(False)
        small.assert_same_weights(model, expected)
        return optimizer


@pytest.mark.parametrize("make_optimizer", [*small.FUSED, small.LOOPING])
@pytest.mark.parametrize(("max_norm", "accumulate"), [(None, 1), (0.5, 1), (0.5, 2)])
def test_training_equals_the_loop_by_hand(make_optimizer, max_norm, accumulate):
    accelerator = make_accelerator(gradient_accumulation_steps=accumulate)
    scaler = use_scaler(accelerator, small.our_scaler())
    training = Training(accelerator, make_optimizer)
    skipped = training.run(max_norm=max_norm)
    assert (scaler.stats().updates, scaler.stats().skips) == (len(skipped), sum(skipped))
    training.assert_as_by_hand(skipped, make_optimizer, max_norm=max_norm, accumulate=accumulate)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_norm_that_is_only_measured_is_that_of_unscaled_gradients(dtype):
    accelerator = make_accelerator()
    use_scaler(accelerator, amp_ext.GradScaler("cpu", init_scale=256.0))
    make_optimizer = functools.partial(small.our_adamw, max_grad_norm=0.5)
    training = Training(accelerator, make_optimizer, dtype)
    accelerator.backward(training.model(torch.ones(8, 6)).square().mean())
    params = list(training.model.parameters())
    scaled = [param.grad.clone() for param in params]
    norm = accelerator.clip_grad_norm_(iter(params), math.inf)
    expected = torch.stack([grad.double().norm() for grad in scaled]).norm() / 256
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    kept = [torch.equal(param.grad, grad) for param, grad in zip(params, scaled, strict=True)]
    assert kept == [dtype == torch.float16] * len(params)
    if dtype == torch.float16:
        with pytest.raises(
            ValueError, match=r"unscale FP16 gradients.*construct it with max_grad_"
        ):
            accelerator.clip_grad_norm_(params, 1.0)
    training.optimizer.step()
    assert training.optimizer.optimizer.grad_norm.item() == pytest.approx(norm.item())


@pytest.mark.parametrize("make_optimizer", [small.LOOPING, small.SWITCHED_OFF])
def test_a_scaler_set_by_hand_tells_steps_that_an_optimizer_lets_it_skip(make_optimizer):
    accelerator = make_accelerator()
    accelerator.scaler = small.our_scaler()
    accelerator.native_amp = True  # Accelerate says so on a GPU
    training = Training(accelerator, make_optimizer)
    training.assert_as_by_hand(training.run(max_norm=0.5), make_optimizer, max_norm=0.5)


@pytest.mark.parametrize("make_optimizer", [*small.FUSED, small.LOOPING])
def test_training_resumed_from_a_saved_state_ends_with_the_same_bits(make_optimizer, tmp_path):
    batches, trainings = small.make_batches(), []
    for scaler in (small.our_scaler(), amp_ext.GradScaler("cpu", growth_interval=4)):
        accelerator = make_accelerator()
        use_scaler(accelerator, scaler)
        trainings.append(Training(accelerator, make_optimizer))
    whole, resumed = trainings
    whole.run(batches[:7])
    whole.accelerator.save_state(str(tmp_path))
    whole.run(batches[7:])
    resumed.accelerator.load_state(str(tmp_path))
    assert len(resumed.run(batches[7:])) == len(batches) - 7
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert resumed.schedule.get_last_lr() == whole.schedule.get_last_lr()
    small.assert_same_weights(*(one.accelerator.unwrap_model(one.model) for one in trainings[::-1]))


@pytest.mark.parametrize("is_ours", [True, False], ids=["use-scaler", "accelerate-alone"])
def test_a_schedule_stays_at_an_outlier_only_under_our_helper(is_ours):
    accelerator = make_accelerator()
    if is_ours:
        use_scaler(accelerator, amp_ext.GradScaler("cpu", init_scale=4.0))
    else:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        accelerator.native_amp = True  # Accelerate says so on a GPU
    training = Training(accelerator, small.guarded_adamw)
    skipped = training.run(small.make_batches(broken=7))
    assert [number for number, skip in enumerate(skipped) if skip] == ([7] if is_ours else [])
    assert training.optimizer.optimizer.norm_guard.stats(wait=True).last_outlier == 8
    assert accelerator.scaler.get_scale() == 4.0
    assert training.schedule.scheduler.last_epoch == len(skipped) - is_ours


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


def test_clipping_unscales_the_gradients_of_two_optimizers_once():
    accelerator = make_accelerator()
    use_scaler(accelerator, amp_ext.GradScaler("cpu", init_scale=1024.0))
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizers = accelerator.prepare(*(amp_ext.optim.SGD([param], lr=1.0) for param in params))
    accelerator.backward(params[0].sum() + 4.0 * params[1].sum())
    accelerator.clip_grad_norm_(params, 100.0)
    for optimizer in optimizers:
        optimizer.step()
    assert [param[0].item() for param in params] == [-1.0, -4.0]


def test_the_numbers_of_grad_scaler_kwargs_hold_for_our_scaler():
    handler = accelerate.utils.GradScalerKwargs(init_scale=512.0, growth_interval=3)
    accelerator = make_accelerator(kwargs_handlers=[handler])
    scaler = use_scaler(accelerator)
    assert accelerator.scaler is scaler
    expected = amp_ext.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    assert scaler.state_dict() == expected.state_dict()


def test_an_optimizer_is_wrapped_once():
    accelerator = make_accelerator()
    use_scaler(accelerator)
    optimizer = accelerator.prepare(make_sgd())
    assert type(optimizer) is PreparedOptimizer
    assert accelerator.prepare(optimizer) is optimizer


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_precision_that_needs_no_scaler_is_refused(precision):
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    message = f"use_scaler: accelerator.mixed_precision must be 'fp16', got '{precision}'"
    with pytest.raises(ValueError, match=message):
        use_scaler(accelerator)
    assert accelerator.scaler is None


def test_what_cannot_take_our_scaler_is_refused(monkeypatch):
    accelerator = make_accelerator()
    message = "scaler must be an amp_ext.GradScaler, got torch.amp.grad_scaler.GradScaler"
    with pytest.raises(TypeError, match=message):
        use_scaler(accelerator, torch.amp.GradScaler("cpu"))
    accelerator.prepare(make_sgd())
    with pytest.raises(RuntimeError, match=r"accelerator\.prepare\(\) has already prepared 1"):
        use_scaler(accelerator)
    sharded = accelerate.utils.DistributedType.FSDP  # brings its own scaling
    monkeypatch.setattr(accelerator.state, "distributed_type", sharded)
    with pytest.raises(ValueError, match=r"distributed_type must be one of .*, got 'FSDP'"):
        use_scaler(accelerator)


@pytest.mark.parametrize("prepared", [False, True])
def test_an_accelerator_is_pickled_as_before(prepared):
    """Nets of skorch carry one, and are saved by pickle."""
    accelerator = make_accelerator()
    use_scaler(accelerator, small.our_scaler())
    if prepared:
        accelerator.prepare(make_sgd())
    twin = pickle.loads(pickle.dumps(accelerator))
    assert type(twin.scaler) is amp_ext.GradScaler
    assert twin.scaler is not accelerator.scaler
    assert twin.prepare_optimizer.args == (twin,)
    assert twin.clip_grad_norm_.args == (twin,)
    assert twin.scaler.state_dict() == accelerator.scaler.state_dict()
    training = Training(twin, small.our_adamw)
    assert training.run() == small.by_hand(small.our_adamw, schedule=training.schedule)[1]


def test_a_patched_optimizer_moves_a_schedule_at_a_skipped_step_until_it_is_switched_off():
    """As docs/migration.md says where it offers the patch."""

    def last_rate(patched: bool, switched_off: bool = False) -> float:
        accelerator = make_accelerator()
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
        with amp_ext.patch_torch(optimizers=True) if patched else contextlib.nullcontext():
            optimizer = torch.optim.AdamW(small.make_model().parameters(), lr=1.0)
        if switched_off:
            optimizer._step_supports_amp_scaling = False
        schedule = small.make_schedule(optimizer)
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
        for factor in (1.0, math.inf):
            loss = optimizer.param_groups[0]["params"][0].square().sum() * factor
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return schedule.get_last_lr()[0]

    assert last_rate(patched=False) == last_rate(patched=True, switched_off=True) == 0.9
    assert last_rate(patched=True) == 0.9**2
