"""Patched, torch's constructors make ours; undone, they make torch's again."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from harness.optimizer_cases import assert_same_bits, each_class_in_torch, train
from torch.amp import GradScaler as ImportedBefore
from torch.cuda.amp.grad_scaler import GradScaler as TorchCudaScaler
from torch.nn import Parameter

import amp_ext
from amp_ext.patch import patch_torch

SCALERS = [
    (lambda: torch.amp.GradScaler("cpu"), torch.amp.GradScaler),
    (lambda: torch.amp.grad_scaler.GradScaler("cpu"), torch.amp.GradScaler),
    (lambda: torch.GradScaler("cpu"), torch.amp.GradScaler),
    (lambda: ImportedBefore("cpu"), torch.amp.GradScaler),
    (lambda: torch.cuda.amp.GradScaler(enabled=False), TorchCudaScaler),
]

# torch's older constructors say that they are old, as they do without the patch.
pytestmark = pytest.mark.filterwarnings("ignore:.*GradScaler.* is deprecated:FutureWarning")

NOTHING, SCALER, BOTH = (False, False), (True, False), (True, True)


OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def constructors() -> list[Any]:
    scalers = (ImportedBefore, TorchCudaScaler)
    return [each.__init__ for each in (*scalers, *OPTIMIZERS)]


@pytest.fixture(autouse=True)
def torch_is_itself_before_and_after():
    before = constructors()
    yield
    assert constructors() == before


def params() -> list[Parameter]:
    return [Parameter(torch.ones(3))]


def patched() -> tuple[bool, bool]:
    """Returns whether torch's constructors make our scaler and our optimizer."""
    scaler, optimizer = ImportedBefore("cpu"), torch.optim.SGD(params())
    ours = isinstance(scaler, amp_ext.GradScaler), isinstance(optimizer, amp_ext.optim.SGD)
    assert ours[0] or type(scaler) is ImportedBefore
    assert ours[1] or type(optimizer) is torch.optim.SGD
    return ours


@pytest.mark.parametrize(("make", "torch_class"), SCALERS)
def test_a_scaler_of_torch_is_ours_while_patched_and_so_are_its_copies(make, torch_class):
    before = make()
    with patch_torch():
        scaler = make()
    assert type(before) is type(make()) is torch_class
    for wanted in (amp_ext.GradScaler, torch_class, torch.amp.GradScaler):
        assert isinstance(scaler, wanted)
    assert type(scaler).__qualname__ == "GradScaler"
    scaler.set_growth_interval(11)
    for again in (
        copy.deepcopy(scaler),
        *(pickle.loads(pickle.dumps(scaler, n)) for n in range(6)),
    ):
        assert type(again) is type(scaler)
        assert vars(again).keys() == vars(scaler).keys()
        assert again.get_growth_interval() == 11


@each_class_in_torch
def test_an_optimizer_of_torch_is_ours_on_request(name, options):
    torch_class, our_class = getattr(torch.optim, name), getattr(amp_ext.optim, name)
    with patch_torch():
        assert type(torch_class(params(), **options)) is torch_class
    with patch_torch(optimizers=True):
        optimizer = torch_class(params(), **options)
        for other in OPTIMIZERS:
            assert isinstance(optimizer, other) == issubclass(torch_class, other)
    assert isinstance(optimizer, our_class)
    assert type(optimizer).__name__ == name
    twin = our_class(params(), **options)
    train([optimizer, twin], 2)
    assert_same_bits(optimizer, twin)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is type(optimizer)
        assert_same_bits(again, optimizer)
        train([again], 1)


def test_constructors_of_torch_keep_their_signatures_and_hand_on_options():
    classes = (ImportedBefore, TorchCudaScaler, torch.optim.AdamW)
    before = [inspect.signature(torch_class) for torch_class in classes]
    with patch_torch(optimizers=True):
        assert [inspect.signature(torch_class) for torch_class in classes] == before
        scaler = torch.amp.GradScaler("cpu", 2.0, growth_interval=7)
        with pytest.warns(FutureWarning, match="torch.cuda.amp.GradScaler"):
            old_scaler = torch.cuda.amp.GradScaler(8.0, 4.0, enabled=False)
        optimizer = torch.optim.SGD(params(), 0.5, momentum=0.25)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (2.0, 7)
    assert isinstance(old_scaler, amp_ext.GradScaler)
    assert not old_scaler.is_enabled()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0.25)


def test_what_exists_and_classes_of_others_and_our_own_stay_as_they_are():
    existing = [torch.amp.GradScaler("cpu"), torch.optim.AdamW(params())]
    bases = {torch.amp.GradScaler: "cpu", torch.optim.Adam: params()}
    own = {amp_ext.GradScaler: "cpu", amp_ext.optim.AdamW: params()}
    theirs = {type("Theirs", (base,), {}): argument for base, argument in bases.items()}
    with patch_torch(optimizers=True):
        later = type("TheirLater", (torch.amp.GradScaler,), {})
        for one in existing:
            assert type(copy.deepcopy(one)) is type(pickle.loads(pickle.dumps(one))) is type(one)
        for kind, argument in {**theirs, **own, later: "cpu"}.items():
            assert type(kind(argument)) is kind
    assert not issubclass(later, amp_ext.GradScaler)


def test_a_patch_lasts_until_undo_or_the_end_of_its_with_statement():
    patch = patch_torch()
    assert patched() == SCALER
    for _ in range(2):
        patch.undo()
        assert patched() == NOTHING
    with patch_torch() as patch:
        patch.undo()
        assert patched() == NOTHING
    with patch_torch(optimizers=True):
        with pytest.raises(ValueError, match="Invalid learning rate"):
            torch.optim.AdamW(params(), lr=-1.0)
        assert patched() == BOTH
    with pytest.raises(KeyError, match="inside"), patch_torch():
        raise KeyError("inside")
    assert patched() == NOTHING


@pytest.mark.parametrize("outer", [True, False])
def test_nested_patches_end_with_the_outermost(outer):
    with patch_torch(optimizers=outer):
        with patch_torch(optimizers=not outer):
            assert patched() == BOTH
        assert patched() == (True, outer)
    assert patched() == NOTHING
