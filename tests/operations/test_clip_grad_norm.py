"""Tests of ``clip_grad_norm_`` and ``ops.clip_grads_``: torch's, which writes only if it must."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUT_SHAPE,
    LAYOUTS,
    Layout,
    neighbours_untouched,
    placed,
    threads,
)
from gradient_lists import each_bad_value, multiplied
from reference import assert_close, same_bits
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_ as torchs
from training import give_grads, make_params, twins

import amp_ext
from amp_ext import clip_grad_norm_, ops

# The gradients of a test have norms from 130 up: 0 and the first two clip them.
MAX_NORMS = [0.0, 0.01, 50.0, 1e4, math.inf]
CLIPPING, NOT_CLIPPING = MAX_NORMS[:3], MAX_NORMS[3:]
# Two float32 norms, and two products, that were rounded in another order.
FP32 = {"rtol": 1e-6, "atol": 0.0}


def with_grads(device, *dtypes: torch.dtype) -> list[Parameter]:
    """Returns parameters with gradients, of many shapes in each dtype."""
    params = [param for dtype in dtypes or (F32,) for param in make_params(dtype, device)]
    give_grads(params)
    return params


def copies(params: list[Parameter]) -> list[Parameter]:
    """Returns parameters with equal gradients that share nothing."""
    others = twins(params)
    for param, other in zip(params, others, strict=True):
        other.grad = None if param.grad is None else param.grad.clone()
    return others


def grads_of(params: list[Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def norm_of(grads: list[Tensor]) -> float:
    return math.sqrt(math.fsum(grad.double().square().sum().item() for grad in grads))


def coefficient(max_norm: float, norm: Tensor) -> float:
    """Returns what gradients are multiplied by, as a float32 number."""
    return torch.tensor(max_norm / (norm.item() + 1e-6)).clamp(max=1.0).item()


def assert_same_grads(params: list[Parameter], others: list[Parameter]) -> None:
    for param, other in zip(params, others, strict=True):
        assert (param.grad is None) == (other.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(param.grad, other.grad, **FP32, equal_nan=True)


def assert_as_torchs(
    params: list[Parameter], *args: Any, kind: Callable[[Any], Any] = list
) -> None:
    """Asserts that ours and torch's do and return the same, to the rounding of float32."""
    others = copies(params)
    actual, expected = clip_grad_norm_(kind(params), *args), torchs(kind(others), *args)
    torch.testing.assert_close(actual, expected, **FP32, equal_nan=True)
    assert_same_grads(params, others)


def assert_untouched(params: list[Parameter], before: list[Tensor], versions: list[int]) -> None:
    grads = grads_of(params)
    assert all(map(same_bits, grads, before))
    if grads[0].is_cpu:  # on a GPU the host does not know
        assert [grad._version for grad in grads] == versions


def test_the_signature_is_torchs_and_one_more() -> None:
    ours = inspect.signature(clip_grad_norm_).parameters
    theirs = inspect.signature(torchs).parameters
    assert list(ours)[:-1] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    assert ours["total_norm"].kind == inspect.Parameter.KEYWORD_ONLY
    assert ours["total_norm"].default is None


@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_float32_gradients_are_clipped_as_by_torch(max_norm: float, device) -> None:
    assert_as_torchs(with_grads(device), max_norm)


@pytest.mark.parametrize("norm_type", [2, 2.0, "2"])
def test_arguments_of_torch_are_taken_by_place(norm_type: Any, device) -> None:
    for error_if_nonfinite in (False, True):
        for foreach in (None, False, True):
            assert_as_torchs(with_grads(device), 1.0, norm_type, error_if_nonfinite, foreach)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda params: params, id="list"),
        pytest.param(tuple, id="tuple"),
        pytest.param(iter, id="iterator"),
        pytest.param(lambda params: (param for param in params), id="generator"),
        pytest.param(lambda params: dict(enumerate(params)).values(), id="values"),
        pytest.param(lambda params: torch.nn.ParameterList(params).parameters(), id="parameters"),
        pytest.param(torch.nn.ParameterList, id="parameter-list"),
        pytest.param(
            lambda params: dict(torch.nn.ParameterList(params).named_parameters()).values(),
            id="named-parameters",
        ),
    ],
)
def test_any_iterable_of_parameters_is_taken(kind: Callable[[Any], Any], device) -> None:
    assert_as_torchs(with_grads(device), 1.0, kind=kind)


@pytest.mark.parametrize("shape", [(16385,), (3, 5), ()], ids=str)
def test_a_single_tensor_is_taken(shape: tuple[int, ...], device) -> None:
    (param,) = make_params(F32, device, [shape])
    give_grads([param])
    assert_as_torchs([param], 0.1, kind=lambda params: params[0])


def test_parameters_without_gradients_are_passed_over(device) -> None:
    params = with_grads(device)
    for index in (0, 3, 4):
        params[index].grad = None
    assert_as_torchs(params, 0.5)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_no_gradients_have_the_norm_zero(norm_type: float) -> None:
    for params in ([], make_params(F32)):
        norm = clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        assert same_bits(norm, torch.tensor(0.0))


def test_empty_gradients_have_the_norm_zero(device) -> None:
    params = make_params(F32, device, [(0,), (3, 0)])
    give_grads(params)
    assert_as_torchs(params, 1.0)
    assert clip_grad_norm_(params, 1.0).item() == 0


def test_an_empty_generator_is_warned_of_as_by_torch() -> None:
    caught = []
    for clip in (clip_grad_norm_, torchs):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert clip((param for param in ()), 1.0).item() == 0
        caught.append([(str(w.message), w.category, w.filename) for w in warned])
    assert caught[0] == caught[1]


@pytest.mark.parametrize("max_norm", [0.25, math.inf])
@pytest.mark.parametrize("norm_type", [0.0, 0.5, 1, 3.0, math.inf, "inf", -math.inf])
def test_other_norms_are_torchs(norm_type: Any, max_norm: float, device) -> None:
    params = [param for param in with_grads(device) if param.numel()]
    assert_as_torchs(params, max_norm, norm_type)


@pytest.mark.parametrize(
    "max_norm",
    [
        pytest.param(lambda device: 1, id="int"),
        pytest.param(lambda device: torch.tensor(0.5), id="tensor"),
        pytest.param(lambda device: torch.tensor([0.5], dtype=F64), id="double-tensor"),
        pytest.param(lambda device: torch.tensor(2, device=device), id="int-tensor"),
    ],
)
def test_the_limit_may_be_any_number(max_norm: Callable[[Any], Any], device) -> None:
    assert_as_torchs(with_grads(device), max_norm(device))


def test_the_norm_is_one_float32_outside_of_any_graph(device) -> None:
    for dtype in (F32, F16, BF16):
        (param,) = make_params(dtype, device, [(5,)])
        param.grad = torch.ones_like(param, requires_grad=True)
        norm = clip_grad_norm_([param], 1.0)
        assert (norm.shape, norm.dtype, norm.device) == ((), F32, param.device)
        assert not norm.requires_grad
        assert param.grad.requires_grad


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
@pytest.mark.parametrize("max_norm", CLIPPING)
def test_each_dtype_is_multiplied_in_float32_and_rounded_once(
    max_norm: float, dtype: torch.dtype, device
) -> None:
    params = with_grads(device, dtype)
    before = [grad.clone() for grad in grads_of(params)]
    norm = clip_grad_norm_(params, max_norm)
    assert norm.item() == pytest.approx(norm_of(before), rel=1e-6)
    for grad, old in zip(grads_of(params), before, strict=True):
        assert same_bits(grad, multiplied(old, coefficient(max_norm, norm)))


@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_one_norm_is_taken_over_all_dtypes(max_norm: float, device) -> None:
    params = with_grads(device, F32, F16, BF16, F64)
    before = [grad.clone() for grad in grads_of(params)]
    norm = clip_grad_norm_(params, max_norm)
    assert norm.item() == pytest.approx(norm_of(before), rel=1e-6)
    for grad, old in zip(grads_of(params), before, strict=True):
        assert_close(grad, old.double() * coefficient(max_norm, norm))


def test_a_norm_above_the_largest_half_is_finite(device) -> None:
    """torch takes the norm of float16 gradients in float16: inf, and the gradients become 0."""
    params = make_params(F16, device, [(1000,), (7,)])
    for param in params:
        param.grad = torch.full_like(param, 60000.0)
    norm = clip_grad_norm_(params, 1000.0, error_if_nonfinite=True)
    assert norm.item() == pytest.approx(60000 * math.sqrt(1007), rel=1e-6)
    for param in params:
        assert_close(param.grad, torch.full_like(param, 1000 / math.sqrt(1007)))


@pytest.mark.parametrize("value", [3e38, 1e30, 1e-22, 1e-40])
def test_squares_outside_of_float32_do_not_spoil_the_norm(value: float, device) -> None:
    (param,) = make_params(F32, device, [(1,)])
    param.grad = torch.full_like(param, value)
    kept = param.grad.item()
    norm = clip_grad_norm_([param], 1.0)
    assert norm.item() == pytest.approx(kept, rel=1e-6, abs=1e-45)
    torch.testing.assert_close(param.grad, torch.full_like(param, min(kept, 1.0)), **FP32)


@pytest.mark.parametrize("max_norm", NOT_CLIPPING)
def test_gradients_that_need_no_clipping_are_not_written(max_norm: float, device) -> None:
    params = with_grads(device, F32, F16, BF16, F64)
    before = [grad.clone() for grad in grads_of(params)]
    versions = [grad._version for grad in grads_of(params)]
    clip_grad_norm_(params, max_norm)
    assert_untouched(params, before, versions)
    clip_grad_norm_(params, max_norm, total_norm=torch.tensor(0.5, device=device))
    assert_untouched(params, before, versions)
    ops.clip_grads_(grads_of(params), torch.tensor(0.5, device=device), max_norm=max_norm)
    assert_untouched(params, before, versions)


@pytest.mark.parametrize("max_norm", CLIPPING)
def test_gradients_that_are_clipped_get_a_new_version(max_norm: float, device) -> None:
    params = with_grads(device, F32, F16, BF16, F64)
    versions = [grad._version for grad in grads_of(params)]
    clip_grad_norm_(params, max_norm)
    assert all(grad._version > old for grad, old in zip(grads_of(params), versions, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_gradients_of_any_layout_are_clipped_in_place(
    max_norm: float, dtype: torch.dtype, layout: Layout, device
) -> None:
    (param,) = make_params(dtype, device, [LAYOUT_SHAPE])
    dense = torch.randn(LAYOUT_SHAPE, device=device).to(dtype)
    view = param.grad = placed(dense, layout)
    version = view._version
    norm = clip_grad_norm_([param], max_norm)
    assert param.grad is view
    assert norm.item() == pytest.approx(norm_of([dense]), rel=1e-6)
    assert same_bits(view, multiplied(dense, coefficient(max_norm, norm)))
    assert neighbours_untouched(view)
    if view.is_cpu:
        assert (view._version > version) == (max_norm == 1.0)


@pytest.mark.parametrize("max_norm", MAX_NORMS)
@each_bad_value
def test_a_norm_that_is_not_finite_acts_as_in_torch(value: float, max_norm: float, device) -> None:
    params = with_grads(device)
    params[0].grad[7] = value
    assert_as_torchs(params, max_norm)


@each_bad_value
def test_the_error_of_a_norm_that_is_not_finite_is_torchs(value: float, device) -> None:
    params = with_grads(device)
    params = [param for param in params if param.numel()]
    params[0].grad[7] = value
    before = [grad.clone() for grad in grads_of(params)]
    versions = [grad._version for grad in grads_of(params)]
    for norm_type in (2, 2.0, "2", 1, 3.0, math.inf, "inf"):
        with pytest.raises(RuntimeError) as expected:
            torchs(copies(params), 1.0, norm_type, error_if_nonfinite=True)
        with pytest.raises(RuntimeError) as actual:
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        assert str(actual.value) == str(expected.value)
        assert_untouched(params, before, versions)


# A norm that the caller has.


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("norm", [1024.0, 0.75, 1e-3, 0.0])
def test_a_given_norm_decides(
    norm: float, shape: tuple[int, ...], dtype: torch.dtype, device
) -> None:
    params = with_grads(device)
    others = copies(params)
    total_norm = torch.full(shape, norm, dtype=dtype, device=device)
    assert clip_grad_norm_(params, 0.5, total_norm=total_norm) is total_norm
    assert total_norm.item() == torch.tensor(norm, dtype=dtype).item()
    torch.nn.utils.clip_grads_with_norm_(others, 0.5, total_norm.reshape(()))
    assert_same_grads(params, others)


def test_nothing_is_read_for_a_given_norm(device) -> None:
    params = with_grads(device)
    params[0].grad[7] = math.nan
    total_norm = torch.tensor(2.0, device=device)
    clip_grad_norm_(params, 1.0, error_if_nonfinite=True, total_norm=total_norm)
    assert total_norm.item() == 2
    assert params[0].grad.isnan().sum() == 1


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_a_given_norm_may_be_of_any_type(norm_type: float, device) -> None:
    params = with_grads(device)
    before = [grad.clone() for grad in grads_of(params)]
    total_norm = torch.tensor(1024.0, device=device)
    assert clip_grad_norm_(params, 512.0, norm_type, total_norm=total_norm).item() == 1024
    for grad, old in zip(grads_of(params), before, strict=True):
        torch.testing.assert_close(grad, old / 2, **FP32)


@each_bad_value
def test_a_given_norm_that_is_not_finite_raises_if_asked(value: float, device) -> None:
    params = with_grads(device)
    total_norm = torch.tensor(value, device=device)
    with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 .* is non-finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True, total_norm=total_norm)


def test_a_given_norm_is_returned_without_gradients(device) -> None:
    total_norm = torch.tensor(3.0, device=device)
    assert clip_grad_norm_(make_params(F32, device), 1.0, total_norm=total_norm).item() == 3


def test_the_norm_of_the_last_step_may_be_given(device) -> None:
    params = with_grads(device)
    others = copies(params)
    optimizer = amp_ext.optim.SGD(params, max_grad_norm=math.inf)
    optimizer.step()
    clip_grad_norm_(params, 1.0, total_norm=optimizer.grad_norm)
    torchs(others, 1.0)
    assert_same_grads(params, others)


# Gradients that are not plain tensors, or share memory.


def test_complex_gradients_are_clipped_as_by_torch() -> None:
    params = [Parameter(torch.ones(5, dtype=torch.complex64)), Parameter(torch.ones(3))]
    for param in params:
        param.grad = torch.randn_like(param)
    assert_as_torchs(params, 0.1)


def test_overlapping_gradients_are_refused_before_anything_is_written() -> None:
    params = with_grads("cpu")
    before = params[0].grad.clone()
    params[1].grad = torch.ones(5).expand(3, 5)
    with pytest.raises(RuntimeError):
        torchs(copies(params)[:1] + params[1:2], 1.0)
    with pytest.raises(RuntimeError, match=r"grads\[1\] .*overlap"):
        clip_grad_norm_(params, 1.0)
    assert same_bits(params[0].grad, before)


def test_no_flag_of_autograd_matters(device) -> None:
    params = with_grads(device)
    with torch.enable_grad():
        for param in params:
            param.grad.requires_grad_()
        assert_as_torchs(params, 1.0)
    with torch.inference_mode():
        assert_as_torchs(params, 0.5)


# The operation.


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
def test_the_operation_multiplies_by_the_coefficient(dtype: torch.dtype, device) -> None:
    for norm, max_norm in ((1024.0, 512.0), (3.0, 1.0), (0.7, 0.6), (1e-7, 1e-8), (2.0, 0.0)):
        grads = [torch.randn(size, device=device).to(dtype) for size in (0, 1, 5, 16385)]
        total_norm = torch.full((1,), norm, device=device)
        wanted = [multiplied(grad, coefficient(max_norm, total_norm)) for grad in grads]
        ops.clip_grads_(grads, total_norm, max_norm=max_norm)
        assert all(map(same_bits, grads, wanted)), norm


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    params = [param for dtype in (F32, F16, BF16, F64)
              for param in make_params(dtype, shapes=[(200_001,), (3, 5)])]  # fmt: skip
    give_grads(params)
    others, norms = copies(params), []
    for count, side in ((1, params), (2, others)):
        with threads(count):
            norms.append(clip_grad_norm_(side, 1.0))
    assert same_bits(*norms)
    assert all(map(same_bits, grads_of(params), grads_of(others)))
