"""Patched, torch's constructors make ours; undone, they make torch's again."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch.amp import GradScaler as ImportedBefore
from torch.cpu.amp.grad_scaler import GradScaler as TorchCpuScaler
from torch.cuda.amp.grad_scaler import GradScaler as TorchCudaScaler
from torch.nn import Parameter
from training import (
    EACH_CLASS,
    FEW_OPTIMIZERS,
    assert_same_bits,
    make_params,
    params_of,
    train,
    twins,
)

import amp_ext
from amp_ext import ops
from amp_ext.patch import patch_torch

SCALERS = [
    pytest.param(lambda: torch.amp.GradScaler("cpu"), torch.amp.GradScaler, id="torch.amp"),
    pytest.param(
        lambda: torch.amp.grad_scaler.GradScaler("cpu"), torch.amp.GradScaler, id="module"
    ),
    pytest.param(lambda: torch.GradScaler("cpu"), torch.amp.GradScaler, id="torch"),
    pytest.param(lambda: ImportedBefore("cpu"), torch.amp.GradScaler, id="imported-before"),
    pytest.param(lambda: torch.cuda.amp.GradScaler(enabled=False), TorchCudaScaler, id="cuda.amp"),
    pytest.param(lambda: torch.cpu.amp.GradScaler(), TorchCpuScaler, id="cpu.amp"),
]

# torch's older constructors say that they are old, as they do without the patch.
pytestmark = pytest.mark.filterwarnings("ignore:.*GradScaler.* is deprecated:FutureWarning")


def constructors() -> list[Any]:
    torch_classes = (ImportedBefore, TorchCudaScaler, TorchCpuScaler)
    optimizers = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return [torch_class.__init__ for torch_class in (*torch_classes, *optimizers)]


@pytest.fixture(autouse=True)
def torch_is_itself_before_and_after():
    before = constructors()
    yield
    assert constructors() == before


def params() -> list[Parameter]:
    return [Parameter(torch.ones(3))]


@pytest.mark.parametrize(("make", "torch_class"), SCALERS)
def test_a_scaler_of_torch_is_ours_while_patched(make, torch_class):
    before = make()
    with patch_torch():
        scaler = make()
    after = make()
    assert isinstance(scaler, amp_ext.GradScaler)
    assert isinstance(scaler, torch_class)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert type(scaler).__qualname__ == "GradScaler"
    assert type(before) is type(after) is torch_class


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_an_optimizer_of_torch_is_ours_on_request(name, options):
    torch_class, our_class = getattr(torch.optim, name), getattr(amp_ext.optim, name)
    with patch_torch():
        assert type(torch_class(params(), **options)) is torch_class
    with patch_torch(optimizers=True):
        optimizer = torch_class(params(), **options)
    assert isinstance(optimizer, our_class)
    assert isinstance(optimizer, torch_class)
    assert type(optimizer).__name__ == name
    assert type(torch_class(params(), **options)) is torch_class


def test_adamw_is_an_adam_as_in_torch():
    with patch_torch(optimizers=True):
        optimizer = torch.optim.AdamW(params())
        assert isinstance(optimizer, torch.optim.Adam) == issubclass(
            torch.optim.AdamW, torch.optim.Adam
        )
        assert not isinstance(optimizer, torch.optim.SGD)


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
def test_a_patched_optimizer_takes_the_steps_of_our_class(name, options):
    patched = make_params(torch.float32)
    plain = twins(patched)
    with patch_torch(optimizers=True):
        optimizers = [getattr(torch.optim, name)(patched, **options)]
    optimizers.append(getattr(amp_ext.optim, name)(plain, **options))
    train(optimizers, 3)
    assert_same_bits(*optimizers)


def test_options_reach_our_constructors():
    with patch_torch(optimizers=True):
        scaler = torch.amp.GradScaler("cpu", 2.0, growth_interval=7)
        old_scaler = torch.cpu.amp.GradScaler(8.0, 4.0)
        optimizer = torch.optim.SGD(params(), 0.5, momentum=0.25)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (2.0, 7)
    assert (old_scaler.get_scale(), old_scaler.get_growth_factor()) == (8.0, 4.0)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0.25)


@pytest.mark.parametrize("torch_class", [ImportedBefore, TorchCudaScaler, torch.optim.AdamW])
def test_signatures_stay_as_they_are(torch_class):
    before = inspect.signature(torch_class)
    with patch_torch(optimizers=True):
        assert inspect.signature(torch_class) == before


def test_an_old_constructor_still_says_that_it_is_old():
    with patch_torch(), pytest.warns(FutureWarning, match="torch.cpu.amp.GradScaler"):
        torch.cpu.amp.GradScaler()


def test_subclasses_of_others_stay_as_they_are():
    class Theirs(torch.amp.GradScaler):
        pass

    class TheirAdam(torch.optim.Adam):
        pass

    with patch_torch(optimizers=True):

        class TheirLater(torch.amp.GradScaler):
            pass

        made = [Theirs("cpu"), TheirAdam(params()), TheirLater("cpu")]
    assert [type(one) for one in made] == [Theirs, TheirAdam, TheirLater]
    assert not isinstance(made[2], amp_ext.GradScaler)


def test_our_own_classes_are_constructed_as_ever():
    with patch_torch(optimizers=True):
        assert type(amp_ext.GradScaler("cpu")) is amp_ext.GradScaler
        assert type(amp_ext.optim.AdamW(params())) is amp_ext.optim.AdamW


def test_what_exists_keeps_its_class():
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(params())
    with patch_torch(optimizers=True):
        for one in (scaler, optimizer):
            assert type(copy.deepcopy(one)) is type(one)
            assert type(pickle.loads(pickle.dumps(one))) is type(one)


@pytest.mark.parametrize(("make", "torch_class"), SCALERS)
def test_scalers_are_copied_and_pickled_as_what_they_are(make, torch_class):
    with patch_torch():
        scaler = make()
    scaler.set_growth_interval(11)
    stored = io.BytesIO()
    torch.save(scaler, stored)
    stored.seek(0)
    for again in (
        copy.deepcopy(scaler),
        torch.load(stored, weights_only=False),
        *(pickle.loads(pickle.dumps(scaler, protocol)) for protocol in range(6)),
    ):
        assert type(again) is type(scaler)
        assert vars(again).keys() == vars(scaler).keys()
        assert again.get_growth_interval() == 11


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_optimizers_are_copied_and_pickled_as_what_they_are(name, options):
    with patch_torch(optimizers=True):
        optimizer = getattr(torch.optim, name)(params(), **options)
    train([optimizer], 2)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is type(optimizer)
        assert_same_bits(again, optimizer)
        train([again], 1)


@pytest.mark.parametrize(("name", "options"), EACH_CLASS)
def test_checkpoints_of_torch_load_under_the_patch_and_the_other_way_round(name, options):
    torch_class = getattr(torch.optim, name)
    with patch_torch(optimizers=True):
        ours = torch_class(params(), **options)
    theirs = torch_class(params(), **options)
    for source, target in ((theirs, ours), (ours, theirs)):
        train([source], 2)
        target.load_state_dict(source.state_dict())
        (source_state,), (loaded_state,) = source.state.values(), target.state.values()
        for key in theirs.state[params_of(theirs)[0]]:
            torch.testing.assert_close(loaded_state[key], source_state[key], rtol=0, atol=0)


def test_a_plain_call_lasts_until_undo():
    patch = patch_torch()
    try:
        assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)
    finally:
        patch.undo()
    assert type(ImportedBefore("cpu")) is ImportedBefore
    patch.undo()
    assert type(ImportedBefore("cpu")) is ImportedBefore


def test_an_error_inside_undoes_the_patch():
    with pytest.raises(KeyError, match="inside"), patch_torch(optimizers=True):
        raise KeyError("inside")
    assert type(ImportedBefore("cpu")) is ImportedBefore


def test_an_error_of_a_constructor_leaves_the_patch_as_it_is():
    with patch_torch(optimizers=True):
        with pytest.raises(ValueError, match="Invalid learning rate"):
            torch.optim.AdamW(params(), lr=-1.0)
        assert isinstance(torch.optim.AdamW(params()), amp_ext.optim.AdamW)


def test_nested_patches_end_with_the_outermost():
    with patch_torch(optimizers=True):
        with patch_torch():
            assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)
        assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)
        assert isinstance(torch.optim.SGD(params()), amp_ext.optim.SGD)
    assert type(ImportedBefore("cpu")) is ImportedBefore


def test_an_inner_patch_adds_the_optimizers_for_its_time():
    with patch_torch():
        with patch_torch(optimizers=True):
            assert isinstance(torch.optim.SGD(params()), amp_ext.optim.SGD)
        assert type(torch.optim.SGD(params())) is torch.optim.SGD
        assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)


def test_patches_may_end_in_any_order():
    first, second = patch_torch(optimizers=True), patch_torch()
    first.undo()
    assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)
    assert type(torch.optim.Adam(params())) is torch.optim.Adam
    second.undo()
    assert type(ImportedBefore("cpu")) is ImportedBefore


def test_one_patch_may_be_entered_again():
    patch = patch_torch()
    with patch:
        with patch:
            assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)
        assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)
    assert type(ImportedBefore("cpu")) is ImportedBefore
    with patch:
        assert isinstance(ImportedBefore("cpu"), amp_ext.GradScaler)
    assert type(ImportedBefore("cpu")) is ImportedBefore


def test_undo_inside_a_with_statement_is_enough():
    with patch_torch() as patch:
        patch.undo()
        assert type(ImportedBefore("cpu")) is ImportedBefore


def test_threads_may_patch_at_the_same_time():
    wrong: list[type] = []

    def work() -> None:
        for _ in range(200):
            with patch_torch(optimizers=True):
                made = ImportedBefore("cpu"), torch.optim.SGD(params())
            wrong.extend(
                type(one)
                for one in made
                if not isinstance(one, (amp_ext.GradScaler, amp_ext.optim.SGD))
            )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_module_that_does_not_load_is_reported_before_anything_is_patched(monkeypatch):
    def fail() -> str:
        raise ImportError("does not load")

    monkeypatch.setattr(ops, "cpu_isa", fail)
    with pytest.raises(ImportError, match="does not load"):
        patch_torch()
    assert type(ImportedBefore("cpu")) is ImportedBefore


def test_a_loop_written_for_torch_trains_the_same_with_ours():
    def run_loop() -> tuple[list[float], float]:
        torch.manual_seed(3)
        model = torch.nn.Linear(5, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        losses = []
        for iteration in range(5):
            loss = model(torch.ones(4, 5)).square().mean()
            scaler.scale(loss * (float("inf") if iteration == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        return losses, scaler.get_scale()

    expected = run_loop()
    with warnings.catch_warnings(), patch_torch(optimizers=True):
        warnings.simplefilter("error")
        actual = run_loop()
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert actual[1] == expected[1]
