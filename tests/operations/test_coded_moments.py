"""Moments in codes of 8 bits, beside a reference in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.awkward import (
    BF16,
    F16,
    F32,
    INF,
    NAN,
    Dtypes,
)
from harness.coded_lists import (
    CODED_STEPS,
    STARTS,
    build_coded,
    coded_steps,
    decoded,
    encode,
    moved,
    params,
)
from harness.list_operations import (
    BUFFERS,
    DECAY,
    Lists,
    Options,
    assert_same,
    run,
    spoil,
)
from harness.number_codes import (
    GROUP,
    IS_NAN,
    RATIO_IS_NAN,
    dither_words,
)
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

from amp_ext import ops

IN_FLOAT = Dtypes(F32, F32, F32)
SKIP = {"skip_nonfinite": True}


def coded_like(
    exact: Lists, operation: str, options: Options, code: str, starts: list[int], step: int
) -> Lists:
    """The reference's codes of float32 moments, as a step with this number stores them."""

    def words_of(index: int, slope: int) -> Tensor | None:
        if "dither" not in options or slope == 0:
            return None
        param = exact["params"][index]
        return dither_words(starts[index], param.numel(), step, slope).view(param.shape)

    return encode(moved(exact, "cpu"), operation, code, words_of)


def states_of(lists: Lists) -> set[str]:
    return lists.keys() - {"params", "grads", "master_params"}


def averages_of(operation: str, lists: Lists) -> set[str]:
    """The states that a later step does not overwrite whole."""
    buffers = BUFFERS[operation]
    return {name for name in lists.keys() & buffers.keys() if buffers[name].role != "other"}


def assert_steps_as_the_reference(
    operation: str, lists: Lists, options: Options, code: str, step: int, **more: Any
) -> None:
    """Takes a step, and one with float32 moments that the reference encodes."""
    device = lists["params"][0].device
    starts = STARTS[: len(lists["params"])]
    exact = moved(decoded(moved(lists, "cpu"), operation, code), device)
    run(operation, lists, **options, **more, first_elements=starts)
    run(operation, exact, **options | {"dither": False}, **more)
    wanted = coded_like(exact, operation, options, code, starts, step)
    same = states_of(lists) | {"grads"}
    if "dither" not in options:
        same |= lists.keys() & {"params", "master_params"}
    assert_same({name: moved(lists, "cpu")[name] for name in same}, {n: wanted[n] for n in same})


@pytest.mark.parametrize("taken", [4, 2**24 + 6])
@coded_steps
@params
def test_codes_are_those_of_the_reference(device, operation, options, code, dtypes, taken):
    lists = moved(build_coded(operation, options, code, dtypes, step=taken), device)
    for step in (taken + 1, taken + 2):
        assert_steps_as_the_reference(operation, lists, options, code, step)


@pytest.mark.parametrize(
    "limits",
    rows(
        {
            "scale": {"grad_scale": 4.0},
            "clip-value": {"clip_value": 0.25, "found_inf": 0.0},
            "clip-norm": {"max_grad_norm": 3.0, "grad_scale": 4.0},
            "write-back": {"max_grad_norm": 3.0, "grad_scale": 4.0, "write_back_grads": True},
        }
    ),
)
@coded_steps
def test_gradients_are_unscaled_clipped_and_written_back(device, operation, options, code, limits):
    on_device = {"grad_scale", "found_inf"}
    limits = {
        name: torch.tensor(value, device=device) if name in on_device else value
        for name, value in limits.items()
    }
    # The last with gradients that are read as float32.
    for dtypes in (IN_FLOAT, Dtypes(BF16, BF16, F32, master=True), Dtypes(F32, BF16, F32)):
        lists = moved(build_coded(operation, options, code, dtypes, step=4), device)
        assert_steps_as_the_reference(operation, lists, options, code, 5, **limits)


@coded_steps
@params
def test_an_overflow_leaves_codes_and_exponents_alone(device, operation, options, code, dtypes):
    lists = moved(build_coded(operation, options, code, dtypes), device)
    before = moved(lists, device)
    for overflow in ({"found_inf": 1.0}, {"grad_scale": 0.0}):
        numbers = {name: torch.tensor(value, device=device) for name, value in overflow.items()}
        run(operation, lists, **options, **numbers)
        assert_same(lists, before)


@coded_steps
@params
def test_finite_elements_step_where_others_are_skipped(device, operation, options, code, dtypes):
    lists = build_coded(operation, options, code, dtypes, step=4)
    spoil(lists["grads"])
    lists = moved(lists, device)
    assert_steps_as_the_reference(operation, lists, options, code, 5, **SKIP)
    assert_steps_as_the_reference(operation, lists, options, code, 6, **SKIP, write_back_grads=True)


def cleaned(lists: Lists, device: torch.device) -> Lists:
    """The same with a gradient of zero in place of each that is not finite."""
    found = moved(lists, device)
    found["grads"] = [grad.nan_to_num(0.0, 0.0, 0.0) for grad in found["grads"]]
    return found


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@coded_steps
def test_a_nonfinite_gradient_shows_in_its_moments_and_in_no_others(
    device, operation, options, code, bad
):
    lists = build_coded(operation, options, code, IN_FLOAT, [(3, 4 * GROUP)])
    lists["grads"][0][1, 2 * GROUP + 7] = bad
    lists = moved(lists, device)
    clean = cleaned(lists, device)
    spoilt = torch.zeros(3, 4 * GROUP, dtype=torch.bool)
    if code == "q8h":
        spoilt[1, 2 * GROUP + 7] = True
    else:
        spoilt[1, 2 * GROUP : 3 * GROUP] = True
    for _ in range(3):  # what follows doesn't make it finite again
        run(operation, lists, **options)
        run(operation, clean, **options)
        lists["grads"] = [grad.nan_to_num(0.0, 0.0, 0.0) for grad in lists["grads"]]
        found = decoded(moved(lists, "cpu"), operation, code)
        for name in averages_of(operation, clean):
            assert not found[name][0][spoilt].isfinite().any(), name
            others = [side[name][0].cpu()[~spoilt] for side in (lists, clean)]
            assert same_bits(*others), name
            assert found[name][0][~spoilt].isfinite().all(), name
        if code == "q8h":
            assert (lists["exp_avgs"][0].cpu()[spoilt] == RATIO_IS_NAN).all()
            continue
        exponents = lists["exponents"][0].cpu()
        assert exponents[1, 2] == IS_NAN
        assert (exponents == IS_NAN).sum() == 1
        assert same_bits(
            exponents[exponents != IS_NAN], clean["exponents"][0].cpu()[exponents != IS_NAN]
        )


@pytest.mark.parametrize(
    ("dtype", "low_bits"), [(BF16, 16), (BF16, 8), (F16, 16), (F16, 8)], ids=str
)
@pytest.mark.parametrize(("operation", "options", "code"), CODED_STEPS[::2])
def test_codes_beside_a_split_master_are_those_of_its_float32(
    device, operation, options, code, dtype, low_bits
):
    options = options | DECAY
    lists = build_coded(operation, options, code, Dtypes(dtype, dtype, F32, master=True))
    pairs = zip(lists["params"], lists["master_params"], strict=True)
    lists["master_params"] = [ops.split_master(*pair, low_bits) for pair in pairs]
    exact = moved(lists, device)
    pairs = zip(exact["params"], exact.pop("master_params"), strict=True)
    exact["params"] = [ops.join_master(*pair) for pair in pairs]
    exact["grads"] = [grad.float() for grad in exact["grads"]]
    lists = moved(lists, device)
    run(operation, lists, **options)
    run(operation, exact, **options)
    assert_same(lists, {name: exact[name] for name in states_of(lists)})
    pairs = zip(lists["params"], lists["master_params"], exact["params"], strict=True)
    for param, low, master in pairs:
        assert same_bits(low, ops.split_master(param, master, low_bits))
