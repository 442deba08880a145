"""Tests of ``unscale_`` some of whose launches are refused."""

from __future__ import annotations

import pytest
import torch
from harness.awkward import F32, F64
from harness.optimizer_cases import give_grads, grads_of, make_params
from harness.reference import same_bits
from harness.refusals import WORDS, refusing_launch

import amp_ext


def test_gradients_are_not_unscaled_twice_after_a_refused_launch(emulated):
    params = make_params(F32, shapes=[(3,)]) + make_params(F64, shapes=[(2,)])
    optimizer, scaler = torch.optim.SGD(params), amp_ext.GradScaler("cpu", init_scale=4.0)
    give_grads(optimizer)
    scaled = [grad.clone() for grad in grads_of(optimizer)]
    scaler.scale(torch.ones(1))
    with refusing_launch(1), pytest.raises(torch.AcceleratorError, match=WORDS) as caught:
        scaler.unscale_(optimizer)
    assert "(unscale_: 1 of 2 grads have been multiplied" in str(caught.value)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match="the iteration must not be spent"):
            call(optimizer)
    assert same_bits(grads_of(optimizer)[0], scaled[0] / 4)
    assert same_bits(grads_of(optimizer)[1], scaled[1])
    optimizer.zero_grad()
    scaler.update()  # without any look
    assert scaler.get_scale() == 4.0
    give_grads(optimizer)
    scaled = [grad.clone() for grad in grads_of(optimizer)]
    scaler.unscale_(optimizer)
    for grad, before in zip(grads_of(optimizer), scaled, strict=True):
        assert same_bits(grad, before / 4)
    scaler.step(optimizer)
    scaler.update()
