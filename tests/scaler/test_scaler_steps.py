"""Tests of what ``GradScaler`` does with gradients and optimizers: unscale, look, step."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from harness import scaler_cases as cases
from harness.edge_shapes import BF16, F16, F32
from harness.reference import same_bits
from harness.scaler_cases import (
    INF,
    as_torch,
    filled,
    grads_of,
    params_of,
    ready,
    recorded,
    with_grads,
)
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

import amp_ext

# unscale_


every_scan = pytest.mark.parametrize("call", ["unscale_", "step", "_check_inf_per_device"])


SPARSE_VALUES = [[1.0, 2.0, 4.0], [1.0, INF, 4.0], []]
SPARSE_VALUES += [[3e38, 1.0, 3e38], [4e4, 1.0, 4e4]]  # whose sums overflow, one in half alone


@pytest.mark.parametrize("values", SPARSE_VALUES, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@every_scan
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@as_torch
def test_sparse_gradients_of_torchs_sgd_are_treated_as_by_torch(scaler_class, call, dtype, values):
    param = Parameter(torch.ones(4, dtype=dtype))
    rows = [[2, 0, 2][: len(values)]]
    param.grad = torch.sparse_coo_tensor(rows, torch.tensor(values, dtype=dtype), (4,))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), ready(scaler_class=scaler_class)
    first_sentence = ""
    if dtype == F16 and call != "_check_inf_per_device":
        first_sentence = cases.error_of(ValueError, getattr(scaler, call), optimizer).split(".")[0]
    else:
        getattr(scaler, call)(optimizer)
    return first_sentence, param, param.grad, recorded(scaler, optimizer)


def test_expanded_gradients_are_read_but_not_written(device):
    param = Parameter(torch.ones(5, device=device))
    param.grad = torch.full((1,), 4.0, device=device).expand(5)
    scaler = ready(device)
    with pytest.raises(RuntimeError):
        scaler.unscale_(torch.optim.SGD([param]))
    assert param.grad.tolist() == [4.0] * 5
    scaler.step(amp_ext.optim.SGD([param], lr=0.5))
    assert param.tolist() == [0.5] * 5


# _check_inf_per_device


@cases.every_optimizer
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_the_check_never_writes_a_gradient(make, dtype, device):
    values = torch.tensor([-0.0, 1e-40, 6e-8, 1.0, INF, cases.NAN]).to(dtype)
    grads = [values.repeat(9).to(device), torch.ones(3, dtype=dtype, device=device)]
    optimizer, scaler = with_grads(*grads, make=make), ready(device, init_scale=3.0)
    versions = [grad._version for grad in grads_of(optimizer)]
    found = scaler._check_inf_per_device(optimizer)
    assert [value.item() for value in found.values()] == [1.0]
    assert found is scaler._found_inf_per_device(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert all(map(same_bits, grads_of(optimizer), grads))
    assert [grad._version for grad in grads_of(optimizer)] == versions


# step


@cases.all_optimizers
@as_torch
def test_a_step_without_any_gradient_is_treated_as_by_torch(scaler_class, make, device):
    optimizer, scaler = make(cases.new_params(device)), ready(device, scaler_class)
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        return str(error)
    text = cases.error_of(AssertionError, scaler.update)
    assert text == "No inf checks were recorded prior to update."
    return text, params_of(optimizer)


@cases.every_optimizer
@cases.clean_or_overflow
@as_torch
def test_the_step_that_is_called_is_the_one_on_the_instance(scaler_class, make, value, device):
    optimizer, calls = filled(value, device, make), []
    original = optimizer.step

    def patched(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> str:
        attributes = {name: getattr(self, name, "none") for name in ("grad_scale", "found_inf")}
        calls.append((args, kwargs, cases.described(attributes)))
        original(*args, **kwargs)
        return "returned"

    optimizer.step = MethodType(patched, optimizer)
    returned = ready(device, scaler_class).step(optimizer)
    assert len(calls) == (value == 4 or make is not cases.torchs_sgd)
    leftovers = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
    return returned, calls, leftovers, params_of(optimizer)


class TakesTheScaler(torch.optim.SGD):
    """An optimizer of the older protocol, which asks the scaler itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: cases.TorchScaler | None = None) -> str:
        found = grad_scaler._check_inf_per_device(self)
        if sum(value.item() for value in found.values()) == 0:
            super().step()
        return "returned"


@cases.clean_or_overflow
@as_torch
def test_an_optimizer_that_takes_the_scaler_gets_it(scaler_class, value, device):
    optimizer = filled(value, device, lambda params: TakesTheScaler(params, 0.5))
    scaler = ready(device, scaler_class)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        returned = scaler.step(optimizer)
    scaler.update()
    return returned, params_of(optimizer), scaler.state_dict()


def updating_itself(base: Any) -> Any:
    class UpdatesItself(base):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for param in params_of(self):
                    param -= 0.5 * param.grad

    return UpdatesItself


def adding_to_gradients(base: Any) -> Any:
    class AddsToGradients(base):
        def step(self, closure: Any = None) -> Any:
            for param in params_of(self):
                param.grad += 2.0
            return super().step(closure)

    return AddsToGradients


@cases.clean_or_overflow
@pytest.mark.parametrize("derived", [updating_itself, adding_to_gradients])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, amp_ext.GradScaler])
def test_a_step_that_a_class_has_written_itself_sees_what_torchs_would(
    scaler_class, derived, value, device
):
    results = []
    for base in (torch.optim.SGD, amp_ext.optim.SGD):
        theirs = derived(base)
        of_theirs = type("OfTheirs", (theirs,), {})
        for kind in (theirs, of_theirs):
            optimizer = filled(value, device, lambda params, kind=kind: kind(params, 0.5))
            scaler = ready(device, scaler_class)
            scaler.step(optimizer)
            scaler.update()
            results.append([params_of(optimizer)[0].tolist(), scaler.get_scale()])
    assert results == [results[0]] * 4


def test_a_class_may_promise_that_its_step_leaves_scales_to_its_parent(device):
    class Logs(amp_ext.optim.SGD):
        _step_supports_amp_scaling = True
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    optimizer, scaler = filled(4.0, device, lambda params: Logs(params, 0.5)), ready(device)
    kept = grads_of(optimizer)[0].clone()
    scaler.step(optimizer)
    assert optimizer.steps == 1
    assert params_of(optimizer)[0].tolist() != [1.0] * 3
    assert same_bits(grads_of(optimizer)[0], kept)


@cases.clean_or_overflow
@pytest.mark.parametrize("supports_scaling", [False, True])
@as_torch
def test_anything_with_a_step_is_an_optimizer(scaler_class, value, supports_scaling, device):
    inner, scaler = filled(value, device), ready(device, scaler_class)
    wrapper = SimpleNamespace(param_groups=inner.param_groups, step=lambda: "stepped")
    wrapper._step_supports_amp_scaling = supports_scaling
    returned = scaler.step(wrapper)
    scaler.update()
    return returned, scaler.state_dict(), grads_of(inner)


# A scale that has no finite inverse


@cases.every_optimizer
@pytest.mark.parametrize("scale", [0.0, 1e-39], ids=str)
@cases.unscaled_first
def test_at_a_scale_without_an_inverse_every_step_is_skipped(make, scale, unscale, device):
    param = Parameter(torch.ones(3, device=device))
    optimizer, scaler = make([param]), amp_ext.GradScaler(device.type, init_scale=scale)
    before = scale
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale((param * 2).sum()).backward()
        cases.scan_and_step(scaler, optimizer, unscale)
        assert recorded(scaler, optimizer) == [1.0]
        scaler.update()
        after = scaler.get_scale()
        assert after == 0 or after < before
        before = after
    assert param.tolist() == [1, 1, 1]
    assert scaler.last_step_skipped(optimizer, wait=True) is True
    assert scaler.stats(wait=True).last_nonfinite is None
    stats = scaler.stats(wait=True)
    assert (stats.largest_scale, stats.skips) == (torch.tensor(scale).item(), 3)
