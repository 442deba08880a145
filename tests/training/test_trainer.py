"""Tests of MixedPrecisionTrainer, its config and its metrics, against loops written by hand."""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import same_bits, tolerance
from torch import Tensor, nn

import amp_ext
from amp_ext.training import (
    MixedPrecisionConfig,
    MixedPrecisionTrainer,
    StepMetrics,
    create_fp16_grad_scaler,
)

# So large that the first steps overflow and the scale must come down; then it grows soon.
TOO_LARGE, GROWTH_INTERVAL = 2.0**20, 3
BATCHES = 36

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

mse_loss = nn.functional.mse_loss


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps matrix products of a few elements away from threads, whose start costs far more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_model(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(device, dtype)


def batches(device: Any = "cpu", count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs = [torch.randn(8, 6) for _ in range(count)]
    return [(x.to(device), 3 * x[:, :2].to(device) + 1) for x in inputs]


X, TARGET = batches(count=1)[0]


def new_trainer(precision: str = "fp32", model: nn.Module | None = None, **options: Any) -> Any:
    """Returns a trainer around SGD; options of the config and of the trainer may be mixed.

    The scale is such that nothing overflows.
    """
    options = {"initial_loss_scale": 256.0, **options}
    model = new_model() if model is None else model
    settings = {field.name for field in dataclasses.fields(MixedPrecisionConfig)} & options.keys()
    config = MixedPrecisionConfig(precision, **{name: options.pop(name) for name in settings})
    make = options.pop("optimizer", lambda params: amp_ext.optim.SGD(params, 0.1))
    optimizer = make(model.parameters())
    options.setdefault("loss_function", mse_loss)
    if isinstance(options.get("scheduler"), types.FunctionType):
        options["scheduler"] = options["scheduler"](optimizer)
    return MixedPrecisionTrainer(model, optimizer, config, **options)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that is another one after each step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def params_of(trainer: MixedPrecisionTrainer) -> list[Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(same_bits, actual, expected))


# A loop by hand, with torch alone.


@dataclasses.dataclass
class Log:
    """What a training leaves behind."""

    losses: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    skipped: list[bool] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    lrs: list[float] = dataclasses.field(default_factory=list)  # of the steps that were taken
    params: list[Tensor] = dataclasses.field(default_factory=list)


def train_by_hand(
    device: torch.device,
    precision: str,
    make: Callable[..., torch.optim.Optimizer],
    *,
    max_grad_norm: float | None = None,
    gradient_accumulation_steps: int = 1,
) -> Log:
    model, log = new_model(device), Log()
    optimizer = make(model.parameters())
    scheduler = halving(optimizer)
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=TOO_LARGE,
        growth_interval=GROWTH_INTERVAL,
        enabled=precision == "fp16",
    )
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}[precision]
    for index, (x, target) in enumerate(batches(device)):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = mse_loss(model(x), target)
        log.losses.append(loss.item())
        scaler.scale(loss / gradient_accumulation_steps).backward()
        log.scales.append(scaler.get_scale())
        if (index + 1) % gradient_accumulation_steps:
            continue
        if max_grad_norm is not None:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            log.norms.append(norm.item())
        lr = optimizer.param_groups[0]["lr"]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        log.skipped.append(scaler.get_scale() < log.scales[-1])
        if not log.skipped[-1]:
            log.lrs.append(lr)
            scheduler.step()
    log.params = [param.detach().clone() for param in model.parameters()]
    return log


def train_with_trainer(
    device: torch.device, precision: str, make: Callable[..., Any], **settings: Any
) -> Log:
    trainer = new_trainer(
        precision,
        new_model(device),
        optimizer=make,
        scheduler=halving,
        initial_loss_scale=TOO_LARGE,
        growth_interval=GROWTH_INTERVAL,
        **settings,
    )
    log, lr_at_step = Log(), []
    hook = lambda optimizer, *_: lr_at_step.append(optimizer.param_groups[0]["lr"])  # noqa: E731
    trainer.optimizer.register_step_pre_hook(hook)
    for x, target in batches(device):
        lr_at_step.clear()
        figures = trainer.train_step(x, target).to_dict()
        log.losses.append(figures["loss"])
        log.scales.append(figures["loss_scale"])
        if figures["grad_norm"] is not None:
            log.norms.append(figures["grad_norm"])
        if figures["skipped"] is not None:
            log.skipped.append(figures["skipped"])
            log.lrs += [] if figures["skipped"] else lr_at_step
    log.params = params_of(trainer)
    return log


PRECISIONS = ["fp32", "bf16", "fp16"]
BOTH = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
SETTINGS = [
    pytest.param("fp16", {}, id="fp16-plain"),
    pytest.param("fp16", {"gradient_accumulation_steps": 3}, id="fp16-accumulation"),
    pytest.param("fp16", {"max_grad_norm": 0.5}, id="fp16-clipping"),
    *(pytest.param(precision, BOTH, id=f"{precision}-both") for precision in PRECISIONS),
]


def torchs_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


# Ours or torch's in the trainer; torch's by hand.
OPTIMIZERS = [
    pytest.param(torchs_sgd, torchs_sgd, id="torch-sgd"),
    pytest.param(
        *[lambda ps: torch.optim.AdamW(ps, 0.05, eps=1e-3, fused=True)] * 2,
        id="torch-adamw-fused",
    ),
    pytest.param(
        lambda ps: amp_ext.optim.AdamW(ps, 0.05, eps=1e-3),
        lambda ps: torch.optim.AdamW(ps, 0.05, eps=1e-3),
        id="our-adamw",
    ),
]


@pytest.mark.parametrize(("precision", "settings"), SETTINGS)
@pytest.mark.parametrize(("make", "make_torchs"), OPTIMIZERS)
def test_training_is_that_of_a_loop_by_hand(device, precision, make, make_torchs, settings):
    actual = train_with_trainer(device, precision, make, **settings)
    expected = train_by_hand(device, precision, make_torchs, **settings)
    steps = BATCHES // settings.get("gradient_accumulation_steps", 1)
    assert len(actual.skipped) == steps
    if precision == "fp16":
        assert 0 < sum(expected.skipped) < steps - 3, "overflows and clean steps are wanted"
        assert all(map(math.isfinite, expected.norms)) == ("max_grad_norm" not in settings)
    assert actual.skipped == expected.skipped
    assert actual.scales == expected.scales
    assert actual.lrs == expected.lrs
    close = tolerance(torch.bfloat16 if precision != "fp32" else torch.float32, steps)
    assert actual.losses == pytest.approx(expected.losses, rel=close["rtol"], abs=close["atol"])
    for norm, wanted in zip(actual.norms, expected.norms, strict=True):
        # That of gradients with an inf may be inf or NaN.
        assert norm == pytest.approx(wanted, rel=close["rtol"]) or not math.isfinite(wanted)
    for param, wanted in zip(actual.params, expected.params, strict=True):
        torch.testing.assert_close(param, wanted, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_torchs_optimizer_training_has_the_bits_of_a_loop_by_hand(precision):
    actual = train_with_trainer(torch.device("cpu"), precision, torchs_sgd)
    expected = train_by_hand(torch.device("cpu"), precision, torchs_sgd)
    assert actual == dataclasses.replace(expected, params=actual.params)
    assert_same(actual.params, expected.params)


# Accumulation.


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("make", [amp_ext.optim.SGD, torch.optim.SGD], ids=["ours", "torchs"])
def test_flush_steps_with_the_mean_of_what_is_left(scaled, make):
    scaler = amp_ext.GradScaler("cpu", init_scale=1024.0) if scaled else None
    options = {"optimizer": lambda params: make(params, 0.1), "scaler": scaler}
    small = new_trainer(gradient_accumulation_steps=4, max_grad_norm=0.5, **options)
    data = batches(count=3)
    before = params_of(small)
    for x, target in data:
        assert small.train_step(x, target).skipped is None
    assert_same(params_of(small), before)
    metrics = small.flush()
    xs, targets = zip(*data, strict=True)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mse_loss(model(torch.cat(xs)), torch.cat(targets)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close(metrics.grad_norm, norm, **tolerance(torch.float32))
    assert metrics.to_dict()["skipped"] is False
    for param, wanted in zip(params_of(small), model.parameters(), strict=True):
        torch.testing.assert_close(param, wanted.detach(), **tolerance(torch.float32))
    assert small.flush() is None


# The scheduler.


class RecordingScaler(amp_ext.GradScaler):
    """Notes when it is asked to wait, and when it updates."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []

    def last_step_skipped(self, optimizer: Any = None, *, wait: bool = False) -> bool | None:
        self.calls.append("wait" if wait else "look")
        return super().last_step_skipped(optimizer, wait=wait)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self.calls.append("update")


def test_the_scheduler_waits_for_the_step_before_and_never_for_its_own():
    scaler = RecordingScaler("cpu", init_scale=8.0)
    trainer = new_trainer(scaler=scaler, scheduler=halving)
    for x, target in batches(count=3):
        trainer.train_step(x, target)
    assert scaler.calls == ["update", "wait", "update", "wait", "update"]
    assert trainer.scheduler.last_epoch == 2
    trainer.finish_scheduler_step()
    assert trainer.scheduler.last_epoch == 3
    trainer.finish_scheduler_step()
    assert trainer.flush() is None
    trainer.state_dict()
    assert trainer.scheduler.last_epoch == 3
    assert scaler.calls[5:] == ["wait"]


@pytest.mark.parametrize("finish", ["flush", "state_dict"])
def test_the_end_of_an_epoch_finishes_the_step_of_the_scheduler(finish):
    trainer = new_trainer(scaler=amp_ext.GradScaler("cpu"), scheduler=halving)
    plain = new_trainer(scheduler=halving)
    for each in (trainer, plain):
        each.train_step(X, TARGET)
    assert plain.scheduler.last_epoch == 1, "without a scaler it moves at once"
    getattr(trainer, finish)()
    assert trainer.scheduler.last_epoch == 1


def test_nothing_waits_without_a_scheduler():
    scaler = RecordingScaler("cpu", init_scale=8.0)
    trainer = new_trainer(scaler=scaler)
    for x, target in batches(count=3):
        trainer.train_step(x, target)
    trainer.flush()
    assert scaler.calls == ["update"] * 3


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
    assert torch.equal(metrics.loss, mse_loss(new_model()(2 * X), TARGET).detach())


class WithLoss(nn.Module):
    """Computes its loss itself and returns it in some wrapping."""

    def __init__(self, wrap: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner = new_model()
        self.wrap = wrap

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        return self.wrap(None if labels is None else mse_loss(logits, labels), logits)


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


@pytest.mark.parametrize("wrap", OUTPUTS.values(), ids=OUTPUTS)
def test_a_model_may_give_its_own_loss(wrap):
    trainer = new_trainer(model=WithLoss(wrap), loss_function=None)
    metrics = trainer.train_step({"x": X, "labels": TARGET})
    usual = new_trainer()
    wanted = usual.train_step(X, TARGET)
    assert metrics.loss.shape == ()
    assert torch.equal(metrics.loss, wanted.loss)
    assert_same(params_of(trainer), params_of(usual))


# Precisions.


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


@pytest.mark.parametrize(
    ("precision", "model", "model_sees", "loss_sees"),
    [
        pytest.param("fp32", Witness(F32), [False, F32], [False, F32], id="fp32"),
        pytest.param("bf16", Witness(F32), [True, F32], [True, BF16], id="bf16"),
        pytest.param("fp16", Witness(F32), [True, F32], [True, F16], id="fp16"),
        pytest.param("bf16", Witness(BF16), [False, BF16], [True, BF16], id="bf16-params"),
        pytest.param("fp16", Witness(F16), [False, F16], [True, F16], id="fp16-params"),
        pytest.param("bf16", Witness(F32, BF16), [True, F32], [True, BF16], id="frozen-bf16"),
        pytest.param("fp16", Witness(F32, BF16), [True, F32], [True, F16], id="another-frozen"),
    ],
)
def test_autocast_is_on_where_it_has_something_to_do(precision, model, model_sees, loss_sees):
    seen = []

    def loss_function(output: Tensor) -> Tensor:
        seen.extend([torch.is_autocast_enabled("cpu"), output.dtype])
        loss = mse_loss(output, TARGET)
        seen.append(loss.dtype)
        return loss

    trainer = MixedPrecisionTrainer(
        model,
        amp_ext.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1),
        MixedPrecisionConfig(precision, initial_loss_scale=256.0),
        loss_function=loss_function,
    )
    index = torch.zeros(3, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):  # the caller's has no say
        metrics = trainer.train_step((X, index))
    assert model.seen == [*model_sees, torch.int64]
    assert seen == [*loss_sees, torch.float32]
    assert metrics.to_dict()["skipped"] is False
    assert (trainer.scaler is not None) == (precision == "fp16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_16_bit_model_trains_as_with_masters_by_hand(device, precision):
    dtype = MixedPrecisionConfig(precision).dtype
    trainer = new_trainer(
        precision,
        new_model(device, dtype),
        optimizer=lambda params: amp_ext.optim.AdamW(params, 0.01, eps=1e-3),
        initial_loss_scale=256.0,
        max_grad_norm=0.5,
    )
    model = new_model(device, dtype)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    by_hand = torch.optim.AdamW(masters, 0.01, eps=1e-3)
    scale = 256.0 if precision == "fp16" else 1.0
    for x, target in batches(device, 10):
        metrics = trainer.train_step(x, target)
        model.zero_grad()
        loss = mse_loss(model(x.to(dtype)).float(), target)
        (loss * scale).backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float() / scale
        norm = nn.utils.clip_grad_norm_(masters, 0.5)
        by_hand.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        torch.testing.assert_close(metrics.loss, loss.detach(), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(metrics.grad_norm, norm, rtol=2e-2, atol=1e-3)
    for param, master in zip(trainer.model.parameters(), masters, strict=True):
        assert param.dtype == dtype
        torch.testing.assert_close(
            trainer.optimizer.state[param]["master_param"], master.detach(), rtol=1e-2, atol=2e-3
        )


def test_our_optimizers_take_over_the_configured_norm_and_keep_their_own():
    for own, configured in ((None, 0.25), (0.25, None)):
        trainer = new_trainer(
            optimizer=lambda params, own=own: amp_ext.optim.SGD(params, 0.1, max_grad_norm=own),
            max_grad_norm=configured,
        )
        metrics = trainer.train_step(X, TARGET)
        grads = [param.grad for param in trainer.model.parameters()]
        torch.testing.assert_close(metrics.grad_norm, nn.utils.get_total_norm(grads))
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        norms = [group["max_grad_norm"] for group in trainer.optimizer.param_groups]
        assert norms == [0.25, 0.25]


# Overflows, NaN, exceptions.


@pytest.mark.parametrize("make", [amp_ext.optim.AdamW, torch.optim.AdamW], ids=["ours", "torchs"])
def test_a_nan_loss_leaves_no_trace_but_in_the_scale(make):
    options = {"optimizer": lambda params: make(params, 0.1), "scheduler": halving}
    trainer, spared = (
        new_trainer("fp16", initial_loss_scale=scale, max_grad_norm=1.0, **options)
        for scale in (64.0, 32.0)
    )
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_static_scaler_guards_training_that_needs_none(precision):
    scaler = amp_ext.GradScaler("cpu", init_scale=1.0, dynamic=False)
    trainer, plain = new_trainer(precision, scaler=scaler), new_trainer(precision)
    assert trainer.train_step(X, TARGET * math.inf).skipped
    figures = trainer.train_step(X, TARGET).to_dict()
    assert figures == plain.train_step(X, TARGET).to_dict()
    assert figures["loss_scale"] == 1.0
    assert_same(params_of(trainer), params_of(plain))


class RaisesInBackward(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> Tensor:
        raise RuntimeError("backward failed")


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss function that fails in the forward or the backward pass if the target says so."""
    if target.isinf().any():
        raise RuntimeError("forward failed")
    loss = mse_loss(output, target)
    return RaisesInBackward.apply(loss) if target.isnan().any() else loss


@pytest.mark.parametrize(
    ("factor", "batches_kept"),
    [pytest.param(math.inf, 1, id="forward"), pytest.param(math.nan, 0, id="backward")],
)
def test_after_an_error_training_goes_on(factor, batches_kept):
    trainer, spared = (
        new_trainer("fp16", gradient_accumulation_steps=2, loss_function=failing_loss)
        for _ in range(2)
    )
    data = batches(count=3)
    trainer.train_step(*data[0])
    with pytest.raises(RuntimeError, match="failed"):
        trainer.train_step(X, TARGET * factor)
    for x, target in data[:batches_kept]:
        spared.train_step(x, target)
    for each in (trainer, spared):
        for x, target in data[1 : 3 - batches_kept]:
            each.train_step(x, target)
    assert_same(params_of(trainer), params_of(spared))
    assert not torch.equal(params_of(trainer)[0], next(new_model().parameters()))


@pytest.mark.parametrize("make", [amp_ext.optim.SGD, torch.optim.SGD], ids=["ours", "torchs"])
@pytest.mark.parametrize("flush", [False, True], ids=["step", "flush"])
def test_after_an_interrupted_step_training_goes_on(make, flush):
    options = {"optimizer": lambda params: make(params, 0.1), "max_grad_norm": 0.5}
    trainer, spared = (
        new_trainer("fp16", gradient_accumulation_steps=1 + flush, **options) for _ in range(2)
    )

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = trainer.optimizer.register_step_pre_hook(interrupt)
    step = trainer.flush if flush else lambda: trainer.train_step(X, TARGET)
    if flush:
        trainer.train_step(X, TARGET)
    with pytest.raises(KeyboardInterrupt):
        step()
    hook.remove()
    for each in (trainer, spared):
        for x, target in batches(count=2):
            metrics = each.train_step(x, target)
        assert metrics.to_dict()["skipped"] is False
    assert_same(params_of(trainer), params_of(spared))


# Metrics.


def test_metrics_are_tensors_and_become_numbers_on_request(device):
    trainer = new_trainer(
        "fp16", new_model(device), max_grad_norm=1.0, gradient_accumulation_steps=2
    )
    first = trainer.train_step(X.to(device), TARGET.to(device))
    metrics = trainer.train_step(X.to(device), TARGET.to(device))
    assert isinstance(metrics, StepMetrics)
    for name in ("loss", "loss_scale", "grad_norm", "skipped"):
        tensor = getattr(metrics, name)
        assert tensor.shape == ()
        assert tensor.device.type == device.type
        assert not tensor.requires_grad
    assert metrics.skipped.dtype == torch.bool
    figures = metrics.to_dict()
    assert figures == {
        "loss": metrics.loss.item(),
        "loss_scale": 256.0,
        "grad_norm": metrics.grad_norm.item(),
        "skipped": False,
    }
    assert [type(value) for value in figures.values()] == [float, float, float, bool]
    assert list(first.to_dict().values()) == [first.loss.item(), 256.0, None, None]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_metrics_keep_their_values_in_later_steps(precision):
    trainer, again = (
        new_trainer(precision, max_grad_norm=1.0, initial_loss_scale=TOO_LARGE, growth_interval=1)
        for _ in range(2)
    )
    taken = [trainer.train_step(x, target) for x, target in batches(count=20)]
    at_once = [str(again.train_step(x, target).to_dict()) for x, target in batches(count=20)]
    assert [str(metrics.to_dict()) for metrics in taken] == at_once
    assert len(set(at_once)) == 20


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


@pytest.mark.parametrize("make", [amp_ext.optim.AdamW, torch.optim.AdamW], ids=["ours", "torchs"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_reads_no_tensor_on_the_host(precision, make, monkeypatch):
    """What would wait for a GPU must not be in the trainer, nor below it but where noted."""
    trainer = new_trainer(
        precision,
        optimizer=lambda params: make(params, 1e-3),
        max_grad_norm=1.0,
        gradient_accumulation_steps=2,
    )
    data = batches(count=5)
    for x, target in data:
        trainer.train_step(x, target)
    trainer.flush()
    readers = set()

    def watched(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            readers.add(sys._getframe(1).f_globals["__name__"])
            return read(*args, **options)

        return note

    for name in READS:
        monkeypatch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
    for x, target in data:
        trainer.train_step(x, target)
    trainer.flush()
    monkeypatch.undo()
    # On the CPU, where nothing waits, the scaler looks whether the scale fell to 0; torch's asks
    # whether to call torch's loop, which keeps its step counters on the CPU.
    allowed = ("amp_ext.grad_scaler", "torch.amp") if precision == "fp16" else ()
    if make is torch.optim.AdamW:
        allowed = (*allowed, "torch.optim")
        assert "torch.optim.adam" in readers or "torch.optim.optimizer" in readers
    assert {reader for reader in readers if not reader.startswith(allowed)} == set()


# Checkpoints.


def resumed(state: dict[str, Any], model: nn.Module, make: Callable[[], Any]) -> Any:
    """Returns a trainer that was loaded from a file."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "trainer": state}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    trainer = make()
    trainer.train_step(X, TARGET)  # leaves nothing that lasts
    trainer.model.load_state_dict(saved["model"])
    trainer.load_state_dict(saved["trainer"])
    return trainer


@pytest.mark.parametrize(
    "dtype", [F32, F16, BF16], ids=["fp32-params", "fp16-params", "bf16-params"]
)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        pytest.param(lambda params: amp_ext.optim.AdamW(params, 0.01), id="ours"),
        pytest.param(lambda params: torch.optim.AdamW(params, 0.01, fused=True), id="torchs"),
    ],
)
@pytest.mark.parametrize("at", [6, 7], ids=["after-a-step", "amid-an-accumulation"])
def test_a_resumed_training_has_the_same_bits(make_optimizer, dtype, at):
    def make() -> MixedPrecisionTrainer:
        return new_trainer(
            "bf16" if dtype == BF16 else "fp16",
            new_model(dtype=dtype),
            optimizer=make_optimizer,
            scheduler=halving,
            initial_loss_scale=TOO_LARGE,
            growth_interval=2,
            gradient_accumulation_steps=2,
        )

    data = batches(count=24)
    straight, stopped = make(), make()
    for x, target in data[:at]:
        straight.train_step(x, target)
        stopped.train_step(x, target)
    going_on = resumed(stopped.state_dict(), stopped.model, make)
    for x, target in data[at:]:
        wanted = straight.train_step(x, target)
        metrics = going_on.train_step(x, target)
        assert str(metrics.to_dict()) == str(wanted.to_dict())
    assert_same(params_of(going_on), params_of(straight))
    assert not torch.equal(params_of(straight)[0], params_of(make())[0])
    assert going_on.state_dict()["scheduler"] == straight.state_dict()["scheduler"]
    assert going_on.state_dict()["scaler"] == straight.state_dict()["scaler"]


def test_a_loaded_trainer_shares_no_gradient_with_the_other():
    first, second = (new_trainer(gradient_accumulation_steps=3) for _ in range(2))
    first.train_step(X, TARGET)
    second.load_state_dict(first.state_dict())
    before = [param.grad.clone() for param in second.model.parameters()]
    first.train_step(X, TARGET)
    assert_same([param.grad for param in second.model.parameters()], before)


@pytest.mark.parametrize(("old", "new"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp16", "fp32")])
def test_the_precision_may_change_between_two_runs(old, new):
    before, after = (
        new_trainer(precision, initial_loss_scale=scale, optimizer=amp_ext.optim.AdamW)
        for precision, scale in ((old, 32.0), (new, 64.0))
    )
    before.train_step(X, TARGET)
    after.load_state_dict(before.state_dict())
    wanted = 64.0 if new == "fp16" else 1.0
    assert after.train_step(X, TARGET).to_dict()["loss_scale"] == wanted
    assert after.optimizer.state_dict()["state"][0]["step"] == 2


TWO_STEPS = {"gradient_accumulation_steps": 2}
THREE_STEPS = {"gradient_accumulation_steps": 3}
SCALED = {**TWO_STEPS, "scaler": amp_ext.GradScaler("cpu")}
WANTED, GOT = "must be %d to a step, unscaled, with 4 parameters", "got 2 to a step, %s, with %d p"
LOADING_ERRORS = {
    "entries-missing": (
        *(
            {},
            {},
            lambda state: {k: v for k, v in state.items() if k not in ("scaler", "gradients")},
        ),
        r"load_state_dict: state_dict must have \['scaler', 'gradients'\], got \['optimizer', ",
    ),
    "a-scheduler-too-much": ({"scheduler": halving}, {}, dict, "none of a scheduler, got one"),
    "no-scheduler": ({}, {"scheduler": halving}, dict, "must have one of a scheduler, got none"),
    "another-accumulation": (
        *(TWO_STEPS, THREE_STEPS, dict),
        rf"{WANTED % 3}, {GOT % ('unscaled', 4)}arameters: call flush\(\) before you save",
    ),
    "scaled-gradients": (SCALED, TWO_STEPS, dict, f"{WANTED % 2}, {GOT % ('scaled', 4)}"),
    "gradients-missing": (
        *(TWO_STEPS, TWO_STEPS, lambda state: {**state, "gradients": state["gradients"][1:]}),
        f"{WANTED % 2}, {GOT % ('unscaled', 3)}",
    ),
}


@pytest.mark.parametrize(
    ("saved", "loading", "change", "text"), LOADING_ERRORS.values(), ids=LOADING_ERRORS
)
def test_a_state_that_does_not_fit_is_refused(saved, loading, change, text):
    first, second = new_trainer(**saved), new_trainer(**loading)
    first.train_step(X, TARGET)
    second.train_step(X, TARGET)
    before = second.state_dict()
    grads = [param.grad.clone() for param in second.model.parameters()]
    state = change(first.state_dict())
    with pytest.raises(ValueError if "gradients" in state else KeyError, match=text):
        second.load_state_dict(state)
    after = second.state_dict()
    assert [before[key] for key in ("scheduler", "accumulated")] == [
        after[key] for key in ("scheduler", "accumulated")
    ]
    assert_same([param.grad for param in second.model.parameters()], grads)


# What is refused.


def build(**parts: Any) -> MixedPrecisionTrainer:
    model = parts.pop("model", new_model())
    make = parts.pop("make", lambda params: amp_ext.optim.SGD(params, 0.1))
    optimizer = make(model.parameters()) if isinstance(model, nn.Module) else None
    usual = {"optimizer": optimizer, "config": MixedPrecisionConfig()}
    return MixedPrecisionTrainer(model, **usual | parts)


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([X], 0.1))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"model": mse_loss}, "model must be torch's Module, got function"),
        ({"optimizer": None}, "optimizer must be torch's Optimizer, got NoneType"),
        ({"config": "bf16"}, "config must be amp_ext's MixedPrecisionConfig, got str"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler must be amp_ext's GradScaler, got Grad"),
        (
            {"scheduler": PLATEAU},
            "scheduler must step without a figure, got ReduceLROnPlateau: step it yourself",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_parts_of_another_kind_are_refused(parts, text):
    with pytest.raises(TypeError, match=f"^MixedPrecisionTrainer: {text}"):
        build(**parts)


def fp16_parameters_with(make: Callable[..., Any], **settings: Any) -> dict[str, Any]:
    config = MixedPrecisionConfig("fp16", **settings)
    return {"model": new_model(dtype=F16), "config": config, "make": make}


DISABLED, NOTHING = amp_ext.GradScaler("cpu", enabled=False), torch.optim.SGD([{"params": []}], 0.1)
CLIPPED = fp16_parameters_with(OPTIMIZERS[1].values[0], max_grad_norm=1.0)
OURS = "optimizer must be one of amp_ext.optim for parameters of torch.float16, got torch.optim"


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"scaler": DISABLED}, "scaler must be enabled, got a disabled one"),
        ({"optimizer": NOTHING}, "optimizer must have parameters, got none"),
        (
            fp16_parameters_with(torchs_sgd),
            f"{OURS}.sgd.SGD, which cannot unscale and clip their gradients",
        ),
        (CLIPPED, f"{OURS}.adamw.AdamW, "),
    ],
    ids=["disabled-scaler", "no-parameters", "torchs-optimizer", "clipped-by-torchs"],
)
def test_parts_that_do_not_fit_are_refused(parts, text):
    with pytest.raises(ValueError, match=f"^MixedPrecisionTrainer: {text}"):
        build(**parts)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("wanted", "dtype"), [("fp16", F16), ("bf16", BF16)])
def test_16_bit_parameters_need_their_own_precision(wanted, dtype, precision):
    parts = {"model": new_model(dtype=dtype), "config": MixedPrecisionConfig(precision)}
    if precision == wanted:
        assert build(**parts).config.precision == wanted
        return
    text = f"config.precision must be {wanted!r} for parameters of {dtype}, got {precision!r}"
    with pytest.raises(ValueError, match=f"^MixedPrecisionTrainer: {text}"):
        build(**parts)


NO_LOSS = [
    pytest.param(
        WithLoss(lambda loss, logits: {"loss": loss, "logits": logits}), None, "none", id="dict"
    ),
    pytest.param(
        WithLoss(lambda loss, logits: types.SimpleNamespace(logits=logits)),
        None,
        "none",
        id="object",
    ),
    pytest.param(new_model(), None, r"shape \(8, 2\)", id="output"),
    pytest.param(new_model(), lambda output: output.mean().item(), "float", id="number"),
    pytest.param(new_model(), lambda output: output, r"shape \(8, 2\)", id="many-numbers"),
]


@pytest.mark.parametrize(("model", "loss_function", "got"), NO_LOSS)
def test_a_batch_without_a_loss_is_refused(model, loss_function, got):
    trainer = new_trainer(model=model, loss_function=loss_function)
    before = params_of(trainer)
    source = "loss_function" if loss_function else "without a loss_function the model's output"
    text = f"train_step: {source} must give a loss, a tensor of one number, got {got}"
    with pytest.raises(ValueError, match=text):
        trainer.train_step(X)
    targets = "train_step: targets must be None without a loss_function, got Tensor"
    if loss_function is None:
        with pytest.raises(ValueError, match=targets):
            trainer.train_step(X, TARGET)
    assert_same(params_of(trainer), before)
    assert trainer.flush() is None


# The config and the scaler.


def test_a_config_has_torchs_settings_and_cannot_be_changed():
    config = MixedPrecisionConfig()
    assert (config.initial_loss_scale, config.growth_interval) == (65536.0, 2000)
    assert (config.growth_factor, config.backoff_factor) == (2.0, 0.5)
    assert (config.max_grad_norm, config.gradient_accumulation_steps) == (None, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.precision = "fp16"
    configs = map(MixedPrecisionConfig, PRECISIONS)
    found = [(config.dtype, config.needs_scaler) for config in configs]
    assert found == [(F32, False), (BF16, False), (F16, True)]


POSITIVE, COUNT = "positive and finite", "an int of 1 or more"
LIMIT = "positive and at most initial_loss_scale (65536.0), or None"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("precision", "fp8", "'fp32', 'bf16' or 'fp16'"),
        ("initial_loss_scale", 0.0, POSITIVE),
        ("initial_loss_scale", math.inf, POSITIVE),
        ("initial_loss_scale", "big", POSITIVE),
        ("growth_interval", 0, COUNT),
        ("growth_interval", 2.0, COUNT),
        ("growth_factor", 1.0, "above 1 and finite"),
        ("backoff_factor", 1.0, "between 0 and 1"),
        ("backoff_factor", 0.0, "between 0 and 1"),
        ("min_scale", 131072.0, LIMIT),
        ("min_scale", 0.0, LIMIT),
        ("max_grad_norm", -1.0, "0 or more, or None"),
        ("max_grad_norm", math.nan, "0 or more, or None"),
        ("gradient_accumulation_steps", 0, COUNT),
        ("gradient_accumulation_steps", True, COUNT),
    ],
)
def test_a_setting_out_of_range_is_refused(name, value, wanted):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        MixedPrecisionConfig(**{name: value})
    assert str(caught.value) == f"MixedPrecisionConfig: {name} must be {wanted}, got {value!r}"


@pytest.mark.filterwarnings("error")
def test_a_scaler_for_fp16_is_on_and_has_torchs_or_the_given_settings():
    default, torchs = create_fp16_grad_scaler("cpu"), torch.amp.GradScaler("cpu")
    assert default.state_dict() == torchs.state_dict()
    options = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    scaler = create_fp16_grad_scaler(init_scale=8.0, **options)
    assert type(scaler) is amp_ext.GradScaler
    assert scaler.is_enabled()
    configured = new_trainer("fp16", initial_loss_scale=8.0, **options).scaler
    expected = torch.amp.GradScaler("cpu", 8.0, **options).state_dict()
    assert scaler.state_dict() == configured.state_dict() == expected


def test_bad_batches_do_not_push_the_scale_below_its_limit():
    trainer = new_trainer("fp16", initial_loss_scale=4.0, min_scale=1.0)
    scales = [trainer.train_step(X, TARGET * math.nan).loss_scale.item() for _ in range(4)]
    assert scales == [4.0, 2.0, 1.0, 1.0]
    assert not trainer.train_step(X, TARGET).skipped
