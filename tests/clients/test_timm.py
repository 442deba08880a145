"""timm's training step and its optimizer registry work with ours inside."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from small_training import (
    LR,
    assert_same_weights,
    client,
    loss_of,
    make_batches,
    make_model,
    our_scaler,
    train_by_hand,
)

import amp_ext

client("torchvision")  # timm does not start without it
client("timm")

import timm.optim  # noqa: E402
import timm.utils  # noqa: E402

from amp_ext.integrations.timm import NativeScaler, register_optimizers  # noqa: E402

OPTIMIZERS = [
    pytest.param(functools.partial(amp_ext.optim.AdamW, lr=LR), id="our-adamw"),
    pytest.param(functools.partial(torch.optim.AdamW, lr=LR), id="torch"),
]


def assigned() -> Any:
    """timm's own scaler with ours put inside by hand."""
    loss_scaler = timm.utils.NativeScaler(device="cpu")
    loss_scaler._scaler = our_scaler()
    return loss_scaler


def subclassed() -> Any:
    return NativeScaler("cpu", our_scaler())


def train(
    model: torch.nn.Module, optimizer: Any, loss_scaler: Any, batches: Any, **options: Any
) -> None:
    """Trains as timm's train.py does."""
    for x, y in batches:
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        loss_scaler(loss_of(output, y), optimizer, parameters=model.parameters(), **options)
        optimizer.zero_grad()


@pytest.mark.parametrize("make_scaler", [assigned, subclassed])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_training_equals_the_loop_by_hand(make_scaler, make_optimizer, max_norm):
    model, loss_scaler = make_model(), make_scaler()
    train(
        model, make_optimizer(model.parameters()), loss_scaler, make_batches(), clip_grad=max_norm
    )
    expected = make_model()
    skipped = train_by_hand(
        expected, make_optimizer(expected.parameters()), our_scaler(), max_norm=max_norm
    )
    assert any(skipped)
    assert loss_scaler._scaler.history().skipped == skipped
    assert_same_weights(model, expected)


@pytest.mark.parametrize("mode", ["value", "agc"])
def test_the_other_ways_of_clipping_equal_timm_s_scaler_around_torch_s(mode):
    models = []
    for loss_scaler in (subclassed(), timm.utils.NativeScaler(device="cpu")):
        loss_scaler._scaler.load_state_dict(our_scaler().state_dict())
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        train(model, optimizer, loss_scaler, make_batches(), clip_grad=0.02, clip_mode=mode)
        models.append(model)
    assert_same_weights(*models)


def test_accumulated_gradients_are_stepped_once():
    model, loss_scaler = make_model(), subclassed()
    optimizer = amp_ext.optim.AdamW(model.parameters(), lr=LR)
    for number, (x, y) in enumerate(make_batches(), 1):
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        last = number % 2 == 0
        loss_scaler(loss_of(output, y) / 2, optimizer, need_update=last)
        if last:
            optimizer.zero_grad()
    expected = make_model()
    expected_optimizer = amp_ext.optim.AdamW(expected.parameters(), lr=LR)
    train_by_hand(expected, expected_optimizer, our_scaler(), accumulate=2)
    assert_same_weights(model, expected)


def test_states_go_from_timm_s_scaler_to_ours_and_back():
    theirs, ours = timm.utils.NativeScaler(device="cpu"), subclassed()
    assert ours.state_dict_key == theirs.state_dict_key
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == our_scaler().state_dict()
    fresh = NativeScaler("cpu")
    fresh.load_state_dict(theirs.state_dict())
    assert fresh.state_dict() == our_scaler().state_dict()


@pytest.mark.parametrize(
    ("name", "our_class", "options"),
    [
        pytest.param("adam", amp_ext.optim.Adam, {"betas": (0.8, 0.9)}, id="adam"),
        pytest.param("adamw", amp_ext.optim.AdamW, {"eps": 1e-6}, id="adamw"),
        pytest.param("sgd", amp_ext.optim.SGD, {}, id="sgd"),
        pytest.param("momentum", amp_ext.optim.SGD, {"momentum": 0.5}, id="momentum"),
    ],
)
def test_registered_optimizers_train_as_timm_s(name, our_class, options):
    register_optimizers()
    models = []
    for opt in (f"amp{name}", name):
        model = make_model()
        optimizer = timm.optim.create_optimizer_v2(
            model, opt=opt, lr=LR, weight_decay=0.1, **options
        )
        assert (type(optimizer) is our_class) == (opt != name)
        train_by_hand(model, optimizer, our_scaler())
        models.append((model, optimizer))
    (ours, our_optimizer), (theirs, their_optimizer) = models
    for left, right in zip(our_optimizer.param_groups, their_optimizer.param_groups, strict=True):
        shared = left.keys() & right.keys() - {"params", "decoupled_weight_decay"}
        assert {key: left[key] for key in shared} == {key: right[key] for key in shared}
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_registering_again_changes_nothing(caplog):
    register_optimizers()
    names = timm.optim.list_optimizers()
    with caplog.at_level(logging.WARNING):
        register_optimizers()
    assert timm.optim.list_optimizers() == names
    assert {"ampadam", "ampadamw", "ampsgd", "ampmomentum"} <= set(names)
    assert caplog.records == []


def test_lookahead_goes_around_ours_as_around_timm_s():
    register_optimizers()
    models = []
    for opt in ("lookahead_ampsgd", "lookahead_sgd"):
        model = make_model()
        optimizer = timm.optim.create_optimizer_v2(model, opt=opt, lr=LR)
        train(model, optimizer, subclassed(), make_batches(), clip_grad=0.5)
        models.append(model)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
