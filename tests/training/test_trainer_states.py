"""Tests of the trainer's metrics and checkpoints, its config, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from harness import trainer_cases as cases
from harness.edge_shapes import BF16, F16, F32
from harness.rows import rows
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, SequentialLR

import amp_ext
from amp_ext.training import MixedPrecisionConfig, StepMetrics

# Metrics.


def test_metrics_are_tensors_and_become_numbers_on_request(device):
    options = {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    trainer = cases.new_trainer("fp16", cases.new_model(device), **options)
    first = trainer.train_step(cases.X.to(device), cases.TARGET.to(device))
    metrics = trainer.train_step(cases.X.to(device), cases.TARGET.to(device))
    assert isinstance(metrics, StepMetrics)
    for name in ("loss", "loss_scale", "grad_norm", "skipped"):
        tensor = getattr(metrics, name)
        found = tensor.shape, tensor.device.type, tensor.requires_grad
        assert found == ((), device.type, False)
    assert metrics.skipped.dtype == torch.bool
    figures = metrics.to_dict()
    loss, norm = metrics.loss.item(), metrics.grad_norm.item()
    assert figures == {"loss": loss, "loss_scale": 256.0, "grad_norm": norm, "skipped": False}
    assert [type(value) for value in figures.values()] == [float, float, float, bool]
    assert list(first.to_dict().values()) == [first.loss.item(), 256.0, None, None]


@pytest.mark.parametrize("precision", cases.PRECISIONS)
def test_metrics_keep_their_values_in_later_steps(precision):
    options = {"max_grad_norm": 1.0, "initial_loss_scale": cases.TOO_LARGE, "growth_interval": 1}
    trainer, again = cases.two_trainers(precision, **options)
    taken = cases.train_on(trainer, cases.batches(count=20))
    at_once = [str(again.train_step(x, target).to_dict()) for x, target in cases.batches(count=20)]
    assert [str(metrics.to_dict()) for metrics in taken] == at_once
    assert len(set(at_once)) == 20


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


@cases.ours_and_torchs("AdamW", 1e-3)
@pytest.mark.parametrize("precision", cases.PRECISIONS)
def test_a_step_reads_no_tensor_on_the_host(precision, make, monkeypatch):
    """What would wait for a GPU must not be in the trainer, nor below it but where noted."""
    options = {"max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
    trainer = cases.new_trainer(precision, optimizer=make, **options)
    data, readers = cases.batches(count=5), set()
    cases.train_on(trainer, data)
    trainer.flush()

    def watched(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            readers.add(sys._getframe(1).f_globals["__name__"])
            return read(*args, **options)

        return note

    for name in READS:
        monkeypatch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
    cases.train_on(trainer, data)
    trainer.flush()
    monkeypatch.undo()
    # On the CPU, where nothing waits, the scaler looks whether the scale fell to 0; torch's asks
    # whether to call torch's loop, which keeps its step counters on the CPU.
    allowed = ("amp_ext.scaler.grad_scaler", "torch.amp") if precision == "fp16" else ()
    if make.func is torch.optim.AdamW:
        allowed = (*allowed, "torch.optim")
        assert "torch.optim.adam" in readers or "torch.optim.optimizer" in readers
    assert {reader for reader in readers if not reader.startswith(allowed)} == set()


# Checkpoints.


TWO_STEPS = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(("old", "new"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_the_precision_may_change_between_two_runs(old, new):
    before = cases.new_trainer(old, initial_loss_scale=32.0, optimizer=amp_ext.optim.AdamW)
    after = cases.new_trainer(new, initial_loss_scale=64.0, optimizer=amp_ext.optim.AdamW)
    before.train_step(cases.X, cases.TARGET)
    after.load_state_dict(before.state_dict())
    wanted = 64.0 if new == "fp16" else 1.0
    assert after.train_step(cases.X, cases.TARGET).to_dict()["loss_scale"] == wanted
    assert after.optimizer.state_dict()["state"][0]["step"] == 2


THREE_STEPS = {"gradient_accumulation_steps": 3}
SCALED = {**TWO_STEPS, "scaler": amp_ext.GradScaler("cpu")}
SCHEDULED = {"scheduler": cases.halving}
UNFIT = r"must be \(2, {}, {}\), got \({}, False, 4\)\. Call flush\(\) before save"


LOADING_ERRORS = [
    (SCHEDULED, {}, {}, "must have the states of 0 schedulers, got 1"),
    ({}, SCHEDULED, {}, "must have the states of 1 schedulers, got 0"),
    (TWO_STEPS, THREE_STEPS, {}, UNFIT.format(False, 4, 3)),
    (SCALED, TWO_STEPS, {}, UNFIT.format(True, 4, 2)),
    (TWO_STEPS, TWO_STEPS, {"gradients": 3 * [cases.X]}, UNFIT.format(False, 3, 2)),
]


@pytest.mark.parametrize(("saved", "loading", "change", "text"), LOADING_ERRORS)
def test_a_state_that_does_not_fit_is_refused(saved, loading, change, text):
    first, second = cases.new_trainer(**saved), cases.new_trainer(**loading)
    first.train_step(cases.X, cases.TARGET)
    second.train_step(cases.X, cases.TARGET)
    before, grads = second.state_dict(), cases.grads_of(second)
    with pytest.raises(ValueError, match=text):
        second.load_state_dict(first.state_dict() | change)
    for key in ("scheduler", "accumulated"):
        assert second.state_dict()[key] == before[key]
    cases.assert_same(cases.grads_of(second), grads)


def test_a_resumed_accumulation_can_be_flushed_at_once():
    straight, resumed = cases.two_trainers("fp16", scheduler=cases.halving, **TWO_STEPS)
    cases.train_on(straight, cases.batches(count=5))
    resumed.load_state_dict(straight.state_dict(), model=straight.model.state_dict())
    assert resumed.flush().to_dict() == straight.flush().to_dict() | {"loss": None}
    cases.assert_same(cases.params_of(resumed), cases.params_of(straight))


# What is refused.


def test_a_disabled_scaler_is_refused():
    text = "^MixedPrecisionTrainer: scaler must be enabled, got a disabled one$"
    with pytest.raises(ValueError, match=text):
        cases.new_trainer(scaler=amp_ext.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("precision", cases.PRECISIONS)
@pytest.mark.parametrize(("wanted", "dtype"), [("fp16", F16), ("bf16", BF16)])
def test_16_bit_parameters_need_their_own_precision(wanted, dtype, precision):
    model = cases.new_model(dtype=dtype)
    if precision == wanted:
        assert cases.new_trainer(precision, model).config.precision == wanted
        return
    text = f"config.precision must be that of 16-bit parameters, got {precision!r} for .* {dtype}"
    with pytest.raises(ValueError, match=f"^MixedPrecisionTrainer: {text}"):
        cases.new_trainer(precision, model)


DICT = cases.WithLoss(lambda loss, logits: {"loss": loss, "logits": logits})
OBJECT = cases.WithLoss(lambda loss, logits: types.SimpleNamespace(logits=logits))


NO_LOSS = {
    "dict": (DICT, None, "NoneType"),
    "object": (OBJECT, None, "SimpleNamespace"),
    "output": (cases.new_model(), None, r"torch.Size\(\[8, 2\]\)"),
    "number": (cases.new_model(), lambda output: output.mean().item(), "float"),
}


@pytest.mark.parametrize(("model", "loss_function", "got"), rows(NO_LOSS))
def test_a_batch_without_a_loss_is_refused(model, loss_function, got):
    trainer = cases.new_trainer(model=model, loss_function=loss_function)
    before = cases.params_of(trainer)
    text = f"^train_step: the loss function, or else the model, must return a loss, .* got {got}$"
    with pytest.raises(ValueError, match=text):
        trainer.train_step(cases.X)
    targets = "^train_step: targets must be None without a loss_function$"
    if loss_function is None:
        with pytest.raises(ValueError, match=targets):
            trainer.train_step(cases.X, cases.TARGET)
    cases.assert_same(cases.params_of(trainer), before)
    assert trainer.flush() is None


# The config and the scaler.


@pytest.mark.parametrize(
    ("precision", "dtype"), zip(cases.PRECISIONS, (F32, BF16, F16), strict=True)
)
def test_a_config_has_the_dtype_of_its_precision_and_cannot_be_changed(precision, dtype):
    config = MixedPrecisionConfig(precision)
    assert config.dtype == dtype
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.precision = "fp16"


COUNT = "an int of 1 or more"


OUT_OF_RANGE = [
    *(
        ("precision", precision, "'fp32', 'bf16' or 'fp16'")
        for precision in ("fp8", "float16", torch.float16, 16, None, [])
    ),
    ("max_grad_norm", -1.0, "0 or more, or None"),
    ("max_grad_norm", math.nan, "0 or more, or None"),
    ("gradient_accumulation_steps", 0, COUNT),
    ("gradient_accumulation_steps", True, COUNT),
]


@pytest.mark.parametrize(("name", "value", "wanted"), OUT_OF_RANGE)
def test_a_setting_out_of_range_is_refused(name, value, wanted):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        MixedPrecisionConfig(**{name: value})
    assert str(caught.value) == f"MixedPrecisionConfig: {name} must be {wanted}, got {value!r}"


def test_numbers_of_numpy_are_settings():
    config = MixedPrecisionConfig("bf16", numpy.float32(4), numpy.int64(7))
    assert config == MixedPrecisionConfig("bf16", 4.0, 7)
    assert type(config.initial_loss_scale) is float


def schedule_of_numpy(optimizer: torch.optim.Optimizer) -> SequentialLR:
    by_cosine = LambdaLR(optimizer, lambda step: numpy.cos(step / 10))
    return SequentialLR(optimizer, [by_cosine, MultiStepLR(optimizer, numpy.array([2, 4]))], [3])


@cases.ours_and_torchs("AdamW", 0.1)
def test_a_schedule_of_numpy_is_saved_in_numbers_of_python(make, tmp_path):
    straight, again = cases.two_trainers(optimizer=make, scheduler=schedule_of_numpy)
    for trainer in (straight, straight, again):
        trainer.train_step(cases.X, cases.TARGET)
    straight.save(tmp_path / "run.pt")
    again.load(tmp_path / "run.pt")
    for trainer in 4 * (straight, again):
        trainer.train_step(cases.X, cases.TARGET)
    assert straight.scheduler.get_last_lr() == again.scheduler.get_last_lr()
    cases.assert_same(cases.params_of(again), cases.params_of(straight))


def test_gradients_amid_an_accumulation_follow_their_names():
    def new(order):
        model = cases.new_model()
        named = list(model.named_parameters())[::order]
        optimizer = lambda _: amp_ext.optim.AdamW(named, lr=0.1)  # noqa: E731
        return cases.new_trainer(model=model, optimizer=optimizer, **TWO_STEPS)

    straight, again = new(1), new(-1)
    for _ in range(3):
        straight.train_step(cases.X, cases.TARGET)
    again.model.load_state_dict(straight.model.state_dict())
    again.load_state_dict(copy.deepcopy(straight.state_dict()))
    for trainer in (straight, again):
        trainer.train_step(cases.X, cases.TARGET)
    cases.assert_same(cases.params_of(again), cases.params_of(straight))


@pytest.mark.filterwarnings("error")
def test_a_scaler_for_fp16_is_on_and_has_torchs_or_the_given_settings():
    default, torchs = amp_ext.training.create_fp16_grad_scaler("cpu"), torch.amp.GradScaler("cpu")
    assert default.state_dict() == torchs.state_dict()
    options = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    scaler = amp_ext.training.create_fp16_grad_scaler(init_scale=8.0, **options)
    assert type(scaler) is amp_ext.GradScaler
    assert scaler.is_enabled()
    configured = cases.new_trainer("fp16", initial_loss_scale=8.0, **options).scaler
    expected = torch.amp.GradScaler("cpu", 8.0, **options).state_dict()
    assert scaler.state_dict() == configured.state_dict() == expected
