"""Tests of finding tensors with inf or NaN, and of dropping an iteration with a bad loss."""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from harness import scaler_cases as cases
from harness.edge_shapes import BF16, F16, F32, F64
from harness.rows import rows
from harness.scaler_cases import (
    INF,
    NAN,
    TorchScaler,
    filled,
    new_params,
    over,
    ready,
)
from torch import Tensor, nn
from torch.nn import Parameter

import amp_ext

DTYPES = [F32, F64, F16, BF16]


def with_clean_grads(model: nn.Module) -> Any:
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    return model


def new_model(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Returns two layers, a batch norm with its buffers and a frozen parameter."""
    layers = {"body": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 2)}
    model = nn.ModuleDict(layers)
    model.frozen = Parameter(torch.ones(5), requires_grad=False)
    return with_clean_grads(model.to(device, dtype))


@torch.no_grad()
def spoil(tensor: Tensor, *values: float) -> None:
    """Writes values over the first elements of a tensor."""
    for index, value in enumerate(values):
        tensor.view(-1)[index] = value


def holder(**tensors: Tensor) -> nn.Module:
    """Returns a module with these parameters and buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        register = module.register_parameter if tensor.requires_grad else module.register_buffer
        register(name, tensor)
    return module


def found_in_grad(grad: Tensor) -> dict[str, int]:
    param = Parameter(torch.ones_like(grad.detach().to_dense()))
    param.grad = grad
    return amp_ext.find_nonfinite(holder(grad=param))


# find_nonfinite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_gradients_of_a_model_are_counted_by_name(dtype, device):
    model = new_model(device, dtype)
    assert amp_ext.find_nonfinite(model) == {}
    spoil(model.head.weight.grad, NAN, 1.0, INF, -INF)
    spoil(model.body.bias.grad, -INF)
    found = amp_ext.find_nonfinite(model)
    assert list(found.items()) == [("body.bias", 1), ("head.weight", 3)], "in the model's order"
    assert {type(count) for count in found.values()} == {int}
    model.body.requires_grad_(False)
    assert amp_ext.find_nonfinite(model) == found, "frozen, but with a gradient"
    model.zero_grad()
    assert amp_ext.find_nonfinite(model) == {}, "no gradient"


def test_parameters_and_buffers_are_looked_at_on_request(device):
    model = new_model(device)
    spoil(model.body.weight.grad, NAN)
    spoil(model.head.bias, NAN, INF)
    spoil(model.norm.running_var, INF)
    spoil(model.frozen, NAN)
    assert amp_ext.find_nonfinite(model) == {"body.weight": 1}
    found = amp_ext.find_nonfinite(model, params=True)
    assert list(found.items()) == [("frozen", 1), ("head.bias", 2), ("norm.running_var", 1)]


def test_8_bit_buffers_are_counted_and_other_kinds_passed_over(device):
    model = holder(
        count=torch.tensor(7, device=device),
        mask=torch.ones(3, dtype=torch.bool, device=device),
        empty=torch.empty(0, device=device),
        bad=torch.full((2,), NAN, device=device),
        e4m3=torch.tensor([1.0, NAN, 448.0], device=device).to(torch.float8_e4m3fn),
        e5m2=torch.tensor([NAN, NAN, 448.0], device=device).to(torch.float8_e5m2),
    )
    assert amp_ext.find_nonfinite(model, params=True) == {"bad": 2, "e4m3": 1, "e5m2": 2}
    assert amp_ext.find_nonfinite(model) == amp_ext.find_nonfinite(nn.Module()) == {}


NAMES = [
    (None, ["group 0, param 1", "group 1, param 0"]),
    ("abc", ["b", "c"]),
    ("aba", ["b", "group 1, param 0 (a)"]),
    ("bbb", ["group 0, param 1 (b)", "group 1, param 0 (b)"]),
]


@pytest.mark.parametrize("params", [False, True], ids=["gradients", "parameters"])
@pytest.mark.parametrize(("names", "expected"), NAMES)
@over([cases.torchs_sgd, cases.our_adam])
def test_an_optimizer_names_its_parameters(make, names, expected, params, device):
    tensors = new_params(device)
    for number, tensor in enumerate(tensors):
        tensor.grad = torch.ones_like(tensor)
        spoil(tensor if params else tensor.grad, *[NAN] * number)
    params_or_pairs = list(zip(names, tensors, strict=True)) if names else tensors
    optimizer = make([{"params": params_or_pairs[:2]}, {"params": params_or_pairs[2:]}])
    found = amp_ext.find_nonfinite(optimizer, params=params)
    assert list(found.items()) == [(expected[0], 1), (expected[1], 2)]


@pytest.mark.parametrize("source", [[torch.ones(2)], torch.ones(2), None], ids=type)
def test_other_sources_are_refused(source):
    kind = type(source).__name__
    text = "find_nonfinite: source must be a torch.nn.Module or a torch.optim.Optimizer, got "
    with pytest.raises(TypeError, match=f"^{text}{kind}$"):
        amp_ext.find_nonfinite(source)


def test_tied_parameters_are_named_once(device):
    model = new_model(device)
    model.tied = nn.Linear(3, 4, device=device)
    model.tied.weight = model.body.weight
    spoil(model.body.weight.grad, NAN)
    assert amp_ext.find_nonfinite(model) == {"body.weight": 1}


SPARSE = {
    "coalesced": ([1, 3], [1.0, NAN], 1),
    "duplicates": ([1, 1, 2], [1.0, INF, INF], 2),
    "a-sum-that-overflows": ([0, 0], [3e38, 3e38], 1),
    "a-sum-that-is-nan": ([0, 0], [INF, -INF], 1),
    "empty": ([], [], 0),
}


@pytest.mark.parametrize(("indices", "values", "expected"), rows(SPARSE))
def test_sparse_gradients_are_counted(indices, values, expected, device):
    places, options = torch.tensor([indices]).long(), {"device": device, "check_invariants": True}
    grad = torch.sparse_coo_tensor(places, torch.tensor(values), (5,), **options)
    assert found_in_grad(grad) == ({"grad": expected} if expected else {})


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc], ids=str)
def test_compressed_sparse_tensors_are_counted(layout, device):
    dense = torch.tensor([[1.0, 0.0, NAN], [0.0, INF, 0.0]], device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CS[RC]")
        model = holder(compressed=dense.to_sparse(layout=layout))
    assert amp_ext.find_nonfinite(model, params=True) == {"compressed": 2}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_both_parts_of_complex_numbers_are_counted(dtype, device):
    values = [complex(NAN, 0), complex(0, INF), complex(INF, NAN), 1]
    grad = torch.tensor(values, dtype=dtype, device=device)
    assert grad.conj().is_conj()
    assert found_in_grad(grad) == found_in_grad(grad.conj()) == {"grad": 4}


# check_for_overflow


ENDINGS = [(0, ""), (2, ""), (5, ", 3 (2), 4 (2)"), (7, ", 3 (2), 4 (2) and 2 more")]


@pytest.mark.parametrize(("count", "ending"), ENDINGS)
def test_an_overflow_is_logged_with_some_names(count, ending, device, caplog):
    model = with_clean_grads(nn.ParameterList(new_params(device, 50)))
    spoil(model[49], NAN)
    for param in model[:count]:
        spoil(param.grad, NAN, INF)
    with caplog.at_level(logging.DEBUG):
        assert amp_ext.check_for_overflow(model) is (count > 0)
    names = ", ".join(f"{index} (2)" for index in range(min(count, 3)))
    text = f"check_for_overflow: inf or NaN in {names}{ending}"
    assert caplog.record_tuples == [("amp_ext", logging.WARNING, text)] * (count > 0)


# handle_nan_loss


NUMPY = [np.float32, np.float64, np.float16, np.array]
NANS = [NAN, *(kind(NAN) for kind in NUMPY), torch.tensor(NAN, requires_grad=True) * 2]
NANS += [torch.tensor(NAN), torch.tensor(NAN).half(), torch.tensor([[INF], [NAN]])]
INFS = [-INF, torch.tensor(INF), torch.tensor(-INF), torch.tensor(INF).bfloat16()]
INFS += [torch.tensor([1.0, INF, 2.0])]
BAD_LOSSES = [*itertools.product(NANS, ["NaN"]), *itertools.product(INFS, ["inf"])]


@pytest.mark.parametrize(("loss", "what"), BAD_LOSSES, ids=repr)
def test_a_bad_loss_is_told_and_logged_once(loss, what, caplog):
    with caplog.at_level(logging.DEBUG):
        assert amp_ext.handle_nan_loss(loss) is True
    text = f"handle_nan_loss: the loss is {what}; this iteration is dropped"
    assert caplog.record_tuples == [("amp_ext", logging.WARNING, text)]


GOOD_LOSSES = [torch.tensor(0.0), torch.tensor(65504.0).half(), torch.tensor([1.0, -3e38])]
GOOD_LOSSES += [torch.tensor(3), torch.empty(0), 1e308, 7, *(kind(1.0) for kind in NUMPY)]


@pytest.mark.parametrize("loss", GOOD_LOSSES, ids=repr)
@pytest.mark.parametrize("scaler_class", [amp_ext.GradScaler, TorchScaler])
def test_a_good_loss_changes_nothing(loss, scaler_class, caplog):
    optimizer, scaler = filled(4.0), ready(scaler_class=scaler_class)
    scaler.unscale_(optimizer)
    (grad,) = cases.grads_of(optimizer)
    with caplog.at_level(logging.DEBUG):
        assert amp_ext.handle_nan_loss(loss, optimizer, scaler=scaler) is False
    assert not caplog.records
    assert cases.grads_of(optimizer)[0] is grad
    assert grad.tolist() == [1.0] * 3
    scaler.step(optimizer)
    scaler.update()


NOT_TAKEN = {
    "none": ([None], "loss must be a tensor or a number, got NoneType$"),
    "list": ([[NAN]], "loss must be a tensor or a number, got list$"),
    "complex": ([1j], "loss must be a tensor or a number, got complex$"),
    "scaler": (
        [NAN, ready()],
        "optimizers must be torch.optim.Optimizer objects, got GradScaler. Pass the scaler as sca",
    ),
}


@pytest.mark.parametrize(("arguments", "text"), rows(NOT_TAKEN))
def test_arguments_of_another_kind_are_refused_and_nothing_is_changed(arguments, text):
    optimizer = filled(1.0)
    with pytest.raises(TypeError, match=f"^handle_nan_loss: {text}"):
        amp_ext.handle_nan_loss(arguments[0], optimizer, *arguments[1:])
    assert cases.grads_of(optimizer)


def test_gradients_of_all_given_optimizers_are_dropped_and_of_no_other(device):
    optimizers = [filled(1.0, device) for _ in range(3)]
    scaler = amp_ext.GradScaler(device.type, 4.0)
    assert amp_ext.handle_nan_loss(NAN, *optimizers[:2], scaler=scaler)
    assert [len(cases.grads_of(optimizer)) for optimizer in optimizers] == [0, 0, 1]
    assert scaler.get_scale() == 4, "which has not scaled yet"
    for disabled in (amp_ext.GradScaler(enabled=False), TorchScaler(enabled=False)):
        assert amp_ext.handle_nan_loss(NAN, optimizers[2], scaler=disabled)


@pytest.mark.parametrize("scaler_class", [amp_ext.GradScaler, TorchScaler])
@over([*cases.OPTIMIZERS, cases.our_sgd, cases.our_adamw_with_norm])
def test_a_scaler_amid_an_iteration_is_as_after_an_update(make, scaler_class, device):
    """What it saw of every optimizer is forgotten, so that each may be unscaled again."""
    scaler = ready(device, scaler_class, growth_interval=5)
    models = [new_model(device) for _ in range(2)]
    optimizers = [make(model.parameters()) for model in models]
    spoil(models[0].head.weight.grad, NAN)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert amp_ext.handle_nan_loss(NAN, *optimizers, scaler=scaler)
    assert not any(map(cases.grads_of, optimizers))
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    for model, optimizer in zip(models, optimizers, strict=True):
        with_clean_grads(model)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (4, 1)
    if scaler_class is amp_ext.GradScaler:
        assert scaler.last_step_skipped(wait=True) is False
        assert scaler.stats(wait=True).updates == 1
