"""Tests of ``clip_grad_norm_`` and ``ops.clip_grads_``: torch's, which writes only if it must."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F16, F32, F64
from harness.gradient_lists import each_bad_value, multiplied
from harness.optimizer_cases import give_grads, grads_of, make_params, twins
from harness.reference import same_bits, snapshot
from harness.rows import rows
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.utils import clip_grad_norm_ as torchs

from amp_ext import clip_grad_norm_, ops

# The gradients of a test have norms from 130 up: 0 and the first two clip them.
MAX_NORMS = [0.0, 0.01, 50.0, 1e4, math.inf]
CLIPPING, NOT_CLIPPING = MAX_NORMS[:3], MAX_NORMS[3:]
# Two norms, and two products, that were rounded in another order.
FP32, FP64 = {"rtol": 1e-6, "atol": 0.0}, {"rtol": 1e-14, "atol": 0.0}
ALL_DTYPES = (F32, F16, BF16, F64)


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


def coefficient(max_norm: float, norm: Tensor, dtype: torch.dtype = F32) -> float:
    """Returns what gradients are multiplied by, as a number of a dtype."""
    norm = norm.to(dtype)
    if dtype == F64:
        return ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0).item()
    return torch.tensor(max_norm / (norm.item() + 1e-6), dtype=dtype).clamp(max=1.0).item()


def assert_same_grads(params: list[Parameter], others: list[Parameter]) -> None:
    for param, other in zip(params, others, strict=True):
        assert (param.grad is None) == (other.grad is None)
        if param.grad is not None:
            close = FP64 if param.grad.dtype == F64 else FP32
            torch.testing.assert_close(param.grad, other.grad, **close, equal_nan=True)


def assert_as_torchs(
    params: list[Parameter], *args: Any, kind: Callable[[Any], Any] = list
) -> None:
    """Asserts that ours and torch's do and return the same, to their rounding."""
    others = copies(params)
    actual, expected = clip_grad_norm_(kind(params), *args), torchs(kind(others), *args)
    close = FP64 if expected.dtype == F64 else FP32
    torch.testing.assert_close(actual, expected, **close, equal_nan=True)
    assert_same_grads(params, others)


@contextlib.contextmanager
def untouched(params: list[Parameter]) -> Iterator[None]:
    """Asserts that what happens within writes no gradient, not even the same bits."""
    grads = grads_of(params)
    before, versions = snapshot(grads), [grad._version for grad in grads]
    yield
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
@pytest.mark.parametrize("value", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [F32, F64, torch.complex64], ids=str)
def test_gradients_are_clipped_as_by_torch(dtype, value, max_norm: float, device) -> None:
    """As long as their norm is finite, and when it is not."""
    params = with_grads(device, dtype)
    params[3].grad = None
    if value is not None:
        params[0].grad[7] = value
    assert_as_torchs(params, max_norm)


KINDS = {
    "tuple": tuple,
    "generator": lambda params: (param for param in params),
    "parameters": lambda params: ParameterList(params).parameters(),
    "one-tensor": lambda params: params[0],
}


@pytest.mark.parametrize("kind", rows(KINDS))
def test_any_iterable_of_parameters_is_taken(kind: Callable[[Any], Any], device) -> None:
    for shapes in ([(16385,)], [()], [(0,)], [(5,), (3, 7)]):
        params = make_params(F32, device, shapes)
        give_grads(params)
        assert_as_torchs(params[:1] if kind(params) is params[0] else params, 0.1, kind=kind)
    for params in ([], make_params(F32)):
        norm = clip_grad_norm_(params, 1.0, math.inf, error_if_nonfinite=True)
        assert same_bits(norm, torch.tensor(0.0))


def test_an_empty_generator_is_warned_of_as_by_torch() -> None:
    caught = []
    for clip in (clip_grad_norm_, torchs):
        with pytest.warns(UserWarning, match="empty generator") as warned:
            assert clip((param for param in ()), 1.0).item() == 0
        caught.append([(str(w.message), w.category, w.filename) for w in warned])
    assert caught[0] == caught[1]


OTHER_NORMS = [0.0, 0.5, 1, 3.0, math.inf, "inf", -math.inf]
ARGUMENTS = [
    *itertools.product([1.0], [2, 2.0, "2"], [False, True], [None, False, True]),
    *itertools.product([0.25, math.inf], OTHER_NORMS),
    *((limit,) for limit in (1, torch.tensor(0.5), torch.tensor([0.5], dtype=F64))),
    (torch.tensor(2),),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_any_arguments_do_what_they_do_in_torch(arguments: tuple[Any, ...], device) -> None:
    params = [param for param in with_grads(device) if param.numel()]
    assert_as_torchs(params, *arguments)
    if isinstance(arguments[0], Tensor):
        assert_as_torchs(params, arguments[0].to(device))


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in ALL_DTYPES), ALL_DTYPES], ids=str)
@pytest.mark.parametrize("max_norm", CLIPPING)
def test_one_norm_is_taken_and_float64_multiplied_in_float64_the_rest_in_float32(
    max_norm, dtypes, device
):
    params = with_grads(device, *dtypes)
    before = snapshot(grads_of(params))
    versions = [grad._version for grad in grads_of(params)]
    norm = clip_grad_norm_(params, max_norm)
    squares = [grad.double().square().sum().item() for grad in before]
    assert norm.dtype == (F64 if F64 in dtypes else F32)
    exact = math.sqrt(math.fsum(squares))
    assert norm.item() == pytest.approx(exact, rel=1e-14 if dtypes == (F64,) else 1e-6)
    for grad, old, version in zip(grads_of(params), before, versions, strict=True):
        if grad.dtype == F64:
            assert same_bits(grad, old * coefficient(max_norm, norm, F64))
        else:
            assert same_bits(grad, multiplied(old, coefficient(max_norm, norm)))
        assert grad._version > version


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_the_default_device_does_not_matter(given, dtype, device) -> None:
    params = with_grads(device, dtype)
    others = copies(params)
    options = {"total_norm": 1024.0} if given else {}
    expected = clip_grad_norm_(others, 0.5, **options)
    with torch.device("meta"):
        norm = clip_grad_norm_(params, 0.5, **options)
    assert norm.device == params[0].device
    assert norm.dtype == dtype
    assert same_bits(norm, expected)
    assert all(map(same_bits, grads_of(params), grads_of(others)))


@pytest.mark.parametrize("max_norm", NOT_CLIPPING)
def test_gradients_that_need_no_clipping_are_not_written(max_norm: float, device) -> None:
    params = with_grads(device, *ALL_DTYPES)
    params[0].grad = params[0].grad.repeat_interleave(2)[::2]  # with gaps
    norm = torch.tensor(0.5, device=device)
    with untouched(params):
        clip_grad_norm_(params, max_norm)
        clip_grad_norm_(params, max_norm, total_norm=norm)
        ops.clip_grads_(grads_of(params), norm, max_norm=max_norm)


@each_bad_value
def test_the_error_of_a_norm_that_is_not_finite_is_torchs(value: float, device) -> None:
    params = [param for param in with_grads(device) if param.numel()]
    params[0].grad[7] = value
    for norm_type in (2, 2.0, "2", 1, 3.0, math.inf, "inf"):
        with pytest.raises(RuntimeError) as expected:
            torchs(copies(params), 1.0, norm_type, error_if_nonfinite=True)
        with untouched(params), pytest.raises(RuntimeError) as actual:
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        assert str(actual.value) == str(expected.value)
    given = torch.tensor(value, device=device)
    with untouched(params), pytest.raises(RuntimeError, match=r"order 2\.0 .* is non-finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True, total_norm=given)
    without = make_params(F32, device)
    assert clip_grad_norm_(without, 1.0, total_norm=given) is given


# A norm that the caller has.


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("norm", [1024.0, 3.3, 0.75, 1e-3, 0.0])
def test_a_given_norm_decides_whatever_its_type(norm, shape, dtype, device) -> None:
    total_norm = torch.full(shape, norm, dtype=dtype, device=device)
    for norm_type in (2.0, 1.0, math.inf):
        params = with_grads(device)
        params[0].grad[7] = math.nan  # nothing is read for a given norm
        others = copies(params)
        result = clip_grad_norm_(params, 0.5, norm_type, True, total_norm=total_norm)
        assert result is total_norm
        assert total_norm.item() == torch.tensor(norm, dtype=dtype).item()
        torch.nn.utils.clip_grads_with_norm_(others, 0.5, total_norm.reshape(()))
        assert_same_grads(params, others)
    doubles = with_grads(device, F64)
    before = snapshot(grads_of(doubles))
    clip_grad_norm_(doubles, 0.5, total_norm=total_norm)
    factor = coefficient(0.5, total_norm.reshape(()), dtype)  # in the precision of the norm
    assert all(map(same_bits, grads_of(doubles), [grad * factor for grad in before]))


# Gradients that are not plain tensors, or share memory.


def test_a_tied_parameter_counts_and_is_clipped_once(device) -> None:
    params = with_grads(device)
    once = copies(params)
    norm = clip_grad_norm_([*params, *params[:2], params[0]], 0.01)
    assert same_bits(norm, clip_grad_norm_(once, 0.01))
    for param, other in zip(params, once, strict=True):
        assert same_bits(param.grad, other.grad)


def test_overlapping_gradients_are_refused_before_anything_is_written() -> None:
    params = with_grads("cpu")
    before = params[0].grad.clone()
    for dtype in (F32, F64):
        params[1].grad_dtype = None
        params[1].grad = torch.ones(5, dtype=dtype).expand(3, 5)
        with pytest.raises(RuntimeError, match=r"grads\[1\] .*overlap"):
            clip_grad_norm_(params, 1.0)
        assert same_bits(params[0].grad, before)


def test_no_flag_of_autograd_matters(device) -> None:
    params = with_grads(device)
    with torch.enable_grad():
        for param in params:
            param.grad.requires_grad_()
        assert_as_torchs(params, 1.0)
        assert not clip_grad_norm_(params, 1.0).requires_grad
        assert params[0].grad.requires_grad
    with torch.inference_mode():
        assert_as_torchs(params, 0.5)
