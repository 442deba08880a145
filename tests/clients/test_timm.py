"""timm's training step and its optimizer registry work with ours inside."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import small_training as small
import torch

import amp_ext

small.client("torchvision")  # timm does not start without it
small.client("timm")

import timm.optim  # noqa: E402
import timm.utils  # noqa: E402

from amp_ext.integrations.timm import NativeScaler, register_optimizers  # noqa: E402


def assigned() -> Any:
    """timm's own scaler with ours put inside by hand."""
    loss_scaler = timm.utils.NativeScaler(device="cpu")
    loss_scaler._scaler = small.our_scaler()
    return loss_scaler


def subclassed() -> Any:
    return NativeScaler("cpu", small.our_scaler())


def train(loss_scaler: Any, make_optimizer: Any, accumulate: int = 1, **options: Any) -> Any:
    """Trains as timm's train.py does."""
    model = small.make_model()
    optimizer = make_optimizer(model.parameters())
    for number, (x, y) in enumerate(small.make_batches(), 1):
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        last = number % accumulate == 0
        loss = small.loss_of(output, y) / accumulate
        loss_scaler(loss, optimizer, parameters=model.parameters(), need_update=last, **options)
        if last:
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("make_scaler", [assigned, subclassed])
@pytest.mark.parametrize("make_optimizer", [small.FUSED[0], small.LOOPING])
@pytest.mark.parametrize(("max_norm", "accumulate"), [(None, 1), (0.5, 1), (None, 2)])
def test_training_equals_the_loop_by_hand(make_scaler, make_optimizer, max_norm, accumulate):
    loss_scaler = make_scaler()
    model = train(loss_scaler, make_optimizer, accumulate, clip_grad=max_norm)
    options = {"max_norm": max_norm, "accumulate": accumulate}
    small.assert_trained_as_by_hand(model, loss_scaler._scaler, make_optimizer, **options)


@pytest.mark.parametrize("mode", ["value", "agc"])
def test_the_other_ways_of_clipping_equal_timm_s_scaler_around_torch_s(mode):
    models = []
    for loss_scaler in (subclassed(), timm.utils.NativeScaler(device="cpu")):
        loss_scaler._scaler.load_state_dict(small.our_scaler().state_dict())
        make_optimizer = functools.partial(torch.optim.SGD, lr=small.LR)
        models.append(train(loss_scaler, make_optimizer, clip_grad=0.02, clip_mode=mode))
    small.assert_same_weights(*models)


def test_states_go_from_timm_s_scaler_to_ours_and_back():
    theirs, ours = timm.utils.NativeScaler(device="cpu"), subclassed()
    assert ours.state_dict_key == theirs.state_dict_key
    for source, target in ((ours, theirs), (theirs, NativeScaler("cpu"))):
        target.load_state_dict(source.state_dict())
        assert target.state_dict() == small.our_scaler().state_dict()


REGISTERED = [
    ("adam", amp_ext.optim.Adam, {"betas": (0.8, 0.9)}),
    ("adamw", amp_ext.optim.AdamW, {"eps": 1e-6}),
    ("sgd", amp_ext.optim.SGD, {}),
    ("momentum", amp_ext.optim.SGD, {"momentum": 0.5}),
]


@pytest.mark.parametrize(("name", "our_class", "options"), REGISTERED)
def test_registered_optimizers_train_as_timm_s(name, our_class, options):
    register_optimizers()
    options |= {"lr": small.LR, "weight_decay": 0.1}
    models, groups = [], []
    for opt in (f"amp{name}", name):
        models.append(small.make_model())
        optimizer = timm.optim.create_optimizer_v2(models[-1], opt=opt, **options)
        assert (type(optimizer) is our_class) == (opt != name)
        small.train_by_hand(models[-1], optimizer, small.our_scaler())
        groups.append(optimizer.param_groups)
    for left, right in zip(*groups, strict=True):
        shared = left.keys() & right.keys() - {"params", "decoupled_weight_decay"}
        assert {key: left[key] for key in shared} == {key: right[key] for key in shared}
    small.assert_close_weights(*models, rtol=1e-4, atol=1e-5)


def test_lookahead_goes_around_ours_as_around_timm_s():
    register_optimizers()
    models = []
    for opt in ("lookahead_ampsgd", "lookahead_sgd"):
        make_optimizer = functools.partial(timm.optim.create_optimizer_v2, opt=opt, lr=small.LR)
        models.append(train(subclassed(), make_optimizer, clip_grad=0.5))
    small.assert_close_weights(*models, rtol=1e-4, atol=1e-5)
