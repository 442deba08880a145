"""Tests of every scaler with every optimizer: torch's and ours agree in all combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import same_bits, tolerance
from torch import Tensor
from torch.nn import Parameter

import amp_ext

ADAM = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
SCALE = 2.0**10
STEPS = 6

OUR_OPTIMIZERS = [
    pytest.param(amp_ext.optim.Adam, ADAM, id="our-adam"),
    pytest.param(amp_ext.optim.AdamW, ADAM, id="our-adamw"),
    pytest.param(amp_ext.optim.SGD, SGD, id="our-sgd"),
]
LOOPS = [
    pytest.param(torch.optim.Adam, ADAM | {"foreach": False}, id="adam-loop"),
    pytest.param(torch.optim.AdamW, ADAM | {"foreach": False}, id="adamw-loop"),
    pytest.param(torch.optim.SGD, SGD | {"foreach": False}, id="sgd-loop"),
]
# No fused SGD: after an overflow at its first step its momentum is uninitialised memory.
FUSED = [
    pytest.param(torch.optim.Adam, ADAM | {"fused": True}, id="adam-fused"),
    pytest.param(torch.optim.AdamW, ADAM | {"fused": True}, id="adamw-fused"),
]
SCALERS = [
    pytest.param(torch.amp.GradScaler, id="torch-scaler"),
    pytest.param(amp_ext.GradScaler, id="our-scaler"),
]
UNSCALE = [pytest.param(False, id="step"), pytest.param(True, id="unscale-step")]
OVERFLOWS = [
    pytest.param([], id="clean"),
    pytest.param([0], id="first"),
    pytest.param([0, 1, 2], id="first-three"),
    pytest.param([2, 4], id="later"),
    pytest.param(list(range(STEPS)), id="all"),
]


def new_params(device: Any, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Returns parameters of three shapes with the same values at each call."""
    draw = torch.Generator().manual_seed(7)
    shapes = [(4, 5), (33,), ()]
    return [Parameter(torch.randn(s, generator=draw).to(device, dtype)) for s in shapes]


def new_grads(step: int, device: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns the unscaled gradients of a step: none that leaves fp16's range when scaled."""
    draw = torch.Generator().manual_seed(step)
    return [
        torch.randn(p.shape, generator=draw).clamp(-4, 4).to(device, dtype)
        for p in new_params("cpu")
    ]


def torchs_loop(optimizer_class: type, options: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Returns torch's plain loop for the formula of an optimizer."""
    options = {name: value for name, value in options.items() if name != "fused"}
    return getattr(torch.optim, optimizer_class.__name__), options | {"foreach": False}


def plain(
    optimizer_class: type, options: dict[str, Any], steps: list[int], device: Any, **kind: Any
) -> list[Tensor]:
    """Returns the parameters after some steps without any scaler."""
    params = new_params(device, **kind)
    optimizer = optimizer_class(params, **options)
    for step in steps:
        for param, grad in zip(params, new_grads(step, device, **kind), strict=True):
            param.grad = grad
        optimizer.step()
    return params


def under_scaler(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    overflows: list[int],
    unscale_first: bool,
    device: Any,
    **kind: Any,
) -> tuple[list[Tensor], list[float]]:
    """Returns the parameters after ``STEPS`` steps of a scaler, and the scale after each."""
    params = new_params(device, **kind)
    optimizer = optimizer_class(params, **options)
    scaler, scales = scaler_class(torch.device(device).type, SCALE, growth_interval=2), []
    for step in range(STEPS):
        grads = scaler.scale(new_grads(step, device, **kind))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(param.dtype)
        if step in overflows:
            params[step % 2].grad.view(-1)[step] = [float("inf"), float("nan")][step % 2]
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return params, scales


@pytest.mark.parametrize(("optimizer_class", "options"), [*OUR_OPTIMIZERS, *LOOPS, *FUSED])
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("unscale_first", UNSCALE)
@pytest.mark.parametrize("overflows", OVERFLOWS)
def test_every_pair_takes_the_clean_steps_and_no_other(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    overflows: list[int],
    unscale_first: bool,
    device,
) -> None:
    """The scale is a power of two, so the same class must arrive at the same bits without it."""
    params, scales = under_scaler(
        scaler_class, optimizer_class, options, overflows, unscale_first, device
    )
    clean = [step for step in range(STEPS) if step not in overflows]
    same_class = plain(optimizer_class, options, clean, device)
    assert all(map(same_bits, params, same_class))
    loop = plain(*torchs_loop(optimizer_class, options), clean, device)
    for param, expected in zip(params, loop, strict=True):
        torch.testing.assert_close(param, expected, **tolerance(torch.float32, STEPS))
    _, expected_scales = under_scaler(
        torch.amp.GradScaler, torch.optim.SGD, {"lr": 0.1}, overflows, unscale_first, device
    )
    assert scales == expected_scales


@pytest.mark.parametrize(("optimizer_class", "options"), OUR_OPTIMIZERS)
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("overflows", OVERFLOWS)
def test_our_optimizers_take_gradients_of_their_own_dtype(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    dtype: torch.dtype,
    overflows: list[int],
    device,
) -> None:
    params, _ = under_scaler(
        scaler_class, optimizer_class, options, overflows, False, device, dtype=dtype
    )
    clean = [step for step in range(STEPS) if step not in overflows]
    expected = plain(optimizer_class, options, clean, device, dtype=dtype)
    assert all(map(same_bits, params, expected))


@pytest.mark.parametrize(("optimizer_class", "options"), OUR_OPTIMIZERS)
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("scale", [3.0, 0.1, 12345.678], ids=str)
@pytest.mark.parametrize("unscale_first", UNSCALE)
def test_a_scale_that_rounds_costs_a_rounding(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    scale: float,
    unscale_first: bool,
    device,
) -> None:
    """The gradient is multiplied by the rounded inverse, whoever does it."""
    params, expected = new_params(device), new_params(device)
    optimizer = optimizer_class(params, **options)
    loop_class, loop_options = torchs_loop(optimizer_class, options)
    loop = loop_class(expected, **loop_options)
    scaler = scaler_class(torch.device(device).type, scale)
    inverse = (1 / torch.tensor(scale).double()).float().to(device)
    for step in range(STEPS):
        grads = scaler.scale(new_grads(step, device))
        for index, grad in enumerate(grads):
            params[index].grad, expected[index].grad = grad, grad * inverse
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        loop.step()
    for param, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(torch.float32, STEPS))


def stepped(params: list[Parameter], device: Any) -> bool:
    """Tells whether all parameters moved; some that did and some that did not is an error."""
    moved = {not torch.equal(p, q) for p, q in zip(params, new_params(device), strict=True)}
    assert len(moved) == 1
    return moved.pop()


def replace_found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, new: Callable[[Tensor], Tensor]
) -> None:
    found = scaler._found_inf_per_device(optimizer)
    found.update({where: new(value) for where, value in found.items()})


@pytest.mark.parametrize(("optimizer_class", "options"), [*OUR_OPTIMIZERS, *LOOPS[:1], *LOOPS[2:]])
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, 3.0, 0.5])
def test_any_found_inf_but_zero_skips_the_step_after_unscaling(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    value: float,
    shape: tuple[int, ...],
    device,
) -> None:
    params = new_params(device)
    optimizer = optimizer_class(params, **options)
    scaler = scaler_class(torch.device(device).type, SCALE)
    for param, grad in zip(params, scaler.scale(new_grads(0, device)), strict=True):
        param.grad = grad
    scaler.unscale_(optimizer)
    replace_found_inf(scaler, optimizer, lambda found: torch.full(shape, value).to(found.device))
    scaler.step(optimizer)
    scaler.update()
    assert stepped(params, device) == (value == 0)
    assert scaler.get_scale() == (SCALE / 2 if value else SCALE)


@pytest.mark.parametrize(("optimizer_class", "options"), OUR_OPTIMIZERS)
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, 3.0])
def test_any_found_inf_but_zero_skips_a_step_that_unscales_itself(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    value: float,
    shape: tuple[int, ...],
    device,
) -> None:
    class Reduces(scaler_class):
        def _check_inf_per_device(self, optimizer):
            super()._check_inf_per_device(optimizer)
            replace_found_inf(self, optimizer, lambda found: torch.full(shape, value).to(device))
            return self._found_inf_per_device(optimizer)

    params = new_params(device)
    optimizer = optimizer_class(params, **options)
    scaler = Reduces(torch.device(device).type, SCALE)
    for param, grad in zip(params, scaler.scale(new_grads(0, device)), strict=True):
        param.grad = grad
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (SCALE / 2 if value else SCALE)
    assert stepped(params, device) == (value == 0)
    if value == 0:
        expected = plain(optimizer_class, options, [0], device)
        assert all(map(same_bits, params, expected))


FOUND_INFS = [
    pytest.param(lambda device: 0, False, id="int-0"),
    pytest.param(lambda device: None, False, id="none"),
    pytest.param(lambda device: torch.zeros((), device=device), False, id="zero"),
    pytest.param(lambda device: torch.zeros(1, device=device), False, id="vector-of-zero"),
    pytest.param(lambda device: torch.ones((), device=device), True, id="one"),
    pytest.param(lambda device: torch.ones(1, device=device), True, id="vector-of-one"),
    pytest.param(lambda device: torch.full((), 2.0, device=device), True, id="two"),
    pytest.param(lambda device: torch.full((1,), 3.0, device=device), True, id="vector-of-three"),
]


@pytest.mark.parametrize(("optimizer_class", "options"), OUR_OPTIMIZERS)
@pytest.mark.parametrize(("found_inf", "skips"), FOUND_INFS)
@pytest.mark.parametrize(
    "grad_scale",
    [
        pytest.param(lambda device: None, id="unscaled"),
        pytest.param(lambda device: torch.full((), SCALE, device=device), id="scaled"),
        pytest.param(lambda device: torch.full((1,), SCALE, device=device), id="scaled-vector"),
    ],
)
def test_the_attributes_may_be_set_by_hand(
    optimizer_class: type,
    options: dict[str, Any],
    found_inf: Callable[[Any], Any],
    skips: bool,
    grad_scale: Callable[[Any], Any],
    device,
) -> None:
    params = new_params(device)
    optimizer = optimizer_class(params, **options)
    optimizer.found_inf, optimizer.grad_scale = found_inf(device), grad_scale(device)
    factor = 1.0 if optimizer.grad_scale is None else SCALE
    for step in range(2):
        for param, grad in zip(params, new_grads(step, device), strict=True):
            param.grad = grad * factor
        optimizer.step()
    expected = plain(optimizer_class, options, [] if skips else [0, 1], device)
    assert all(map(same_bits, params, expected))


@pytest.mark.parametrize(("optimizer_class", "options"), [*OUR_OPTIMIZERS, *LOOPS, *FUSED])
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("unscale_first", UNSCALE)
def test_an_optimizer_without_gradients_beside_one_with_them_stands_still(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    unscale_first: bool,
    device,
) -> None:
    """Without gradients found_inf is the Python int 0; plain optimizers refuse the step."""
    idle = optimizer_class(new_params(device), **options)
    busy = optimizer_class(new_params(device), **options)
    scaler = scaler_class(torch.device(device).type, SCALE, growth_interval=1)
    busy_params = busy.param_groups[0]["params"]
    for param, grad in zip(busy_params, scaler.scale(new_grads(0, device)), strict=True):
        param.grad = grad
    if unscale_first:
        scaler.unscale_(idle)
    if getattr(idle, "_step_supports_amp_scaling", False):
        scaler.step(idle)
    else:
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(idle)
    scaler.step(busy)
    scaler.update()
    assert not stepped(idle.param_groups[0]["params"], device)
    assert stepped(busy_params, device)
    assert scaler.get_scale() == 2 * SCALE


@pytest.mark.parametrize(("optimizer_class", "options"), OUR_OPTIMIZERS)
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("unscale_first", UNSCALE)
@pytest.mark.parametrize("bad", [False, True], ids=["clean", "overflow"])
def test_an_instance_that_gives_up_its_own_scaling_is_stepped_as_a_plain_optimizer(
    scaler_class: type,
    optimizer_class: type,
    options: dict[str, Any],
    unscale_first: bool,
    bad: bool,
    device,
) -> None:
    params = new_params(device)
    optimizer = optimizer_class(params, **options)
    optimizer._step_supports_amp_scaling = False
    scaler = scaler_class(torch.device(device).type, SCALE)
    for param, grad in zip(params, scaler.scale(new_grads(0, device)), strict=True):
        param.grad = grad
    if bad:
        params[1].grad[-1] = float("nan")
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(map(same_bits, params, plain(optimizer_class, options, [0] * (not bad), device)))
    assert same_bits(params[0].grad, new_grads(0, device)[0])


@pytest.mark.parametrize(("optimizer_class", "options"), OUR_OPTIMIZERS)
@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("scale", [0.0, 1e-39], ids=str)
@pytest.mark.filterwarnings("ignore:.*inverse is not finite")
def test_our_optimizers_write_no_nan_at_a_scale_without_an_inverse(
    scaler_class: type, optimizer_class: type, options: dict[str, Any], scale: float, device
) -> None:
    params = new_params(device)
    optimizer = optimizer_class(params, **options)
    scaler = scaler_class(torch.device(device).type, scale)
    for param, grad in zip(params, scaler.scale(new_grads(0, device)), strict=True):
        param.grad = grad
    scaler.step(optimizer)
    assert not stepped(params, device)
