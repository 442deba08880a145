"""Tests of MixedPrecisionTrainer, its config and its metrics, against loops written by hand."""

from __future__ import annotations

import collections
import functools
import math
import sys
import types
from typing import Any

import pytest
import torch
from harness import trainer_cases as cases
from harness.edge_shapes import BF16, F16, F32
from harness.reference import tolerance
from harness.rows import rows
from harness.trainer_cases import TARGET, X, assert_same, batches, new_model, new_trainer, params_of
from torch import Tensor, nn

import amp_ext
from amp_ext.training import MixedPrecisionConfig

# A loop by hand, with torch alone.


Log = dict[str, list[Any]]  # what a training leaves behind; rates are of steps that were taken


def train_by_hand(device, precision, make, max_grad_norm=None, accumulation=1) -> Log:
    model, log = new_model(device), collections.defaultdict(list)
    optimizer = make(model.parameters())
    scheduler = cases.halving(optimizer)
    options = {"growth_interval": cases.GROWTH_INTERVAL, "enabled": precision == "fp16"}
    scaler = torch.amp.GradScaler(device.type, cases.TOO_LARGE, **options)
    dtype = MixedPrecisionConfig(precision).dtype
    for index, (x, target) in enumerate(batches(device)):
        with torch.autocast(device.type, dtype, enabled=dtype != F32):
            loss = cases.mse_loss(model(x), target)
        log["losses"].append(loss.item())
        scaler.scale(loss / accumulation).backward()
        log["scales"].append(scaler.get_scale())
        if (index + 1) % accumulation:
            continue
        if max_grad_norm is not None:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            log["norms"].append(norm.item())
        lr = optimizer.param_groups[0]["lr"]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        log["skipped"].append(scaler.get_scale() < log["scales"][-1])
        if not log["skipped"][-1]:
            log["lrs"].append(lr)
            scheduler.step()
    log["params"] = [param.detach().clone() for param in model.parameters()]
    return log


def train_with_trainer(device, precision, make, max_grad_norm=None, accumulation=1) -> Log:
    options = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulation}
    options |= {"growth_interval": cases.GROWTH_INTERVAL, "scheduler": cases.halving}
    options |= {"initial_loss_scale": cases.TOO_LARGE, "optimizer": make}
    trainer = new_trainer(precision, new_model(device), **options)
    log, lr_at_step = collections.defaultdict(list), []
    hook = lambda optimizer, *_: lr_at_step.append(optimizer.param_groups[0]["lr"])  # noqa: E731
    trainer.optimizer.register_step_pre_hook(hook)
    for x, target in batches(device):
        lr_at_step.clear()
        figures = trainer.train_step(x, target).to_dict()
        log["losses"].append(figures["loss"])
        log["scales"].append(figures["loss_scale"])
        log["norms"] += [] if figures["grad_norm"] is None else [figures["grad_norm"]]
        if figures["skipped"] is not None:
            log["skipped"].append(figures["skipped"])
            log["lrs"] += [] if figures["skipped"] else lr_at_step
    log["params"] = params_of(trainer)
    return log


BOTH = {"max_grad_norm": 0.5, "accumulation": 2}
SETTINGS = [("fp16", {}), ("fp16", {"accumulation": 3}), ("fp16", {"max_grad_norm": 0.5})]
SETTINGS += [(precision, BOTH) for precision in cases.PRECISIONS]
# Ours or torch's in the trainer; torch's by hand.
OPTIMIZERS = [
    pytest.param(cases.torchs_sgd, cases.torchs_sgd, id="torch-sgd"),
    pytest.param(*[cases.torchs_adamw] * 2, id="torch-adamw-fused"),
    pytest.param(
        lambda params: amp_ext.optim.AdamW(params, 0.05, eps=1e-3),
        lambda params: torch.optim.AdamW(params, 0.05, eps=1e-3),
        id="our-adamw",
    ),
]


@pytest.mark.parametrize(("precision", "settings"), SETTINGS)
@pytest.mark.parametrize(("make", "make_torchs"), OPTIMIZERS)
def test_training_is_that_of_a_loop_by_hand(device, precision, make, make_torchs, settings):
    actual = train_with_trainer(device, precision, make, **settings)
    expected = train_by_hand(device, precision, make_torchs, **settings)
    steps = cases.BATCHES // settings.get("accumulation", 1)
    assert len(actual["skipped"]) == steps
    if precision == "fp16":
        assert 0 < sum(expected["skipped"]) < steps - 3, "overflows and clean steps are wanted"
        assert all(map(math.isfinite, expected["norms"])) == ("max_grad_norm" not in settings)
    for name in ("skipped", "scales", "lrs"):
        assert actual[name] == expected[name], name
    close = tolerance(torch.bfloat16 if precision != "fp32" else torch.float32, steps)
    rel = close["rtol"]
    assert actual["losses"] == pytest.approx(expected["losses"], rel=rel, abs=close["atol"])
    for norm, wanted in zip(actual["norms"], expected["norms"], strict=True):
        # That of gradients with an inf may be inf or NaN.
        assert norm == pytest.approx(wanted, rel=rel) or not math.isfinite(wanted)
    for param, wanted in zip(actual["params"], expected["params"], strict=True):
        torch.testing.assert_close(param, wanted, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("precision", cases.PRECISIONS)
def test_with_torchs_optimizer_training_has_the_bits_of_a_loop_by_hand(precision):
    cpu = torch.device("cpu")
    actual = train_with_trainer(cpu, precision, cases.torchs_sgd)
    expected = train_by_hand(cpu, precision, cases.torchs_sgd)
    assert_same(actual.pop("params"), expected.pop("params"))
    assert {name: actual[name] for name in expected} == expected


# Accumulation.


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@cases.ours_and_torchs("SGD", 0.1)
def test_flush_steps_with_the_mean_of_what_is_left(scaled, make):
    scaler = amp_ext.GradScaler("cpu", init_scale=1024.0) if scaled else None
    options = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5}
    small = new_trainer(optimizer=make, scaler=scaler, **options)
    data = batches(count=3)
    before = params_of(small)
    assert [metrics.skipped for metrics in cases.train_on(small, data)] == [None] * 3
    assert_same(params_of(small), before)
    metrics = small.flush()
    xs, targets = zip(*data, strict=True)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cases.mse_loss(model(torch.cat(xs)), torch.cat(targets)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close(metrics.grad_norm, norm, **tolerance(torch.float32))
    assert metrics.to_dict()["skipped"] is False
    for param, wanted in zip(params_of(small), model.parameters(), strict=True):
        torch.testing.assert_close(param, wanted.detach(), **tolerance(torch.float32))
    assert small.flush() is None


# The scheduler.


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Notes updates of the scale, and when the trainer reads a tensor, which waits for a GPU."""
    calls, read, update = [], Tensor.__bool__, amp_ext.GradScaler.update

    def noting_read(tensor: Tensor) -> bool:
        if sys._getframe(1).f_globals["__name__"] == "amp_ext.training.trainer":
            calls.append("wait")
        return read(tensor)

    def noting_update(scaler: Any) -> None:
        update(scaler)
        calls.append("update")

    monkeypatch.setattr(Tensor, "__bool__", noting_read)
    monkeypatch.setattr(amp_ext.GradScaler, "update", noting_update)
    return calls


def scaler_or_guard(kind: str) -> dict[str, Any]:
    if kind == "scaler":
        return {"scaler": amp_ext.GradScaler("cpu", 8.0)}
    return {"optimizer": cases.guarded_sgd()}


@pytest.mark.parametrize("finish", ["finish_scheduler_step", "flush", "state_dict"])
@pytest.mark.parametrize("kind", ["scaler", "guard"])
def test_the_scheduler_waits_for_the_step_before_and_never_for_its_own(finish, kind, calls):
    trainer = new_trainer(**scaler_or_guard(kind), scheduler=cases.halving)
    cases.train_on(trainer, batches(count=3))
    updates = ["update"] if kind == "scaler" else []
    assert calls == [*updates, "wait", *updates, "wait", *updates]
    assert trainer.scheduler.last_epoch == 2
    calls.clear()
    for _ in range(2):
        getattr(trainer, finish)()
        assert trainer.scheduler.last_epoch == 3
    assert calls == ["wait"]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_scheduler_moves_before_the_gradients_are_released(precision):
    losses = []
    for is_released in (False, True):
        scaler = None if precision == "bf16" else amp_ext.GradScaler("cpu", 64.0)
        options = {"optimizer": amp_ext.optim.AdamW, "scheduler": cases.halving}
        trainer = new_trainer(precision, scaler=scaler, **options)
        if is_released:
            amp_ext.optim.release_gradients(trainer.optimizer, trainer.scaler)
        losses.append([trainer.train_step(X, TARGET).loss.item() for _ in range(4)])
    assert losses[0] == losses[1]


def test_without_a_scaler_the_scheduler_moves_at_once(calls):
    trainer = new_trainer(scheduler=cases.halving)
    trainer.train_step(X, TARGET)
    assert trainer.scheduler.last_epoch == 1
    assert calls == []


# Inputs, outputs, losses.


class Adder(nn.Module):
    """Takes several arguments, some by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = new_model()

    def forward(self, first: Tensor, second: Tensor, *, factor: float = 1.0) -> Tensor:
        return self.inner(first + second) * factor


MAPPING = collections.UserDict(second=X, first=X, factor=1.0)


@pytest.mark.parametrize("inputs", [(X, X), [X, X], {"first": X, "second": X}, MAPPING], ids=type)
def test_inputs_are_passed_by_position_or_by_name(inputs):
    metrics = new_trainer(model=Adder()).train_step(inputs, TARGET)
    assert torch.equal(metrics.loss, cases.mse_loss(new_model()(2 * X), TARGET).detach())


class OrderedOutput(collections.OrderedDict):
    """A mapping with attributes, as libraries of language models return it."""

    loss = property(lambda self: self["loss"])


Pair = collections.namedtuple("Pair", "logits loss")
OUTPUTS = {
    "loss": lambda loss, logits: loss,
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "dict": lambda loss, logits: {"logits": logits, "loss": loss},
    "object": lambda loss, logits: types.SimpleNamespace(loss=loss),
    "namedtuple": lambda loss, logits: Pair(logits, loss),
    "both": lambda loss, logits: OrderedOutput(logits=logits, loss=loss),
    "another-shape": lambda loss, logits: {"loss": loss.reshape(1, 1)},
}


@pytest.mark.parametrize("wrap", rows(OUTPUTS))
def test_a_model_may_give_its_own_loss(wrap):
    trainer = new_trainer(model=cases.WithLoss(wrap), loss_function=None)
    metrics = trainer.train_step({"x": X, "labels": TARGET})
    usual = new_trainer()
    wanted = usual.train_step(X, TARGET)
    assert metrics.loss.shape == ()
    assert torch.equal(metrics.loss, wanted.loss)
    assert_same(params_of(trainer), params_of(usual))


# Precisions.


def of_unfrozen(params: Any) -> torch.optim.Optimizer:
    return amp_ext.optim.SGD([param for param in params if param.requires_grad], 0.1)


class Witness(nn.Module):
    """Notes whether autocast is on and what it is given."""

    def __init__(self, dtype: torch.dtype, frozen: torch.dtype | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 2, dtype=frozen or dtype).requires_grad_(frozen is None)
        self.last = nn.Linear(2, 2, dtype=dtype)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.seen += [torch.is_autocast_enabled("cpu"), x.dtype, index.dtype]
        return self.last(self.first(x))


AUTOCAST = [
    ("fp32", Witness(F32), [False, F32], [False, F32]),
    ("bf16", Witness(F32), [True, F32], [True, BF16]),
    ("fp16", Witness(F32), [True, F32], [True, F16]),
    ("bf16", Witness(BF16), [False, BF16], [True, BF16]),
    ("fp16", Witness(F16), [False, F16], [True, F16]),
    ("bf16", Witness(F32, BF16), [True, F32], [True, BF16]),  # frozen
    ("fp16", Witness(F32, BF16), [True, F32], [True, F16]),
]


@pytest.mark.parametrize(("precision", "model", "model_sees", "loss_sees"), AUTOCAST)
def test_autocast_is_on_where_it_has_something_to_do(precision, model, model_sees, loss_sees):
    seen = []

    def loss_function(output: Tensor) -> Tensor:
        seen.extend([torch.is_autocast_enabled("cpu"), output.dtype])
        loss = cases.mse_loss(output, TARGET)
        seen.append(loss.dtype)
        return loss

    trainer = new_trainer(precision, model, optimizer=of_unfrozen, loss_function=loss_function)
    index = torch.zeros(3, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):  # the caller's has no say
        metrics = trainer.train_step((X, index))
    assert model.seen == [*model_sees, torch.int64]
    assert seen == [*loss_sees, torch.float32]
    assert metrics.to_dict()["skipped"] is False
    assert (trainer.scaler is not None) == (precision == "fp16")


def test_our_optimizers_take_over_the_configured_norm_and_keep_their_own():
    for own, configured in ((None, 0.25), (0.25, None)):
        make = functools.partial(amp_ext.optim.SGD, lr=0.1, max_grad_norm=own)
        trainer = new_trainer(optimizer=make, max_grad_norm=configured)
        metrics = trainer.train_step(X, TARGET)
        grads = [param.grad for param in trainer.model.parameters()]
        torch.testing.assert_close(metrics.grad_norm, nn.utils.get_total_norm(grads))
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        norms = [group["max_grad_norm"] for group in trainer.optimizer.param_groups]
        assert norms == [0.25, 0.25]


# Overflows, NaN, exceptions.


@cases.ours_and_torchs("AdamW", 0.1)
def test_a_nan_loss_leaves_no_trace_but_in_the_scale(make):
    options = {"optimizer": make, "scheduler": cases.halving, "max_grad_norm": 1.0}
    trainer = new_trainer("fp16", initial_loss_scale=64.0, **options)
    spared = new_trainer("fp16", initial_loss_scale=32.0, **options)
    before = params_of(trainer)
    metrics = trainer.train_step(X, TARGET * math.nan)
    assert math.isnan(metrics.loss)
    assert metrics.skipped.item() is True
    assert_same(params_of(trainer), before)
    metrics, wanted = trainer.train_step(X, TARGET), spared.train_step(X, TARGET)
    assert metrics.to_dict() == wanted.to_dict()
    assert metrics.to_dict()["loss_scale"] == 32.0
    assert_same(params_of(trainer), params_of(spared))
    trainer.flush()
    spared.flush()
    assert trainer.scheduler.get_last_lr() == spared.scheduler.get_last_lr()


def fail(_: Tensor) -> None:
    raise RuntimeError("backward failed")


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that fails in the forward or the backward pass if the target says so."""
    if target.isinf().any():
        raise RuntimeError("forward failed")
    loss = cases.mse_loss(output, target)
    if target.isnan().any():
        loss.register_hook(fail)
    return loss


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def interrupted_flush(trainer: Any) -> None:
    hook = trainer.optimizer.register_step_pre_hook(interrupt)
    try:
        trainer.flush()
    finally:
        hook.remove()


FAILING = {
    "forward": (lambda trainer: trainer.train_step(X, TARGET * math.inf), 1),
    "backward": (lambda trainer: trainer.train_step(X, TARGET * math.nan), 0),
    "flush": (interrupted_flush, 0),
}


@pytest.mark.parametrize(("fails", "batches_kept"), rows(FAILING))
@cases.ours_and_torchs("SGD", 0.1)
def test_after_an_error_training_goes_on(make, fails, batches_kept):
    options = {"gradient_accumulation_steps": 2, "loss_function": failing_loss}
    options |= {"max_grad_norm": 0.5, "optimizer": make}
    trainer, spared = cases.two_trainers("fp16", **options)
    data = batches(count=3)
    trainer.train_step(*data[0])
    with pytest.raises((RuntimeError, KeyboardInterrupt), match=r"failed|^$"):
        fails(trainer)
    cases.train_on(spared, data[:batches_kept])
    for each in (trainer, spared):
        *_, metrics = cases.train_on(each, data[1 : 3 - batches_kept])
        assert metrics.to_dict()["skipped"] is False
    assert_same(params_of(trainer), params_of(spared))
    assert not torch.equal(params_of(trainer)[0], next(new_model().parameters()))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("container", [list, tuple])
def test_several_schedulers_are_stepped(precision, container):
    def both(optimizer: Any) -> Any:
        return container([cases.halving(optimizer), cases.falling_decay(optimizer)])

    decayed = functools.partial(amp_ext.optim.AdamW, lr=0.1, weight_decay=0.5)
    trainer = new_trainer(precision, optimizer=decayed, scheduler=both)
    cases.train_on(trainer, batches(count=5))
    trainer.finish_scheduler_step()
    group = trainer.optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(0.1 * 0.9**5, rel=1e-12)
    assert group["weight_decay"] == 0.5**6
