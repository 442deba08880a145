"""Tests of every scaler with every optimizer: torch's and ours agree in all combinations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.optimizer_cases import (
    EACH_CLASS,
    KINDS,
    Optimizer,
    assert_same_bits,
    ours,
    params_of,
    theirs,
)
from harness.reference import same_bits
from harness.rows import rows
from harness.scaler_loop import give_new_grads, makers, new_params, plain
from torch import Tensor

import amp_ext

SCALE = 2.0**10

OURS = makers(ours, EACH_CLASS, "our")
LOOPS = makers(theirs, EACH_CLASS, "loop", foreach=False)
# No fused SGD: after an overflow at its first step its momentum is uninitialised memory.
WITH_FUSED = [row for row in EACH_CLASS if KINDS[row.values[0]].in_16_bits == {"fused": True}]
FUSED = makers(theirs, WITH_FUSED, "fused", fused=True)
BOTH = {"torch-scaler": torch.amp.GradScaler, "our-scaler": amp_ext.GradScaler}
SCALERS = pytest.mark.parametrize("scaler_class", rows(BOTH))
UNSCALE = pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale-step"])


def optimizers(*tables: list[Any]) -> Any:
    return pytest.mark.parametrize("make", [row for table in tables for row in table])


def scaled(scaler_class: Any, optimizer: Optimizer, scale: float = SCALE, **options: Any) -> Any:
    """Returns a scaler for the device of an optimizer, whose gradients are those of step 0."""
    params = params_of(optimizer)
    scaler = scaler_class(params[0].device.type, scale, **options)
    give_new_grads(params, 0, scaler)
    return scaler


def stepped(optimizer: Optimizer) -> bool:
    """Tells whether all parameters moved; some that did and some that did not is an error."""
    params = params_of(optimizer)
    start = new_params(params[0].device)
    (moved,) = {not torch.equal(p, q) for p, q in zip(params, start, strict=True)}
    return moved


# found_inf, from whoever writes it.


@pytest.mark.parametrize(
    ("make", "unscale_first"),
    [
        pytest.param(*row.values, unscale, id=f"{row.id}-{'unscale-' * unscale}step")
        for table, ways in ((OURS, (True, False)), (LOOPS, (True,)))  # loops can't unscale
        for row in table
        for unscale in ways
    ],
)
@SCALERS
@pytest.mark.parametrize(
    ("value", "shape"), [(0.0, ()), (0.0, (1,)), (1.0, ()), (2.0, (1,)), (3.0, ()), (0.5, (1,))]
)
def test_any_found_inf_but_zero_skips_the_step(
    scaler_class, make, value, shape, unscale_first, device
):
    """Written after ``unscale_``, or by a scaler that reduces what the look of its step found."""

    def replace_found_inf(scaler: Any, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        found = scaler._found_inf_per_device(optimizer)
        found.update({where: torch.full(shape, value, device=where) for where in found})
        return found

    class Reduces(scaler_class):
        def _check_inf_per_device(self, optimizer):
            super()._check_inf_per_device(optimizer)
            return replace_found_inf(self, optimizer)

    optimizer = make(new_params(device))
    scaler = scaled(scaler_class if unscale_first else Reduces, optimizer)
    if unscale_first:
        scaler.unscale_(optimizer)
        replace_found_inf(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (SCALE / 2 if value else SCALE)
    assert stepped(optimizer) == (value == 0)
    if value == 0:
        assert_same_bits(optimizer, plain(make, [0], device))


@optimizers(OURS)
@pytest.mark.parametrize("found", [None, 0.0, 1.0, 2.0, 3.0, -1], ids=str)
@pytest.mark.parametrize("scale", [None, SCALE], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_attributes_may_be_set_by_hand(make, found, scale, shape, device):
    """An int skips as well. Of the int 0, see ``test_hand_over.py``."""
    optimizer = make(new_params(device))
    full = isinstance(found, float)
    optimizer.found_inf = torch.full(shape, found, device=device) if full else found
    optimizer.grad_scale = None if scale is None else torch.full(shape, scale, device=device)
    for step in range(2):
        give_new_grads(params_of(optimizer), step, factor=scale or 1.0)
        optimizer.step()
    expected = plain(make, [] if found else [0, 1], device)
    assert all(map(same_bits, params_of(optimizer), params_of(expected)))


@optimizers(OURS, LOOPS, FUSED)
@SCALERS
@UNSCALE
def test_an_optimizer_without_gradients_beside_one_with_them_stands_still(
    scaler_class, make, unscale_first, device
):
    """Without gradients found_inf is the Python int 0; plain optimizers refuse the step."""
    idle, busy = (make(new_params(device)) for _ in range(2))
    scaler = scaled(scaler_class, busy, growth_interval=1)
    if unscale_first:
        scaler.unscale_(idle)
    if getattr(idle, "_step_supports_amp_scaling", False):
        scaler.step(idle)
    else:
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(idle)
    scaler.step(busy)
    scaler.update()
    assert not stepped(idle)
    assert stepped(busy)
    assert scaler.get_scale() == 2 * SCALE


@optimizers(OURS)
@SCALERS
@UNSCALE
@pytest.mark.parametrize("bad", [False, True], ids=["clean", "overflow"])
def test_an_instance_that_gives_up_its_own_scaling_is_stepped_as_a_plain_optimizer(
    scaler_class, make, unscale_first, bad, device
):
    optimizer = make(new_params(device))
    optimizer._step_supports_amp_scaling = False
    scaler = scaled(scaler_class, optimizer)
    first, second, _ = params_of(optimizer)
    if bad:
        second.grad[-1] = float("nan")
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    expected = plain(make, [0] * (not bad), device)
    assert all(map(same_bits, params_of(optimizer), params_of(expected)))
    grad = first.grad.clone()
    give_new_grads([first], 0)
    assert same_bits(grad, first.grad)
