"""Steps whose numbers have fewer bits, beside the same steps in float32 and what is stored of them.

What is stored of a number is in ``harness/number_codes.py``: rounded, dithered, split or in codes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.coded_lists import STARTS, build_coded, coded_steps, decoded, encode, moved
from harness.edge_shapes import BF16, F16, F32, FIRST_ELEMENTS, INF, NAN, Dtypes
from harness.list_operations import (
    BUFFERS,
    DITHERED_STEPS,
    FEW_STEPS,
    IN_FLOAT,
    OPERATIONS,
    STEP,
    Lists,
    Options,
    assert_same,
    on_device,
    run,
    spoil,
)
from harness.number_codes import (
    GROUP,
    IS_NAN,
    RATIO_IS_NAN,
    SLOPES,
    dither_words,
    join,
    rounded,
    split,
)
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

from amp_ext import ops


def wide(lists: Lists, operation: str, code: str) -> Lists:
    """Returns the same numbers in float32, of which a step rounds nothing but gradients."""
    found = decoded(lists, operation, code) if code else dict(lists)
    masters = found.pop("master_params", found["params"])
    if not masters[0].is_floating_point():
        masters = [join(*pair) for pair in zip(found["params"], masters, strict=True)]
    found["params"] = masters
    return {n: ts if n == "grads" else [t.float() for t in ts] for n, ts in found.items()}


def slope_of(operation: str, name: str, options: Options) -> int:
    """Returns the slope of the words that dither a buffer of 16 bits, 0 where none does."""
    buffer, settings = BUFFERS[operation][name], OPERATIONS[operation]
    numbers = settings.hyperparameters | options
    decay = numbers[settings.decays[name]] if name in settings.decays else 0.0
    return buffer.dither_stride if buffer.role == "second moment" or decay >= 0.99 else 0


def stored(
    exact: Lists, like: Lists, operation: str, options: Options, code: str, step: int
) -> Lists:
    """Returns what the step of a number keeps of float32 numbers, in the forms of other lists."""

    def words_of(index: int, slope: int) -> Tensor | None:
        value = exact["params"][index]
        if "dither" not in options or slope == 0:
            return None
        return dither_words(starts_of(like, code)[index], value.numel(), step, slope)

    def rounded_list(name: str, slope: int) -> list[Tensor]:
        dtype = like[name][0].dtype
        return [rounded(t, dtype, words_of(i, slope)) for i, t in enumerate(exact[name])]

    found = encode(exact, operation, code, words_of) if code else dict(exact)
    for name in exact.keys() & BUFFERS[operation].keys() if not code else ():
        found[name] = rounded_list(name, slope_of(operation, name, options))
    if "master_params" not in like:
        return found | {"params": rounded_list("params", SLOPES["param"])}
    found["master_params"] = exact["params"]
    if like["master_params"][0].is_floating_point():
        return found | {"params": rounded_list("params", 0)}
    dtype, low_bits = like["params"][0].dtype, low_bits_of(like["master_params"][0])
    parts = [
        split(master, dtype, low_bits, words_of(i, SLOPES["param"]) if low_bits == 8 else None)
        for i, master in enumerate(exact["params"])
    ]
    return found | {
        "params": [p for p, _ in parts],
        "master_params": [residual for _, residual in parts],
    }


def starts_of(lists: Lists, code: str) -> list[int]:
    return (STARTS if code else FIRST_ELEMENTS)[: len(lists["params"])]


def low_bits_of(residual: Tensor) -> int:
    return 8 if residual.dtype == torch.int8 else 16


def assert_stores_as_the_reference(
    lists: Lists, operation: str, options: Options, code: str, step: int, **limits: Any
) -> None:
    """Takes a step, and one in float32 of whose results the reference keeps what it can."""
    device, before = lists["params"][0].device, moved(lists, "cpu")
    exact = moved(wide(before, operation, code), device)
    run(operation, lists, **options, **limits, global_offsets=starts_of(lists, code))
    run(operation, exact, **options | {"dither": False}, **limits)
    wanted = stored(moved(exact, "cpu"), before, operation, options, code, step)
    assert_same(moved(lists, "cpu"), wanted)


# Parameters, gradients and states, and how many bits of a split master are beside the parameter.
SPLIT = {
    f"{name}-split{low_bits}-{states}": (Dtypes(dtype, dtype, state, master=True), low_bits)
    for name, dtype in (("bf16", BF16), ("fp16", F16))
    for low_bits in (16, 8)
    for states, state in (("state32", F32), ("statebf16", BF16))
}
DITHERED = {
    "fp32": (Dtypes(F32, F32, BF16), 0),
    "fp16": (Dtypes(F16, F16, BF16), 0),
    "fp16-as-torch": (Dtypes(F16, F32, F16), 0),
    "fp16-master": (Dtypes(F16, F16, BF16, master=True), 0),
    "bf16": (Dtypes(BF16, BF16, BF16), 0),
    "bf16-state32": (Dtypes(BF16, F32, F32), 0),
    "bf16-master": (Dtypes(BF16, BF16, BF16, master=True), 0),
    **{name: row for name, row in SPLIT.items() if row[1] == 8},
}
IN_CODES = {
    "fp32": (IN_FLOAT, 0),
    "fp32-gradbf16": (Dtypes(F32, BF16, F32), 0),  # whose gradients are read as float32
    "bf16": (Dtypes(BF16, BF16, F32), 0),
    "fp16": (Dtypes(F16, F16, F32), 0),
    "bf16-master": (Dtypes(BF16, BF16, F32, master=True), 0),
    "fp16-master": (Dtypes(F16, F16, F32, master=True), 0),
    **{name: row for name, row in SPLIT.items() if row[0].state == F32},
}
FORM = ("dtypes", "low_bits")


@pytest.mark.parametrize("taken", [2, 2**24 + 4])
@pytest.mark.parametrize(STEP, DITHERED_STEPS)
@pytest.mark.parametrize(FORM, rows(DITHERED))
def test_what_a_step_dithers_is_that_of_the_reference(
    device, operation, options, dtypes, low_bits, taken
):
    lists = moved(build_coded(operation, options, "", dtypes, None, low_bits, step=taken), device)
    assert_stores_as_the_reference(lists, operation, options, "", taken + 1)


@pytest.mark.parametrize(STEP, FEW_STEPS)
@pytest.mark.parametrize(FORM, rows(SPLIT))
def test_a_split_master_is_that_of_the_reference(device, operation, options, dtypes, low_bits):
    lists = moved(build_coded(operation, options, "", dtypes, None, low_bits, step=4), device)
    assert_stores_as_the_reference(lists, operation, options, "", 5)


@pytest.mark.parametrize("code", ["", "q8h", "q8s"])
def test_a_floor_of_adam_counts_beside_narrow_moments(device, code):
    """No fast path may leave it out."""
    options = {"beta2": 0.999, "denominator_floor": 0.7, "dither": True}
    dtypes = Dtypes(BF16, BF16, F32 if code else BF16)
    lists = moved(build_coded("adam_", options, code, dtypes, step=4), device)
    assert_stores_as_the_reference(lists, "adam_", options, code, 5)


LIMITS = {
    "alone": (4, {}),
    "after-2^24-steps": (2**24 + 6, {}),
    "scale": (4, {"grad_scale": 4.0}),
    "clip-value": (4, {"clip_value": 0.25, "found_inf": 0.0}),
    "clip-norm": (4, {"max_grad_norm": 3.0, "grad_scale": 4.0}),
    "write-back": (4, {"max_grad_norm": 3.0, "grad_scale": 4.0, "write_back_grads": True}),
    "skip": (4, {"skip_nonfinite": True, "write_back_grads": True}),
}


@pytest.mark.parametrize(("taken", "limits"), rows(LIMITS))
@coded_steps
def test_codes_are_those_of_the_reference(device, operation, options, code, taken, limits):
    """The second step with gradients of all sizes."""
    limits = limits | on_device(limits, device)
    for name in IN_CODES if taken == 4 and not limits else ("fp32", "fp32-gradbf16", "bf16-master"):
        dtypes, low_bits = IN_CODES[name]
        lists = build_coded(operation, options, code, dtypes, None, low_bits, step=taken)
        lists = moved(lists, device)
        for step in (taken + 1, taken + 2):
            if "skip_nonfinite" in limits:
                spoil(lists["grads"])
            assert_stores_as_the_reference(lists, operation, options, code, step, **limits)
            for grad in lists["grads"]:
                sizes = torch.empty(grad.shape).uniform_(-60, 10)
                grad.copy_(torch.randn(grad.shape) * torch.exp2(sizes))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@coded_steps
def test_a_nonfinite_gradient_shows_in_its_moments_and_in_no_others(
    device, operation, options, code, bad
):
    lists = build_coded(operation, options, code, IN_FLOAT, [(3, 4 * GROUP)])
    lists, clean = moved(lists, device), moved(lists, device)
    lists["grads"][0][1, 2 * GROUP + 7], clean["grads"][0][1, 2 * GROUP + 7] = bad, 0.0
    is_bad = ~lists["grads"][0].cpu().isfinite()
    spoilt = torch.zeros(3, 4 * GROUP, dtype=torch.bool)
    first = 2 * GROUP + (7 if code == "q8h" else 0)
    spoilt[1, first : first + (1 if code == "q8h" else GROUP)] = True
    for _ in range(3):  # what follows doesn't make it finite again
        run(operation, lists, **options)
        run(operation, clean, **options)
        lists["grads"] = clean["grads"]
        found, wanted = (decoded(moved(s, "cpu"), operation, code) for s in (lists, clean))
        for name, buffer in BUFFERS[operation].items():
            if name in found and buffer.role != "other":  # which is overwritten whole
                where = spoilt if buffer.code else is_bad
                assert not found[name][0][where].isfinite().any(), name
                assert same_bits(found[name][0][~spoilt], wanted[name][0][~spoilt]), name
                assert found[name][0][~spoilt].isfinite().all(), name
        if code == "q8h":
            assert (lists["exp_avgs"][0].cpu()[spoilt] == RATIO_IS_NAN).all()
        else:
            is_nan = lists["exponents"][0].cpu() == IS_NAN
            assert is_nan.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("operation", BUFFERS)
def test_what_one_step_dithers_has_odd_slopes_of_its_own(operation):
    slopes = [each.dither_stride for each in BUFFERS[operation].values() if each.dither_stride]
    assert all(slope % 2 == 1 for slope in slopes)
    assert len({*slopes, SLOPES["param"]}) == len(slopes) + 1


@pytest.mark.parametrize("low_bits", [16, 8])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_master_is_split_for_the_parameter_that_is_there(device, dtype, low_bits):
    master = torch.randn(1000, device=device)
    param = master.to(dtype)
    residual = ops.split_fp32(param, master, low_bits)
    error = (ops.join_fp32(param, residual) - master).abs() / master.abs()
    assert error.max().item() <= {16: 2**-24, 8: 2**-15}[low_bits]
    # A tie goes to even in torch and away from zero here: the nearest that the parameter carries.
    unit = 2.0**-7 if dtype == BF16 else 2.0**-10
    tie = torch.full((4,), 1 + unit / 2, device=device)
    down = tie.to(dtype)
    assert (down == 1).all()
    found = ops.join_fp32(down, ops.split_fp32(down, tie, low_bits))
    assert (found - tie).abs().max().item() <= unit * 2.0**-low_bits
    # A parameter that the master does not round to has been changed, and is its own master.
    other = torch.full((4,), 3.0, dtype=dtype, device=device)
    joined = ops.join_fp32(other, ops.split_fp32(other, tie, low_bits))
    assert torch.equal(joined, other.float())
