"""Tests of the options of clipping that single operations take, and of their reproducibility."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from awkward import BF16, F16, F32, F64
from clipping_cases import norm_of
from optimizer_cases import (
    assert_same_bits,
    bits_of,
    give_grads,
    grads_of,
    in_another_process,
    make_params,
    ours,
    params_of,
)
from reference import same_bits, snapshot, tolerance
from torch import Tensor

import amp_ext
from amp_ext import ops


def sgd(params: list[Tensor], grads: list[Tensor], **options: Any) -> None:
    ops.sgd_(params, grads, lr=1.0, **options)


def adam(params: list[Tensor], grads: list[Tensor], **options: Any) -> None:
    states = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    steps = [torch.zeros((), device=param.device) for param in params]
    hyper = {"lr": 1.0, "beta1": 0.5, "beta2": 0.5, "eps": 1.0, "weight_decay": 0.0}
    ops.adam_(params, grads, *states, steps, **hyper, **options)


OPERATIONS = [pytest.param(sgd, id="sgd"), pytest.param(adam, id="adam")]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_takes_the_sum_that_it_is_given(operation, shape, device) -> None:
    """The sum is of the gradients as they are, the norm of the unscaled ones."""
    params = [torch.randn(70, device=device), torch.randn(5, device=device)]
    grads = [torch.randn_like(param) for param in params]
    expected = snapshot(params)
    operation(expected, [grad / 8 / 4 for grad in grads])
    total = torch.full(shape, 2.0**22, dtype=F64, device=device)  # 2048 scaled, 256 unscaled
    norm = torch.full(shape, -1.0, device=device)
    operation(
        params,
        grads,
        grad_scale=torch.tensor(8.0, device=device),
        max_grad_norm=64.0,
        sum_of_squares=total,
        grad_norm=norm,
    )
    assert norm.item() == 256
    assert total.item() == 2.0**22
    for param, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(param, wanted, **tolerance(F32))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_without_a_sum_takes_its_own(operation, device) -> None:
    params = [torch.randn(70, device=device), torch.randn(5, device=device)]
    grads = [torch.randn_like(param) for param in params]
    given, own = snapshot(params), snapshot(params)
    total = torch.zeros((), dtype=F64, device=device)
    norm = torch.zeros((), device=device)
    ops.check_finite_(grads, torch.zeros((), device=device), sum_of_squares=total)
    operation(given, grads, max_grad_norm=1.0, sum_of_squares=total)
    operation(own, grads, max_grad_norm=1.0, grad_norm=norm)
    assert all(map(same_bits, own, given))
    assert norm.item() == pytest.approx(norm_of(grads), rel=1e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_clips_by_value_and_writes_back(operation, device) -> None:
    params = [torch.randn(70, device=device), torch.randn(5, device=device)]
    grads = [torch.randn_like(param) for param in params]
    clipped = [(grad / 2).clamp(-0.25, 0.25) for grad in grads]
    expected, kept = snapshot(params), snapshot(grads)
    operation(expected, clipped)
    half = {"clip_value": 0.25, "grad_scale": torch.tensor(2.0, device=device)}
    operation(snapshot(params), grads, **half)
    assert all(map(same_bits, grads, kept))
    operation(params, grads, **half, write_back_grads=True)
    assert all(map(same_bits, params, expected))
    assert all(map(same_bits, grads, clipped))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_skips_writes_no_gradient_but_the_norm(operation, device) -> None:
    params = [torch.randn(70, device=device)]
    grads = [torch.randn_like(param) for param in params]
    before, kept = snapshot(params), snapshot(grads)
    norm = torch.zeros((), device=device)
    operation(
        params,
        grads,
        found_inf=torch.ones((), device=device),
        max_grad_norm=0.5,
        grad_norm=norm,
        write_back_grads=True,
    )
    assert all(map(same_bits, params, before))
    assert all(map(same_bits, grads, kept))
    assert norm.item() == pytest.approx(norm_of(grads), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"sum_of_squares": torch.ones(())}, "sum_of_squares must be Double", id="sum"),
        pytest.param(
            {"sum_of_squares": torch.ones(2, dtype=F64)}, "sum_of_squares must be one", id="sums"
        ),
        pytest.param(
            {"grad_norm": torch.ones((), dtype=F64)}, "grad_norm must be Float", id="norm"
        ),
        pytest.param({"grad_norm": torch.ones(2)}, "grad_norm must be one element", id="norms"),
        pytest.param(
            {"grad_norm": torch.ones((), device="meta")}, "grad_norm must .*meta", id="elsewhere"
        ),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bad_arguments_of_an_operation_are_named(operation, options, text: str) -> None:
    params = [torch.ones(5)]
    with pytest.raises(RuntimeError, match=f"^{operation.__name__}_: {text}"):
        operation(params, [torch.ones(5)], max_grad_norm=1.0, **options)
    assert torch.equal(params[0], torch.ones(5))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_writes_no_expanded_gradient_back(operation) -> None:
    params = [torch.ones(5), torch.ones(5)]
    grads = [torch.ones(5), torch.ones(1).expand(5)]
    operation([torch.ones(5), torch.ones(5)], grads)
    with pytest.raises(RuntimeError, match=rf"^{operation.__name__}_: grads\[1\] .*must not over"):
        operation(params, grads, write_back_grads=True)
    assert all(torch.equal(param, torch.ones(5)) for param in params)


# Reproducibility.


def trained(threads: int | None = None) -> list[dict[str, Tensor]]:
    """Returns what some clipped steps of every class and dtype lead to."""
    before = torch.get_num_threads()
    results = []
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(0)
        for name in ("AdamW", "SGD"):
            groups = [
                {"params": make_params(dtype, shapes=[(100_001,), (5,)])}
                for dtype in (F32, F16, BF16, F64)
            ]
            optimizer = ours(name)(
                groups, max_grad_norm=3.0, clip_value=0.01, write_back_grads=True
            )
            optimizer.grad_scale = torch.tensor(3.0)
            for _ in range(2):
                give_grads(optimizer)
                optimizer.step()
                results.append({"norm": optimizer.grad_norm.clone()})
            amp_ext.clip_grad_norm_(params_of(optimizer), 1.0)
            results += [{"grad": grad} for grad in grads_of(optimizer)]
            results += bits_of(optimizer)
    finally:
        torch.set_num_threads(before)
    return results


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    alone = trained(1)
    assert_same_bits(trained(2), alone)
    assert_same_bits(trained(3), alone)


def trained_under_isa() -> tuple[str, list[dict[str, Tensor]]]:
    return ops.cpu_isa(), trained()


def test_every_instruction_set_gives_the_same_bits() -> None:
    if ops.cpu_isa() == "plain":
        pytest.skip("this process has the plain engine itself")
    plain_isa, plain = in_another_process(trained_under_isa, AMP_EXT_CPU_ISA="plain")
    assert plain_isa == "plain"
    assert_same_bits(trained(), plain)


@pytest.mark.parametrize("option", ["max_grad_norm", "clip_value"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_the_operation_refuses_a_limit_that_is_none(option, value, device):
    param, grad = torch.zeros(1, device=device), torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match=rf"sgd_: {option} must be at least 0, got "):
        ops.sgd_([param], [grad], lr=0.1, **{option: value})
    assert param.item() == 0.0
