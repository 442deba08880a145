"""Tests of ``GradScaler``: its arguments, what it scales, its state, and its private names."""

from __future__ import annotations

import copy
import pickle
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from harness import scaler_cases as cases
from harness.edge_shapes import BF16, F16, F32
from harness.reference import same_bits
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

import amp_ext

# Constructor


def test_a_new_scaler_is_one_of_torchs_with_its_values():
    scaler = amp_ext.GradScaler("cpu")
    assert isinstance(scaler, cases.TorchScaler)
    assert amp_ext.GradScaler.__name__ == "GradScaler"
    assert not {"__bool__", "__len__"} & set(dir(amp_ext.GradScaler))
    assert scaler.is_enabled() is True
    assert scaler._device == "cpu"
    assert set(vars(cases.TorchScaler("cpu"))) <= set(vars(scaler))
    positional = amp_ext.GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert list(positional.state_dict().values()) == [8.0, 3.0, 0.25, 7, 0]
    options = {"min_scale": 1.0, "max_scale": 2.0**20, "dynamic": False}
    limited = amp_ext.GradScaler("cpu", **options)
    assert scaler.state_dict() == limited.state_dict() == cases.TorchScaler("cpu").state_dict()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_default_device_without_cuda_warns_and_disables():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = amp_ext.GradScaler()
    assert not scaler.is_enabled()
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not amp_ext.GradScaler("cuda:0").is_enabled()
    assert amp_ext.GradScaler("xpu").is_enabled()


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu:0"], ids=str)
def test_a_device_is_as_good_as_its_type(device):
    scaler = amp_ext.GradScaler(device, min_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(8.0))
    assert (scaler._device, scaler.get_scale()) == ("cpu", 8.0)


LIMITS = r"^GradScaler: init_scale must lie between min_scale and max_scale, got init_scale=4\.0, "
REFUSED = [
    ({"min_scale": 8.0}, ValueError, LIMITS + r"min_scale=8\.0, max_scale=None$"),
    ({"max_scale": 2.0}, ValueError, LIMITS + r"min_scale=None, max_scale=2\.0$"),
    ({"hysteresis": 0}, ValueError, r"^GradScaler: hysteresis must be at least 1, got 0$"),
    ({"growth_factor": 1.0}, AssertionError, r"^The growth factor must be > 1\.0\."),
    ({"device": "gpu"}, RuntimeError, "gpu"),
    ({"device": 1024.0}, TypeError, "device"),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED)
def test_options_that_fit_no_scaler_are_refused(options, kind, text):
    with pytest.raises(kind, match=text):
        amp_ext.GradScaler(**{"device": "cpu", "init_scale": 4.0} | options)


# scale


def test_the_scale_is_created_by_the_first_output(device):
    scaler, one = amp_ext.GradScaler(device.type, init_scale=0.1), torch.ones((), device=device)
    for output in (None, [], (), iter([one])):
        if output is not None:
            scaler.scale(output)
        assert scaler._scale is scaler._growth_tracker is None
        assert scaler.get_scale() == 0.1
    scaler.scale(one)
    expected = torch.full_like(one, 0.1), torch.zeros_like(one, dtype=torch.int32)
    assert cases.described((scaler._scale, scaler._growth_tracker)) == cases.described(expected)
    assert scaler.get_scale() == expected[0].item()


OUTPUTS = [torch.tensor(1.5).half(), torch.tensor([1, 2]), [], [torch.ones(2), 3.0]]
OUTPUTS += [(torch.ones(2), [torch.zeros(()), (torch.full((3,), cases.INF),)])]


@pytest.mark.parametrize("outputs", OUTPUTS, ids=repr)
@cases.as_torch
def test_outputs_are_scaled_as_by_torch(scaler_class, outputs):
    try:
        return scaler_class("cpu", init_scale=3.0).scale(outputs)
    except Exception as error:
        return type(error), str(error)


# The disabled scaler


@cases.every_optimizer
@cases.as_torch
def test_a_disabled_scaler_changes_nothing(scaler_class, make):
    scaler = scaler_class("cpu", enabled=False)
    optimizer, output = cases.filled(2.0, make=make), [torch.ones(2), "anything"]
    log = [scaler.scale(output) is output]
    log += [scaler.unscale_(optimizer) for _ in range(2)]
    log += [scaler.step(optimizer, closure=lambda: "the loss"), scaler.step(optimizer)]
    log += [scaler.update(), scaler.update(3.0), scaler.load_state_dict({})]
    log += [scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict()]
    twins = pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)
    log += [(twin.is_enabled(), twin.state_dict()) for twin in twins]
    return log, cases.params_of(optimizer), cases.grads_of(optimizer)


# Private names that clients read and write


@cases.every_optimizer
@pytest.mark.parametrize("how", ["fill", "replace", "replace-by-vector"])
def test_a_scale_set_from_outside_is_the_scale(make, how, device):
    grad = torch.tensor([16.0, -8.0], device=device)
    optimizer, expected = cases.with_grads(grad, make=make), cases.with_grads(grad / 16, make=make)
    scaler = cases.ready(device, growth_interval=1)
    if how == "fill":
        scaler._scale.fill_(16.0)
    else:
        scaler._scale = torch.full((1,) if "vector" in how else (), 16.0, device=device)
    assert scaler.get_scale() == scaler.scale(torch.ones((), device=device)).item() == 16
    scaler.step(optimizer)
    expected.step()
    assert torch.equal(cases.params_of(optimizer)[0], cases.params_of(expected)[0])
    scaler.update()
    assert (scaler.get_scale(), scaler._scale.item()) == (32, 32)


def test_a_counter_and_factors_set_from_outside_are_used(device):
    scaler = cases.ready(device)
    scaler._growth_tracker = torch.full((), 6, dtype=torch.int32, device=device)
    scaler._growth_factor, scaler._growth_interval, scaler._backoff_factor = 3.0, 7, 0.25
    assert cases.scales(scaler, ".", device) == [12]
    assert scaler._growth_tracker.item() == 0
    assert cases.scales(scaler, "x", device) == [3]


@cases.over([cases.torchs_sgd, cases.our_sgd, cases.our_adam])
@pytest.mark.parametrize("value", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("how", ["edited", "assigned"])
def test_found_inf_edited_between_unscale_and_step_decides(make, how, value, device):
    optimizer = cases.filled(1.0 if value else cases.INF, device, make)  # nobody looks again
    scaler = cases.ready(device, growth_interval=1)
    if how == "assigned":
        found_inf = torch.full((), value, device=device)
        state = {"stage": OptState.UNSCALED, "found_inf_per_device": {device: found_inf}}
        scaler._per_optimizer_states[id(optimizer)] = state
    else:
        scaler.unscale_(optimizer)
        cases.set_recorded(scaler, optimizer, value)
    scaler.step(optimizer)
    assert bool((cases.params_of(optimizer)[0] == 1).all()) == (value != 0)
    scaler.update()
    assert scaler.get_scale() == (2 if value else 8)


@cases.every_optimizer
@pytest.mark.parametrize("how", ["subclass", "instance"])
def test_an_override_of_unscale_grads_is_what_runs(make, how, device):
    calls = []

    def override(self: Any, optimizer: Any, *arguments: Any) -> dict[torch.device, Tensor]:
        calls.append((arguments[0].item(), arguments[1].item(), arguments[2]))
        found = super(amp_ext.GradScaler, self)._unscale_grads_(optimizer, *arguments[:2], True)
        return {key: value + 1 for key, value in found.items()}

    kind = type("Mine", (amp_ext.GradScaler,), {"_unscale_grads_": override})
    scaler = cases.ready(device, kind if how == "subclass" else amp_ext.GradScaler)
    if how == "instance":
        scaler._unscale_grads_ = MethodType(override, scaler)
    optimizer = cases.filled(1.0, device, make)
    scaler.step(optimizer)
    assert cases.recorded(scaler, optimizer) == [1.0]
    assert cases.params_of(optimizer)[0].tolist() == [1, 1, 1]
    scaler.update()
    assert scaler.get_scale() == 2
    assert scaler.last_step_skipped(optimizer, wait=True)
    scaler.unscale_(optimizer)
    read_only = getattr(optimizer, "_step_supports_amp_scaling", False)
    assert calls == [(1.0, 0.0, True) if read_only else (0.25, 0.0, False), (0.5, 0.0, False)]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("value", [1.0, cases.INF])
@cases.as_torch
def test_unscale_grads_may_be_called_directly(scaler_class, shape, value, device):
    optimizer = cases.with_grads(
        torch.full((3,), value, device=device), torch.ones(0, device=device)
    )
    inv_scale, found_inf = (torch.full(shape, v, device=device) for v in (0.5, 0.0))
    found = scaler_class(device.type)._unscale_grads_(optimizer, inv_scale, found_inf, False)
    return found, found_inf, inv_scale, cases.grads_of(optimizer)


def test_the_scale_and_the_counter_stay_where_they_are(device):
    scaler = cases.ready(device, growth_interval=2)
    tensors = scaler._scale, scaler._growth_tracker
    addresses = [tensor.data_ptr() for tensor in tensors]
    cases.scales(scaler, "..x.", device)
    for new_scale in (torch.full((), 16.0, device=device), torch.full((1,), 8.0, device=device)):
        scaler.update(new_scale)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    assert scaler._scale is tensors[0]
    assert scaler._growth_tracker is tensors[1]
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert [tensor.item() for tensor in tensors] == [32, 1]


# unscale_


every_scan = pytest.mark.parametrize("call", ["unscale_", "step", "_check_inf_per_device"])


SPARSE_VALUES = [[1.0, 2.0, 4.0], [1.0, cases.INF, 4.0], []]
SPARSE_VALUES += [[3e38, 1.0, 3e38], [4e4, 1.0, 4e4]]  # whose sums overflow, one in half alone


@pytest.mark.parametrize("values", SPARSE_VALUES, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@every_scan
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@cases.as_torch
def test_sparse_gradients_of_torchs_sgd_are_treated_as_by_torch(scaler_class, call, dtype, values):
    param = Parameter(torch.ones(4, dtype=dtype))
    rows = [[2, 0, 2][: len(values)]]
    param.grad = torch.sparse_coo_tensor(rows, torch.tensor(values, dtype=dtype), (4,))
    optimizer, scaler = torch.optim.SGD([param], lr=0.5), cases.ready(scaler_class=scaler_class)
    first_sentence = ""
    if dtype == F16 and call != "_check_inf_per_device":
        first_sentence = cases.error_of(ValueError, getattr(scaler, call), optimizer).split(".")[0]
    else:
        getattr(scaler, call)(optimizer)
    return first_sentence, param, param.grad, cases.recorded(scaler, optimizer)


def test_expanded_gradients_are_read_but_not_written(device):
    param = Parameter(torch.ones(5, device=device))
    param.grad = torch.full((1,), 4.0, device=device).expand(5)
    scaler = cases.ready(device)
    with pytest.raises(RuntimeError):
        scaler.unscale_(torch.optim.SGD([param]))
    assert param.grad.tolist() == [4.0] * 5
    scaler.step(amp_ext.optim.SGD([param], lr=0.5))
    assert param.tolist() == [0.5] * 5


# _check_inf_per_device


@cases.every_optimizer
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_the_check_never_writes_a_gradient(make, dtype, device):
    values = torch.tensor([-0.0, 1e-40, 6e-8, 1.0, cases.INF, cases.NAN]).to(dtype)
    grads = [values.repeat(9).to(device), torch.ones(3, dtype=dtype, device=device)]
    optimizer, scaler = cases.with_grads(*grads, make=make), cases.ready(device, init_scale=3.0)
    versions = [grad._version for grad in cases.grads_of(optimizer)]
    found = scaler._check_inf_per_device(optimizer)
    assert [value.item() for value in found.values()] == [1.0]
    assert found is scaler._found_inf_per_device(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert all(map(same_bits, cases.grads_of(optimizer), grads))
    assert [grad._version for grad in cases.grads_of(optimizer)] == versions


# step


@cases.all_optimizers
@cases.as_torch
def test_a_step_without_any_gradient_is_treated_as_by_torch(scaler_class, make, device):
    optimizer, scaler = make(cases.new_params(device)), cases.ready(device, scaler_class)
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        return str(error)
    text = cases.error_of(AssertionError, scaler.update)
    assert text == "No inf checks were recorded prior to update."
    return text, cases.params_of(optimizer)


@cases.every_optimizer
@cases.clean_or_overflow
@cases.as_torch
def test_the_step_that_is_called_is_the_one_on_the_instance(scaler_class, make, value, device):
    optimizer, calls = cases.filled(value, device, make), []
    original = optimizer.step

    def patched(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> str:
        attributes = {name: getattr(self, name, "none") for name in ("grad_scale", "found_inf")}
        calls.append((args, kwargs, cases.described(attributes)))
        original(*args, **kwargs)
        return "returned"

    optimizer.step = MethodType(patched, optimizer)
    returned = cases.ready(device, scaler_class).step(optimizer)
    assert len(calls) == (value == 4 or make is not cases.torchs_sgd)
    leftovers = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
    return returned, calls, leftovers, cases.params_of(optimizer)


class TakesTheScaler(torch.optim.SGD):
    """An optimizer of the older protocol, which asks the scaler itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: cases.TorchScaler | None = None) -> str:
        found = grad_scaler._check_inf_per_device(self)
        if sum(value.item() for value in found.values()) == 0:
            super().step()
        return "returned"


@cases.clean_or_overflow
@cases.as_torch
def test_an_optimizer_that_takes_the_scaler_gets_it(scaler_class, value, device):
    optimizer = cases.filled(value, device, lambda params: TakesTheScaler(params, 0.5))
    scaler = cases.ready(device, scaler_class)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        returned = scaler.step(optimizer)
    scaler.update()
    return returned, cases.params_of(optimizer), scaler.state_dict()


def updating_itself(base: Any) -> Any:
    class UpdatesItself(base):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for param in cases.params_of(self):
                    param -= 0.5 * param.grad

    return UpdatesItself


def adding_to_gradients(base: Any) -> Any:
    class AddsToGradients(base):
        def step(self, closure: Any = None) -> Any:
            for param in cases.params_of(self):
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
            optimizer = cases.filled(value, device, lambda params, kind=kind: kind(params, 0.5))
            scaler = cases.ready(device, scaler_class)
            scaler.step(optimizer)
            scaler.update()
            results.append([cases.params_of(optimizer)[0].tolist(), scaler.get_scale()])
    assert results == [results[0]] * 4


def test_a_class_may_promise_that_its_step_leaves_scales_to_its_parent(device):
    class Logs(amp_ext.optim.SGD):
        _step_supports_amp_scaling = True
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    optimizer, scaler = (
        cases.filled(4.0, device, lambda params: Logs(params, 0.5)),
        cases.ready(device),
    )
    kept = cases.grads_of(optimizer)[0].clone()
    scaler.step(optimizer)
    assert optimizer.steps == 1
    assert cases.params_of(optimizer)[0].tolist() != [1.0] * 3
    assert same_bits(cases.grads_of(optimizer)[0], kept)


@cases.clean_or_overflow
@pytest.mark.parametrize("supports_scaling", [False, True])
@cases.as_torch
def test_anything_with_a_step_is_an_optimizer(scaler_class, value, supports_scaling, device):
    inner, scaler = cases.filled(value, device), cases.ready(device, scaler_class)
    wrapper = SimpleNamespace(param_groups=inner.param_groups, step=lambda: "stepped")
    wrapper._step_supports_amp_scaling = supports_scaling
    returned = scaler.step(wrapper)
    scaler.update()
    return returned, scaler.state_dict(), cases.grads_of(inner)


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
        assert cases.recorded(scaler, optimizer) == [1.0]
        scaler.update()
        after = scaler.get_scale()
        assert after == 0 or after < before
        before = after
    assert param.tolist() == [1, 1, 1]
    assert scaler.last_step_skipped(optimizer, wait=True) is True
    assert scaler.stats(wait=True).last_nonfinite is None
    stats = scaler.stats(wait=True)
    assert (stats.largest_scale, stats.skips) == (torch.tensor(scale).item(), 3)
