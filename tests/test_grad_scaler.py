"""Tests of ``GradScaler``: everything torch's class does, and where ours does better."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import itertools
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from reference import same_bits
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

import amp_ext

TorchScaler = torch.amp.GradScaler

TORCH_OPTIMIZERS = [
    pytest.param(lambda params: torch.optim.SGD(params, lr=0.5), id="torch-sgd"),
    pytest.param(
        lambda params: torch.optim.Adam(params, lr=0.5, fused=True), id="torch-fused-adam"
    ),
]
OUR_OPTIMIZERS = [
    pytest.param(lambda params: amp_ext.optim.SGD(params, lr=0.5, momentum=0.9), id="our-sgd"),
    pytest.param(lambda params: amp_ext.optim.Adam(params, lr=0.5), id="our-adam"),
]
OPTIMIZERS = TORCH_OPTIMIZERS + OUR_OPTIMIZERS
MakeOptimizer = Callable[[list[Parameter]], torch.optim.Optimizer]


def ready(scaler_class: type[TorchScaler], device: Any = "cpu", **options: Any) -> TorchScaler:
    """Builds a scaler whose tensors exist, with a scale of 4 unless told otherwise."""
    scaler = scaler_class(torch.device(device).type, **{"init_scale": 4.0} | options)
    scaler.scale(torch.ones((), device=device))
    return scaler


def with_grads(*grads: Tensor, make: MakeOptimizer | None = None) -> torch.optim.Optimizer:
    """Builds an optimizer, SGD by default, of parameters of ones that have copies of ``grads``."""
    params = [Parameter(torch.ones_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return make(params) if make is not None else torch.optim.SGD(params, lr=0.5)


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def grads_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param.grad for param in params_of(optimizer) if param.grad is not None]


def recorded(scaler: TorchScaler, optimizer: torch.optim.Optimizer) -> list[float]:
    """Returns the values of found_inf that the scaler holds for an optimizer."""
    return [found.item() for found in scaler._found_inf_per_device(optimizer).values()]


def set_recorded(scaler: TorchScaler, optimizer: torch.optim.Optimizer, value: float) -> None:
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        found_inf.fill_(value)


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a call returns, or the type and text of what it raises."""
    try:
        return call(), ""
    except Exception as error:
        return type(error), str(error)


def described(value: Any) -> Any:
    """Returns something that ``==`` compares whole: tensors by type, shape, dtype and bits."""
    if isinstance(value, Tensor):
        if value.is_sparse:
            return "sparse", value.is_coalesced(), described(value._values())
        return value.dtype, tuple(value.shape), value.device.type, value.detach().tolist()
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [described(item) for item in value]
    return value


# Constructor


def test_the_constructor_takes_torchs_arguments_with_torchs_defaults() -> None:
    expected = list(inspect.signature(TorchScaler).parameters.values())
    actual = list(inspect.signature(amp_ext.GradScaler).parameters.values())
    assert [(p.name, p.default, p.kind) for p in actual[: len(expected)]] == [
        (p.name, p.default, p.kind) for p in expected
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in actual[len(expected) :])


def test_the_class_is_a_grad_scaler_of_torch() -> None:
    assert issubclass(amp_ext.GradScaler, TorchScaler)
    assert amp_ext.GradScaler.__name__ == "GradScaler"
    assert not {"__bool__", "__len__"} & set(dir(amp_ext.GradScaler))


def test_the_values_of_a_new_scaler_are_torchs() -> None:
    scaler = amp_ext.GradScaler("cpu")
    assert scaler.state_dict() == {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    assert scaler.is_enabled() is True
    assert scaler._device == "cpu"
    assert set(vars(TorchScaler("cpu"))) <= set(vars(scaler))


def test_all_arguments_may_be_positional() -> None:
    scaler = amp_ext.GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert list(scaler.state_dict().values()) == [8.0, 3.0, 0.25, 7, 0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"growth_factor": 1.0}, id="growth-of-one"),
        pytest.param({"growth_factor": 0.5}, id="growth-below-one"),
        pytest.param({"backoff_factor": 1.0}, id="backoff-of-one"),
        pytest.param({"backoff_factor": 1.5}, id="backoff-above-one"),
    ],
)
def test_bad_factors_are_refused_as_in_torch(options: dict[str, float]) -> None:
    expected = outcome(lambda: TorchScaler("cpu", **options))
    assert expected[0] is AssertionError
    assert outcome(lambda: amp_ext.GradScaler("cpu", **options)) == expected
    assert not amp_ext.GradScaler("cpu", **options, enabled=False).is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_default_device_without_cuda_warns_and_disables() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = amp_ext.GradScaler()
    assert not scaler.is_enabled()
    assert amp_ext.GradScaler("xpu").is_enabled()


# scale


def test_the_scale_is_created_by_the_first_output(device) -> None:
    scaler = amp_ext.GradScaler(device.type, init_scale=0.1)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler.get_scale() == 0.1
    scaler.scale([])
    scaler.scale(())
    scaler.scale(iter([torch.ones((), device=device)]))
    assert scaler._scale is None
    scaler.scale(torch.ones((), device=device))
    assert described(scaler._scale) == described(torch.tensor(0.1, device=device))
    assert described(scaler._growth_tracker) == described(
        torch.tensor(0, dtype=torch.int32, device=device)
    )
    assert scaler.get_scale() == torch.tensor(0.1).item()


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(lambda: torch.tensor(1.5), id="tensor"),
        pytest.param(lambda: torch.tensor(1.5, dtype=torch.float16), id="half-scalar"),
        pytest.param(lambda: torch.ones(3, dtype=torch.bfloat16), id="bfloat16-vector"),
        pytest.param(lambda: torch.ones(2, 2, dtype=torch.float64), id="double"),
        pytest.param(lambda: torch.tensor([1, 2]), id="integers"),
        pytest.param(lambda: torch.empty(0), id="empty-tensor"),
        pytest.param(lambda: torch.tensor(float("inf")), id="inf"),
        pytest.param(lambda: [], id="empty-list"),
        pytest.param(lambda: [torch.ones(2), torch.zeros(())], id="list"),
        pytest.param(lambda: (torch.ones(2), [torch.ones(1), (torch.ones(3),)]), id="nested"),
        pytest.param(lambda: 3.0, id="number"),
        pytest.param(lambda: None, id="none"),
        pytest.param(lambda: [torch.ones(2), 3.0], id="list-with-a-number"),
    ],
)
def test_outputs_are_scaled_as_by_torch(outputs: Callable[[], Any]) -> None:
    actual = outcome(lambda: amp_ext.GradScaler("cpu", init_scale=3.0).scale(outputs()))
    expected = outcome(lambda: TorchScaler("cpu", init_scale=3.0).scale(outputs()))
    assert described(actual) == described(expected)


def test_other_iterables_give_a_lazy_map(device) -> None:
    scaler = amp_ext.GradScaler(device.type, init_scale=3.0)
    scaled = scaler.scale(torch.full((), float(value), device=device) for value in (1, 2))
    assert isinstance(scaled, map)
    assert [output.item() for output in scaled] == [3, 6]


def test_the_gradient_flows_and_the_output_is_untouched(device) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    output = leaf * 2
    scaled = amp_ext.GradScaler(device.type, init_scale=8.0).scale(output)
    scaled.sum().backward()
    assert output.tolist() == [2, 2, 2]
    assert leaf.grad.tolist() == [16, 16, 16]


@pytest.mark.parametrize("name", ["unscale_", "step", "_check_inf_per_device", "update"])
def test_calls_before_the_first_scale_raise_torchs_error(name: str) -> None:
    arguments = () if name == "update" else (with_grads(torch.ones(3)),)
    expected = outcome(lambda: getattr(TorchScaler("cpu"), name)(*arguments))
    assert expected[0] is AssertionError
    assert outcome(lambda: getattr(amp_ext.GradScaler("cpu"), name)(*arguments)) == expected


# unscale_


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda base: base,
    lambda base: base.view(6, 10).t(),
    lambda base: base[1::2],
    lambda base: base[1:],
    lambda base: base.view(6, 10)[1:5, 2:9],
    lambda base: base.view(2, 5, 3, 2).permute(0, 3, 1, 2),
    lambda base: base.view(2, 5, 3, 2)[:, ::2].permute(3, 1, 0, 2),
    lambda base: base[3],
    lambda base: base[:0],
]


@pytest.mark.parametrize("scale", [4.0, 3.0, 0.1, 1e30], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_of_any_layout_are_multiplied_by_the_rounded_inverse(
    dtype: torch.dtype, scale: float, device
) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inverse = (1.0 / torch.tensor(scale).double()).float().to(device, wide)
    bases = [torch.randn(60, device=device).to(dtype) for _ in LAYOUTS]
    wanted = [base.clone() for base in bases]
    params = []
    for view, base, target in zip(LAYOUTS, bases, wanted, strict=True):
        params.append(Parameter(torch.zeros_like(view(base))))
        params[-1].grad = view(base)
        view(target).copy_((view(target).to(wide) * inverse).to(dtype))
    optimizer = torch.optim.SGD(params)
    scaler = ready(amp_ext.GradScaler, device, init_scale=scale)
    scaler.unscale_(optimizer)
    assert all(map(same_bits, bases, wanted))
    assert recorded(scaler, optimizer) == [0.0]


def test_parameters_of_several_dtypes_share_one_verdict() -> None:
    for bad in range(4):
        grads = [torch.ones(5, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)]
        if bad < 3:
            grads[bad][2] = float("nan")
        optimizer = with_grads(*grads)
        scaler = ready(amp_ext.GradScaler)
        scaler.unscale_(optimizer)
        assert recorded(scaler, optimizer) == [float(bad < 3)]
        assert all(grad[0].item() == 0.25 for grad in grads_of(optimizer))


def test_gradients_are_unscaled_in_place_and_not_replaced(device) -> None:
    optimizer = with_grads(torch.ones(3, device=device), torch.ones(2, 2, device=device))
    before = grads_of(optimizer)
    ready(amp_ext.GradScaler, device).unscale_(optimizer)
    assert all(now is then for now, then in zip(grads_of(optimizer), before, strict=True))


def test_parameters_without_a_gradient_are_passed_over(device) -> None:
    optimizer = with_grads(*(torch.full((2,), 4.0, device=device) for _ in range(3)))
    params_of(optimizer)[1].grad = None
    scaler = ready(amp_ext.GradScaler, device)
    scaler.step(optimizer)
    assert [param.tolist() for param in params_of(optimizer)] == [[0.5] * 2, [1.0] * 2, [0.5] * 2]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_scaler_whose_only_gradients_are_empty_records_no_overflow(
    make: MakeOptimizer, device
) -> None:
    optimizer = with_grads(torch.empty(0, device=device), make=make)
    scaler = ready(amp_ext.GradScaler, device, growth_interval=1)
    scaler.step(optimizer)
    assert recorded(scaler, optimizer) == [0.0]
    scaler.update()
    assert scaler.get_scale() == 8


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_are_unscaled(device) -> None:
    param = Parameter(torch.full((3,), 2.0, device=device))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = ready(amp_ext.GradScaler, device)
    scaler.scale((param**2).sum()).backward(create_graph=True)
    assert param.grad.requires_grad
    scaler.step(optimizer)
    assert param.tolist() == [0, 0, 0]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_fp16_gradients_are_refused_and_nothing_is_written(
    make: MakeOptimizer, call: str, device
) -> None:
    grads = [torch.ones(3, device=device), torch.ones(3, dtype=torch.float16, device=device)]
    optimizer = with_grads(*grads, make=make)
    if call == "step":
        optimizer._step_supports_amp_scaling = False
    scaler = ready(amp_ext.GradScaler, device)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients"):
        getattr(scaler, call)(optimizer)
    assert all(map(same_bits, grads_of(optimizer), grads))
    assert all(torch.equal(param, torch.ones_like(param)) for param in params_of(optimizer))
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@pytest.mark.parametrize("make", OUR_OPTIMIZERS)
@pytest.mark.parametrize("bad", [False, True], ids=["clean", "overflow"])
def test_step_of_our_optimizers_takes_fp16_gradients(
    make: MakeOptimizer, bad: bool, device
) -> None:
    grad = torch.full((5,), 4.0, dtype=torch.float16, device=device)
    grad[4] = float("inf") if bad else 4.0
    optimizer = with_grads(grad, make=make)
    scaler = ready(amp_ext.GradScaler, device)
    scaler.step(optimizer)
    assert params_of(optimizer)[0].tolist() == pytest.approx([1.0 if bad else 0.5] * 5)
    scaler.update()
    assert scaler.get_scale() == (2 if bad else 4)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1.0, 2.0, 4.0], id="clean"),
        pytest.param([1.0, float("inf"), 4.0], id="inf"),
        pytest.param([3e38, 1.0, 3e38], id="sum-of-duplicates-overflows"),
        pytest.param([4e4, 1.0, 4e4], id="sum-overflows-in-half"),
        pytest.param([], id="no-values"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", ["unscale_", "step", "_check_inf_per_device"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_of_torchs_sgd_are_treated_as_by_torch(
    call: str, dtype: torch.dtype, values: list[float]
) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        param = Parameter(torch.ones(4, dtype=dtype))
        rows = [[2, 0, 2][: len(values)]]
        param.grad = torch.sparse_coo_tensor(rows, torch.tensor(values, dtype=dtype), (4,))
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler = ready(scaler_class)
        raised = outcome(lambda: getattr(scaler, call)(optimizer))[1]
        first_sentence = raised.split(".")[0]
        return first_sentence, described(param), described(param.grad), recorded(scaler, optimizer)

    assert repr(run(amp_ext.GradScaler)) == repr(run(TorchScaler))


class Wrapped(Tensor):
    """A subclass whose operations are torch's, as those of a sharded tensor are its own."""


@pytest.mark.parametrize("call", ["unscale_", "step", "_check_inf_per_device"])
@pytest.mark.parametrize("value", [4.0, float("inf")], ids=["clean", "overflow"])
def test_gradients_of_a_tensor_subclass_are_treated_as_by_torch(
    call: str, value: float, device
) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        param = Parameter(torch.ones(3, device=device))
        param.grad = torch.full((3,), value, device=device).as_subclass(Wrapped)
        optimizer, scaler = torch.optim.SGD([param], lr=0.5), ready(scaler_class, device)
        getattr(scaler, call)(optimizer)
        return described([param, param.grad]), type(param.grad), recorded(scaler, optimizer)

    assert run(amp_ext.GradScaler) == run(TorchScaler)


def test_expanded_gradients_are_read_but_not_written(device) -> None:
    param = Parameter(torch.ones(5, device=device))
    param.grad = torch.full((1,), 4.0, device=device).expand(5)
    scaler = ready(amp_ext.GradScaler, device)
    with pytest.raises(RuntimeError):
        scaler.unscale_(torch.optim.SGD([param]))
    assert param.grad.tolist() == [4.0] * 5
    scaler.step(amp_ext.optim.SGD([param], lr=0.5))
    assert param.tolist() == [0.5] * 5


# _check_inf_per_device


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_check_never_writes_a_gradient(make: MakeOptimizer, dtype: torch.dtype, device) -> None:
    values = torch.tensor([-0.0, 1e-40, 6e-8, 1.0, float("inf"), float("nan")]).to(dtype)
    grads = [values.repeat(9).to(device), torch.ones(3, dtype=dtype, device=device)]
    optimizer = with_grads(*grads, make=make)
    versions = [grad._version for grad in grads_of(optimizer)]
    scaler = ready(amp_ext.GradScaler, device, init_scale=3.0)
    found = scaler._check_inf_per_device(optimizer)
    assert [value.item() for value in found.values()] == [1.0]
    assert found is scaler._found_inf_per_device(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert all(map(same_bits, grads_of(optimizer), grads))
    assert [grad._version for grad in grads_of(optimizer)] == versions


READ_ONLY = """
import mmap, sys
import torch, amp_ext
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
param = torch.nn.Parameter(torch.ones(20_000))
param.grad = torch.frombuffer(pages, dtype=torch.float32)
scaler = amp_ext.GradScaler("cpu", init_scale=4.0)
scaler.scale(torch.ones(()))
kinds = (torch.optim.SGD, amp_ext.optim.SGD, amp_ext.optim.Adam)
optimizers = [kind([param], lr=0.25) for kind in kinds]
for optimizer in optimizers:
    found = scaler._check_inf_per_device(optimizer)
    assert [value.item() for value in found.values()] == [0.0]
for optimizer in optimizers[1:]:
    scaler.step(optimizer)
scaler.update()
assert (param.sum().item(), scaler.get_scale()) == (10_000.0, 4.0)
"""


def test_gradients_in_memory_that_cannot_be_written_are_checked_and_stepped(
    tmp_path: Path,
) -> None:
    """A write of any kind, even of the same bits, would end the child with a signal."""
    file = tmp_path / "read_only"
    file.write_bytes(struct.pack("f", 4.0) * 20_000)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_ONLY, file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.parametrize("make", OUR_OPTIMIZERS)
@pytest.mark.parametrize("value", [4.0, float("inf")], ids=["clean", "overflow"])
def test_a_step_of_our_optimizers_leaves_the_gradients_scaled(
    make: MakeOptimizer, value: float, device
) -> None:
    grads = [torch.full((5,), value, device=device), torch.ones(3, device=device)]
    optimizer = with_grads(*grads, make=make)
    ready(amp_ext.GradScaler, device).step(optimizer)
    assert all(map(same_bits, grads_of(optimizer), grads))


# Order of calls


def perform(name: str, scaler: TorchScaler, optimizer: torch.optim.Optimizer) -> Any:
    if name == "copy":
        return copy.deepcopy(scaler)
    if name == "overflow":
        return grads_of(optimizer)[1].fill_(float("inf")).tolist()
    if name == "scale":
        return scaler.scale(torch.ones(())).item()
    return scaler.update() if name == "update" else getattr(scaler, name)(optimizer)


def run_calls(
    scaler_class: type[TorchScaler], make: MakeOptimizer, calls: tuple[str, ...]
) -> list[Any]:
    """Makes calls one after another and logs the outcome of each and all that it changed."""
    optimizer = with_grads(torch.full((3,), 4.0), torch.full((2,), -8.0), make=make)
    scaler, log = ready(scaler_class, growth_interval=2), []
    for name in calls:
        seen = outcome(functools.partial(perform, name, scaler, optimizer))
        if isinstance(seen[0], TorchScaler):
            scaler, seen = seen[0], ("a copy", "")
        tensors = described([params_of(optimizer), grads_of(optimizer)])
        log.append((name, seen, scaler.state_dict(), tensors))
    return log


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_order_of_four_calls_does_what_it_does_in_torch(make: MakeOptimizer) -> None:
    names = ("unscale_", "step", "update", "overflow", "scale", "copy")
    for calls in itertools.product(names, repeat=4):
        actual = run_calls(amp_ext.GradScaler, make, calls)
        expected = run_calls(TorchScaler, make, calls)
        assert repr(actual) == repr(expected), calls


@pytest.mark.parametrize(
    ("calls", "kind", "text"),
    [
        (
            "unscale_ unscale_",
            RuntimeError,
            "unscale_() has already been called on this optimizer since the last update().",
        ),
        ("step unscale_", RuntimeError, "unscale_() is being called after step()."),
        ("step step", RuntimeError, "step() has already been called since the last update()."),
        ("update", AssertionError, "No inf checks were recorded prior to update."),
        ("step update update", AssertionError, "No inf checks were recorded prior to update."),
        ("step update step update unscale_ step", None, ""),
    ],
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_call_out_of_order_says_so(
    make: MakeOptimizer, calls: str, kind: type[Exception] | None, text: str
) -> None:
    log = run_calls(amp_ext.GradScaler, make, tuple(calls.split()))
    assert log[-1][1] == (kind, text)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_without_any_gradient_is_treated_as_by_torch(make: MakeOptimizer, device) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        optimizer = make([Parameter(torch.ones(3, device=device))])
        scaler = ready(scaler_class, device)
        seen = outcome(lambda: scaler.step(optimizer)), outcome(scaler.update)
        return seen, described(params_of(optimizer))

    actual = run(amp_ext.GradScaler)
    assert actual == run(TorchScaler)
    assert actual[0][1] == (AssertionError, "No inf checks were recorded prior to update.")


# step


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("value", [4.0, float("nan")], ids=["clean", "overflow"])
def test_the_step_that_is_called_is_the_one_on_the_instance(
    make: MakeOptimizer, value: float, device
) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        optimizer = with_grads(torch.full((3,), value, device=device), make=make)
        original, calls = optimizer.step, []

        def patched(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> str:
            attributes = {name: getattr(self, name, "none") for name in ("grad_scale", "found_inf")}
            calls.append((args, kwargs, described(attributes)))
            original(*args, **kwargs)
            return "returned"

        optimizer.step = MethodType(patched, optimizer)
        returned = ready(scaler_class, device).step(optimizer)
        leftovers = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
        return returned, calls, leftovers, described(params_of(optimizer))

    actual = run(amp_ext.GradScaler)
    assert actual == run(TorchScaler)
    supports_scaling = getattr(
        make([Parameter(torch.ones(1))]), "_step_supports_amp_scaling", False
    )
    assert len(actual[1]) == (value == 4 or supports_scaling)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_scale_set_on_the_optimizer_beforehand_joins_the_product(
    make: MakeOptimizer, device
) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        grads = [torch.tensor([8.0, -16.0, 1e-3], device=device)]
        optimizer = with_grads(*grads, make=make)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = torch.full((), 2.0, device=device)
        scaler = ready(scaler_class, device)
        scaler.step(optimizer)
        return described(params_of(optimizer))

    assert run(amp_ext.GradScaler) == run(TorchScaler)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("closure", [None, lambda: torch.ones(())], ids=["none", "function"])
def test_a_closure_by_keyword_is_refused(make: MakeOptimizer, closure: Any) -> None:
    optimizer = with_grads(torch.ones(3), make=make)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        amp_ext.GradScaler("cpu").step(optimizer, closure=closure)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_positional_arguments_are_handed_on(make: MakeOptimizer) -> None:
    optimizer = with_grads(torch.ones(3), make=make)
    assert ready(amp_ext.GradScaler).step(optimizer, lambda: "the loss") == "the loss"


class TakesTheScaler(torch.optim.SGD):
    """An optimizer of the older protocol, which asks the scaler itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: TorchScaler | None = None) -> str:
        found = grad_scaler._check_inf_per_device(self)
        if sum(value.item() for value in found.values()) == 0:
            super().step()
        return "returned"


@pytest.mark.parametrize("value", [4.0, float("inf")], ids=["clean", "overflow"])
def test_an_optimizer_that_takes_the_scaler_gets_it(value: float, device) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        optimizer = with_grads(
            torch.full((3,), value, device=device), make=lambda params: TakesTheScaler(params, 0.5)
        )
        scaler = ready(scaler_class, device)
        with pytest.warns(FutureWarning, match="stop passing itself"):
            returned = scaler.step(optimizer)
        scaler.update()
        return returned, described(params_of(optimizer)), scaler.state_dict()

    assert run(amp_ext.GradScaler) == run(TorchScaler)


@pytest.mark.parametrize("value", [4.0, float("inf")], ids=["clean", "overflow"])
@pytest.mark.parametrize("supports_scaling", [False, True])
def test_anything_with_param_groups_and_a_step_is_an_optimizer(
    value: float, supports_scaling: bool, device
) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        inner = with_grads(torch.full((3,), value, device=device))
        wrapper = SimpleNamespace(param_groups=inner.param_groups, step=lambda: "stepped")
        wrapper._step_supports_amp_scaling = supports_scaling
        scaler = ready(scaler_class, device)
        returned = scaler.step(wrapper)
        scaler.update()
        return returned, scaler.state_dict(), described(grads_of(inner))

    assert run(amp_ext.GradScaler) == run(TorchScaler)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_learning_rate_schedule_is_followed_without_a_warning(
    make: MakeOptimizer, device
) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        optimizer = with_grads(torch.full((3,), 4.0, device=device), make=make)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        scaler = ready(scaler_class, device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                grads_of(optimizer)[0].fill_(4.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
        return described(params_of(optimizer))

    assert run(amp_ext.GradScaler) == run(TorchScaler)


@pytest.mark.parametrize("make", OUR_OPTIMIZERS)
def test_step_and_update_do_not_wait_for_the_device(make: MakeOptimizer, device) -> None:
    if device.type != "cuda":
        pytest.skip("only CUDA tells of a wait")
    optimizer = with_grads(torch.full((3,), 4.0, device=device), make=make)
    scaler = ready(amp_ext.GradScaler, device)
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaler.step(optimizer)
        scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# update


@pytest.mark.parametrize(
    "new_scale",
    [
        pytest.param(lambda device: 12.0, id="float"),
        pytest.param(lambda device: 12, id="int"),
        pytest.param(lambda device: torch.tensor(12.0, device=device), id="tensor"),
        pytest.param(lambda device: torch.tensor([12.0], device=device), id="one-element-vector"),
        pytest.param(lambda device: torch.tensor([[12.0]], device=device), id="matrix"),
        pytest.param(lambda device: torch.tensor(12, device=device), id="integer-tensor"),
        pytest.param(
            lambda device: torch.tensor(12.0, dtype=torch.float16, device=device), id="half"
        ),
        pytest.param(
            lambda device: torch.tensor(12.0, dtype=torch.float64, device=device), id="double"
        ),
    ],
)
@pytest.mark.parametrize("value", [1.0, float("inf")], ids=["clean", "overflow"])
def test_a_new_scale_replaces_the_update(
    new_scale: Callable[[Any], Any], value: float, device
) -> None:
    optimizer = with_grads(torch.full((3,), value, device=device))
    scaler = ready(amp_ext.GradScaler, device)
    scaler._growth_tracker.fill_(5)
    scale, given = scaler._scale, new_scale(device)
    scaler.step(optimizer)
    scaler.update(given)
    if isinstance(given, Tensor):
        given.fill_(99)
    assert scaler._scale is scale
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (12, 5)
    scaler.unscale_(optimizer)


def test_a_new_scale_needs_no_checks() -> None:
    scaler = ready(amp_ext.GradScaler)
    scaler.update(2.5)
    assert scaler.get_scale() == 2.5


@pytest.mark.parametrize(
    "new_scale",
    [
        pytest.param(torch.ones(2), id="two-elements"),
        pytest.param(torch.ones(0), id="no-element"),
        pytest.param(torch.ones((), requires_grad=True), id="requires-grad"),
        pytest.param(torch.ones((), device="meta"), id="another-device"),
    ],
)
def test_a_bad_new_scale_is_refused_as_in_torch(new_scale: Tensor) -> None:
    expected = outcome(lambda: ready(TorchScaler).update(new_scale))
    assert expected[0] is AssertionError
    scaler = ready(amp_ext.GradScaler)
    assert outcome(lambda: scaler.update(new_scale)) == expected
    assert scaler.get_scale() == 4


def test_growth_comes_when_the_counter_equals_the_interval(device) -> None:
    optimizer = with_grads(torch.ones(3, device=device))
    scaler, scales = ready(amp_ext.GradScaler, device, growth_interval=3), []
    for _ in range(7):
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4, 4, 8, 8, 8, 16, 16]
    scaler._growth_tracker.fill_(3)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16, 4)


def test_the_scale_never_grows_to_inf(device) -> None:
    optimizer = with_grads(torch.zeros(3, device=device))
    scaler = ready(amp_ext.GradScaler, device, init_scale=2.0**126, growth_interval=1)
    for _ in range(4):
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0**127, 0)


@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_any_number_of_overflowing_optimizers_is_one_backoff(bad: list[int], device) -> None:
    makes = [OPTIMIZERS[0].values[0], OPTIMIZERS[1].values[0], OPTIMIZERS[3].values[0]]
    optimizers = [with_grads(torch.ones(3, device=device), make=make) for make in makes]
    for index in bad:
        grads_of(optimizers[index])[0][1] = float("inf")
    scaler = ready(amp_ext.GradScaler, device)
    scaler.unscale_(optimizers[0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2
    changed = [bool((params_of(optimizer)[0] != 1).any()) for optimizer in optimizers]
    assert changed == [index not in bad for index in range(3)]


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_scale_and_the_counter_stay_where_they_are(shape: tuple[int, ...], device) -> None:
    optimizer = with_grads(torch.ones(3, device=device))
    scaler = ready(amp_ext.GradScaler, device, growth_interval=2)
    tensors = scaler._scale, scaler._growth_tracker
    addresses = [tensor.data_ptr() for tensor in tensors]
    for found_inf in (0, 0, 1, 0):
        scaler.step(optimizer)
        set_recorded(scaler, optimizer, found_inf)
        scaler.update()
    scaler.update(torch.full(shape, 16.0, device=device))
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    assert scaler._scale is tensors[0]
    assert scaler._growth_tracker is tensors[1]
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert [tensor.item() for tensor in tensors] == [32, 1]


def test_any_walk_through_updates_and_setters_is_torchs(device) -> None:
    def walk(scaler_class: type[TorchScaler]) -> list[dict[str, Any]]:
        draw = random.Random(1)
        optimizer = with_grads(torch.ones(3, device=device))
        scaler, log = ready(scaler_class, device, init_scale=0.1, growth_interval=2), []
        for _ in range(300):
            kind = draw.randrange(12)
            if kind == 0:
                scaler.set_growth_interval(draw.randrange(1, 5))
            elif kind == 1:
                scaler.set_growth_factor(draw.uniform(1.1, 3))
            elif kind == 2:
                scaler.set_backoff_factor(draw.uniform(0.1, 0.9))
            elif kind == 3:
                scaler.update(draw.uniform(1, 1e6))
            else:
                scaler.step(optimizer)
                set_recorded(scaler, optimizer, draw.choice([0, 0, 0, 1]))
                scaler.update()
            log.append(scaler.state_dict())
        return log

    assert walk(amp_ext.GradScaler) == walk(TorchScaler)


def test_after_an_overflow_the_scale_is_strictly_smaller(device) -> None:
    optimizer = with_grads(torch.full((3,), float("nan"), device=device))
    scaler = ready(amp_ext.GradScaler, device, init_scale=3.0)
    for _ in range(120):
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < before


# A scale that has no finite inverse


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("scale", [0.0, 1e-39], ids=str)
@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale-step"])
def test_parameters_never_become_nan_at_a_scale_without_an_inverse(
    make: MakeOptimizer, scale: float, unscale_first: bool, device
) -> None:
    param = Parameter(torch.ones(3, device=device))
    optimizer = make([param])
    scaler = amp_ext.GradScaler(device.type, init_scale=scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            before = scaler.get_scale()
            optimizer.zero_grad()
            scaler.scale((param * 2).sum()).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            assert recorded(scaler, optimizer) == [1.0]
            scaler.update()
            assert scaler.get_scale() == 0 or scaler.get_scale() < before
    assert param.tolist() == [1, 1, 1]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [False, True], ids=["step", "unscale-step"])
def test_a_scale_without_an_inverse_warns_once(make: MakeOptimizer, unscale_first: bool) -> None:
    optimizer = with_grads(torch.zeros(3), make=make)
    scaler = ready(amp_ext.GradScaler, init_scale=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert ["scale" in str(warning.message) for warning in caught] == [True]


def test_a_usual_scale_does_not_warn(device) -> None:
    optimizer = with_grads(torch.full((3,), float("inf"), device=device))
    scaler = ready(amp_ext.GradScaler, device, init_scale=1e-38)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
        scaler.update()


# Private names that clients read and write


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("how", ["fill", "replace", "replace-by-vector"])
def test_a_scale_set_from_outside_is_the_scale(make: MakeOptimizer, how: str, device) -> None:
    grad = torch.tensor([16.0, -8.0], device=device)
    optimizer = with_grads(grad, make=make)
    scaler = ready(amp_ext.GradScaler, device, growth_interval=1)
    if how == "fill":
        scaler._scale.fill_(16.0)
    else:
        shape = (1,) if how == "replace-by-vector" else ()
        scaler._scale = torch.full(shape, 16.0, device=device)
    assert scaler.get_scale() == 16
    assert scaler.scale(torch.ones((), device=device)).item() == 16
    scaler.step(optimizer)
    expected = with_grads(grad / 16, make=make)
    expected.step()
    assert torch.equal(params_of(optimizer)[0], params_of(expected)[0])
    scaler.update()
    assert (scaler.get_scale(), scaler._scale.item()) == (32, 32)


def test_a_counter_and_factors_set_from_outside_are_used(device) -> None:
    optimizer = with_grads(torch.ones(3, device=device))
    scaler = ready(amp_ext.GradScaler, device)
    scaler._growth_tracker = torch.full((), 6, dtype=torch.int32, device=device)
    scaler._growth_factor, scaler._growth_interval, scaler._backoff_factor = 3.0, 7, 0.25
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._growth_tracker.item()) == (12, 0)
    scaler.step(optimizer)
    set_recorded(scaler, optimizer, 1)
    scaler.update()
    assert scaler.get_scale() == 3


@pytest.mark.parametrize("make", [OPTIMIZERS[0], *OUR_OPTIMIZERS])
@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("how", ["edited", "replaced", "replaced-by-vector", "assigned"])
def test_found_inf_edited_between_unscale_and_step_decides(
    make: MakeOptimizer, how: str, value: float, device
) -> None:
    optimizer = with_grads(torch.ones(3, device=device), make=make)
    scaler = ready(amp_ext.GradScaler, device, growth_interval=1)
    found_inf = torch.full((1,) if how == "replaced-by-vector" else (), value, device=device)
    if how == "assigned":
        scaler._per_optimizer_states[id(optimizer)] = {
            "stage": OptState.UNSCALED,
            "found_inf_per_device": {device: found_inf},
        }
    else:
        scaler.unscale_(optimizer)
        if how == "edited":
            set_recorded(scaler, optimizer, value)
        else:
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            found.update(dict.fromkeys(found, found_inf))
    scaler.step(optimizer)
    assert bool((params_of(optimizer)[0] == 1).all()) == (value != 0)
    scaler.update()
    assert scaler.get_scale() == (2 if value else 8)


def test_an_overflow_that_is_edited_away_is_stepped(device) -> None:
    optimizer = with_grads(torch.tensor([4.0, float("inf")], device=device))
    scaler = ready(amp_ext.GradScaler, device)
    scaler.unscale_(optimizer)
    set_recorded(scaler, optimizer, 0)
    scaler.step(optimizer)
    assert params_of(optimizer)[0].tolist() == [0.5, float("-inf")]


def test_per_optimizer_states_may_be_assigned(device) -> None:
    optimizer = with_grads(torch.ones(3, device=device))
    scaler = ready(amp_ext.GradScaler, device)
    scaler.step(optimizer)
    other = ready(TorchScaler, device)
    scaler._per_optimizer_states = other._per_optimizer_states
    scaler.step(optimizer)
    scaler._per_optimizer_states.clear()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    pickle.dumps(scaler)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("how", ["subclass", "instance", "patched-class"])
def test_an_override_of_unscale_grads_is_what_runs(
    make: MakeOptimizer, how: str, device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def override(
        self: TorchScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        calls.append((inv_scale.item(), found_inf.item(), allow_fp16))
        found = super(amp_ext.GradScaler, self)._unscale_grads_(
            optimizer, inv_scale, found_inf, True
        )
        return {key: value + 1 for key, value in found.items()}

    if how == "patched-class":
        monkeypatch.setattr(amp_ext.GradScaler, "_unscale_grads_", override)
        scaler = ready(amp_ext.GradScaler, device)
    elif how == "subclass":
        overridden = type("Mine", (amp_ext.GradScaler,), {"_unscale_grads_": override})
        scaler = ready(overridden, device)
    else:
        scaler = ready(amp_ext.GradScaler, device)
        scaler._unscale_grads_ = MethodType(override, scaler)
    optimizer = with_grads(torch.ones(3, device=device), make=make)
    scaler._check_inf_per_device(optimizer)
    assert recorded(scaler, optimizer) == [1.0]
    scaler.step(optimizer)
    assert params_of(optimizer)[0].tolist() == [1, 1, 1]
    scaler.update()
    assert scaler.get_scale() == 2
    scaler.unscale_(optimizer)
    read_only = getattr(optimizer, "_step_supports_amp_scaling", False)
    assert calls[0] == (1.0, 0.0, True)
    assert calls[1] == ((1.0, 0.0, True) if read_only else (0.25, 0.0, False))
    assert calls[2:] == [(0.5, 0.0, False)]


def test_a_subclass_may_allow_fp16_gradients(device) -> None:
    class AllowsHalf(amp_ext.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    optimizer = with_grads(torch.full((3,), 4.0, dtype=torch.float16, device=device))
    ready(AllowsHalf, device).unscale_(optimizer)
    assert grads_of(optimizer)[0].tolist() == [1, 1, 1]


def test_an_override_of_the_call_of_step_is_what_runs(device) -> None:
    class Never(amp_ext.GradScaler):
        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            return sorted(optimizer_state), args, kwargs

    optimizer = with_grads(torch.ones(3, device=device))
    returned = ready(Never, device).step(optimizer, None, more=1)
    assert returned == (["found_inf_per_device", "stage"], (None,), {"more": 1})
    assert params_of(optimizer)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("make", OUR_OPTIMIZERS)
def test_an_override_of_the_check_is_what_step_calls(make: MakeOptimizer, device) -> None:
    class SumsOverRanks(amp_ext.GradScaler):
        def _check_inf_per_device(self, optimizer):
            found = super()._check_inf_per_device(optimizer)
            for value in found.values():
                value.mul_(3)
            return found

    for value, expected in ((float("inf"), 1.0), (4.0, 0.5)):
        optimizer = with_grads(torch.full((3,), value, device=device), make=make)
        ready(SumsOverRanks, device).step(optimizer)
        assert params_of(optimizer)[0].tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("value", [1.0, float("inf")], ids=["clean", "overflow"])
def test_unscale_grads_may_be_called_directly(shape: tuple[int, ...], value: float, device) -> None:
    def run(scaler_class: type[TorchScaler]) -> Any:
        grads = torch.full((3,), value, device=device), torch.ones(0, device=device)
        optimizer = with_grads(*grads)
        inv_scale, found_inf = (torch.full(shape, v, device=device) for v in (0.5, 0.0))
        found = scaler_class(device.type)._unscale_grads_(optimizer, inv_scale, found_inf, False)
        return described([found, found_inf, inv_scale, grads_of(optimizer)])

    assert run(amp_ext.GradScaler) == run(TorchScaler)


# State dict, pickle, copy


def test_state_dicts_travel_between_ours_and_torchs_through_a_file() -> None:
    ours = ready(amp_ext.GradScaler, init_scale=0.1, growth_factor=3.0, growth_interval=5)
    for target, source in ((ready(TorchScaler), ours), (amp_ext.GradScaler("cpu"), None)):
        source = source or ready(TorchScaler, init_scale=7.0, backoff_factor=0.25)
        source._growth_tracker.fill_(2)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True))
        assert target.state_dict() == source.state_dict()
        target.scale(torch.ones(()))
        assert described([target._scale, target._growth_tracker]) == described(
            [source._scale, source._growth_tracker]
        )
    assert list(ours.state_dict()) == list(TorchScaler("cpu").state_dict())
    assert {type(value) for value in ours.state_dict().values()} == {float, int}


def test_a_loaded_scaler_goes_on_as_the_saved_one(device) -> None:
    scaler = ready(amp_ext.GradScaler, device, growth_interval=3)
    optimizer = with_grads(torch.ones(3, device=device))
    scaler.step(optimizer)
    scaler.update()
    loaded = amp_ext.GradScaler(device.type)
    loaded.load_state_dict(scaler.state_dict() | {"of_a_later_version": 1})
    loaded.scale(torch.ones((), device=device))
    for _ in range(2):
        loaded.step(optimizer)
        loaded.update()
    assert loaded.get_scale() == 8


@pytest.mark.parametrize("missing", [*TorchScaler("cpu").state_dict(), "everything"])
def test_an_incomplete_state_dict_is_refused_as_in_torch(missing: str) -> None:
    state = TorchScaler("cpu").state_dict()
    state = {} if missing == "everything" else {k: v for k, v in state.items() if k != missing}
    expected = outcome(lambda: ready(TorchScaler).load_state_dict(state))
    assert expected[0] in (KeyError, RuntimeError)
    assert outcome(lambda: ready(amp_ext.GradScaler).load_state_dict(state)) == expected


@pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(lambda scaler: pickle.loads(pickle.dumps(scaler)), id="pickle"),
        pytest.param(copy.deepcopy, id="deepcopy"),
    ],
)
def test_a_duplicate_between_iterations_goes_on_alike(
    duplicate: Callable[[TorchScaler], TorchScaler], device
) -> None:
    def run(change: Callable[[TorchScaler], TorchScaler]) -> list[Any]:
        scaler = amp_ext.GradScaler(device.type, 0.1, 3.0, 0.3, 2)
        optimizer, log = with_grads(torch.ones(3, device=device)), []
        for found_inf in (0, 0, 1, 0, 0, 1):
            scaler = change(scaler)
            scaler.scale(torch.ones((), device=device))
            scaler.step(optimizer)
            set_recorded(scaler, optimizer, found_inf)
            scaler.update()
            log.append(scaler.state_dict())
        return log

    assert run(duplicate) == run(lambda scaler: scaler)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_shares_nothing_with_the_scaler(duplicate: Callable[..., Any], device) -> None:
    scaler = ready(amp_ext.GradScaler, device)
    twin = duplicate(scaler)
    twin.scale(torch.ones((), device=device))
    twin.update(2.0)
    assert type(twin) is amp_ext.GradScaler
    assert (scaler.get_scale(), twin.get_scale()) == (4, 2)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_scaler_amid_an_iteration_cannot_be_duplicated(duplicate: Callable[..., Any]) -> None:
    scaler = ready(amp_ext.GradScaler)
    scaler.unscale_(with_grads(torch.ones(3)))
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        duplicate(scaler)
    scaler.update()
    duplicate(scaler)


# Getters, setters, the disabled scaler


def test_getters_and_setters_are_torchs() -> None:
    def run(scaler: TorchScaler) -> list[Any]:
        before = [
            scaler.get_scale(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
            scaler._get_growth_tracker(),
            scaler._get_scale_async(),
            scaler.is_enabled(),
        ]
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.125)
        scaler.set_growth_interval(17)
        return [*before, scaler.state_dict()]

    assert run(amp_ext.GradScaler("cpu", 3.0)) == run(TorchScaler("cpu", 3.0))


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_disabled_scaler_changes_nothing(make: MakeOptimizer) -> None:
    def run(scaler_class: type[TorchScaler]) -> list[Any]:
        scaler = scaler_class("cpu", enabled=False)
        optimizer = with_grads(torch.full((3,), 2.0), make=make)
        output, log = [torch.ones(2), "anything"], []
        log.append(scaler.scale(output) is output)
        log.extend(outcome(lambda: scaler.unscale_(optimizer)) for _ in range(2))
        log.append(scaler.step(optimizer, closure=lambda: "the loss"))
        log.append(scaler.step(optimizer))
        log.extend([scaler.update(), scaler.update(3.0), scaler.load_state_dict({})])
        log.extend([scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict()])
        log.append(pickle.loads(pickle.dumps(scaler)).is_enabled())
        log.append(copy.deepcopy(scaler).is_enabled())
        return [*log, described(params_of(optimizer)), described(grads_of(optimizer))]

    assert run(amp_ext.GradScaler) == run(TorchScaler)


def test_a_disabled_scaler_knows_its_options() -> None:
    """torch raises AttributeError here until a setter was called."""
    scaler = amp_ext.GradScaler("cpu", 8.0, 3.0, 0.25, 7, enabled=False)
    options = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert options == (3.0, 0.25, 7)
    assert scaler._get_scale_async() is None
    assert scaler.state_dict() == {}
