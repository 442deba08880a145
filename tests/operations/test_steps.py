"""One step of every list operation: what all of them have from the engines, at any dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FEW_DTYPES,
    INF,
    NAN,
    SHAPES,
    Dtypes,
    threads,
)
from harness.reference import same_bits
from harness.rows import rows

WITH_LIMITS = {"max_grad_norm": 1.0, "clip_value": 0.01, "write_back_grads": True}
WITH_LIMITS |= {"skip_nonfinite": True}


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
@cases.every_step
def test_one_step_is_the_formula(device, dtypes, operation, options):
    """At its first step too, and with elements to skip."""
    has_scaler = cases.OPERATIONS[operation].has_scaler
    for step, skip in [(3, False), (3, True), (0, True)]:
        lists = cases.build(operation, options, cases.SMALL, dtypes, device, step=step, bad=skip)
        more = {"skip_nonfinite": skip} if has_scaler else {}
        cases.assert_steps_by_the_formula(operation, lists, **more, **options)


# The gradients of the test have norms from 20 up.
@pytest.mark.parametrize(
    "clipping",
    rows(
        {
            "norm": {"max_grad_norm": 3.0},
            "large-norm": {"max_grad_norm": 1e6},
            "norm-0": {"max_grad_norm": 0.0},
            "value": {"clip_value": 0.25},
            "norm-and-value": {"max_grad_norm": 30.0, "clip_value": 0.25},
        }
    ),
)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
@cases.few_steps_and_updates
def test_gradients_are_clipped_by_what_is_finite(device, dtypes, operation, options, clipping):
    for skip in (False, True):
        options = options | clipping
        if cases.OPERATIONS[operation].has_scaler:
            options |= {"grad_scale": torch.tensor(4.0, device=device), "skip_nonfinite": skip}
            options |= {"write_back_grads": skip}
            if "max_grad_norm" in clipping:
                options |= {"grad_norm": torch.full((), -1.0, device=device)}
        lists = cases.build(operation, options, cases.SMALL, dtypes, device, bad=skip)
        cases.assert_steps_by_the_formula(operation, lists, **options)


@cases.few_steps_and_updates
@pytest.mark.parametrize("dtypes", DTYPES)
def test_every_size_and_dtype_is_unscaled_in_float32(device, dtypes, operation, options):
    """With elements to skip."""
    if cases.OPERATIONS[operation].has_scaler:
        scale = torch.tensor(3.0, device=device)
        options = options | {"grad_scale": scale, "skip_nonfinite": True}
    lists = cases.build(operation, options, SHAPES, dtypes, device, bad=True)
    cases.assert_steps_by_the_formula(operation, lists, **options)


@pytest.mark.parametrize("step", [0, 3, 2**24])
@pytest.mark.parametrize(cases.STEP, [*cases.COUNTED, *cases.DITHERED_STEPS])
def test_a_step_by_its_number_has_the_bits_of_one_that_counters_count(
    device, operation, options, step
):
    dtypes = Dtypes(BF16, BF16, F32) if "dither" in options else cases.IN_FLOAT
    counted = cases.build(operation, options, cases.SMALL, dtypes, device, step=step)
    lists = cases.copied(counted)
    del lists["steps"]
    cases.run(operation, counted, **options)
    cases.run(operation, lists, timestep=step + 1, **options)
    cases.assert_same(counted, lists)


@cases.few_steps
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_nan_and_inf_spoil_only_their_own_element(device, dtypes, operation, options):
    lists = cases.build(operation, options, [(70,)], dtypes, device)
    clean = cases.copied(lists)
    lists["grads"][0][7], lists["grads"][0][33] = NAN, -INF
    for side in (lists, clean):
        cases.run(operation, side, **options)
    keep = torch.ones(70, dtype=torch.bool, device=device)
    keep[[7, 33]] = False
    for name in lists.keys() - {"grads", "steps"}:
        actual = lists[name][0]
        assert same_bits(actual[keep], clean[name][0][keep]), name
        assert actual[7].isnan(), name
        if "param" not in name or not cases.OPERATIONS[operation].is_finite_after_inf:
            assert not actual[33].isfinite(), name


@cases.few_steps_and_updates
def test_very_many_tiny_tensors_step_as_one(device, operation, options):
    """More than two launches of CUDA hold."""
    sizes = [index % 7 for index in range(1700)]
    one = cases.build(operation, options, [(sum(sizes),)], cases.WITH_MASTERS, device)
    parts = {name: list(tensor.split(sizes)) for name, (tensor,) in one.items() if name != "steps"}
    many = cases.copied(parts | {"steps": one["steps"] * len(sizes)} if "steps" in one else parts)
    for side in (one, many):
        cases.run(operation, side, **options)
    for name in one.keys() - {"steps"}:
        assert same_bits(torch.cat(many[name]), one[name][0]), name
    assert all(step.item() == 4 for step in many.get("steps", []))


@cases.few_steps
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
def test_grad_scale_multiplies_by_the_rounded_inverse(device, dtype, operation, options):
    wide = F64 if dtype == F64 else F32
    start = cases.build(operation, options, [(70,), (5,)], Dtypes(dtype, wide, wide), device)
    for shape, scale in itertools.product([(), (1,)], [1.0, 65536.0, 3.0, 0.1, 2.0**40]):
        scaled, plain = cases.copied(start), cases.copied(start)
        inverse = (1 / torch.tensor(scale).double()).float().item()
        plain["grads"] = [grad * inverse for grad in plain["grads"]]
        cases.run(operation, scaled, grad_scale=torch.full(shape, scale, device=device), **options)
        cases.run(operation, plain, **options)
        del scaled["grads"], plain["grads"]
        cases.assert_same(scaled, plain)


@cases.few_steps
@pytest.mark.parametrize("dtypes", DTYPES)
def test_overflow_changes_not_a_bit_and_a_clean_flag_nothing(device, dtypes, operation, options):
    lists = cases.build(operation, options, [(0,), (), (5,), (8193,)], dtypes, device)
    before, expected = cases.copied(lists), cases.copied(lists)
    for index, value in enumerate([1.0, 2.0, 3.0, 0.5, NAN]):
        lists["grads"][2][1] = INF
        cases.run(
            operation,
            lists,
            found_inf=torch.full((1,) if index % 2 else (), value, device=device),
            grad_scale=torch.tensor(65536.0, device=device),
            skip_nonfinite=value == 2.0,
            max_grad_norm=1.0 if value == 3.0 else None,
            **options,
        )
        lists["grads"][2][1] = before["grads"][2][1]
        cases.assert_same(lists, before)
    found_inf = torch.zeros(1, device=device)
    cases.run(operation, expected, **options)
    cases.run(operation, lists, found_inf=found_inf, **options)
    cases.assert_same(lists, expected)
    assert found_inf.item() == 0


@cases.few_steps_and_updates
def test_the_learning_rate_and_the_step_may_be_tensors_of_one_element(device, operation, options):
    expected = cases.build(operation, options, [(5,), (70,)], cases.WITH_MASTERS, device)
    for shape in ((), (1,)):
        actual, alone = cases.copied(expected), cases.copied(expected)
        if "steps" in actual:
            actual["steps"] = [step.view(shape) for step in actual["steps"]]
        cases.run(operation, alone, lr=0.25, **options)
        cases.run(operation, actual, lr=torch.full(shape, 0.25, device=device), **options)
        for step in actual.get("steps", []):
            step.squeeze_()
        cases.assert_same(actual, alone)


@cases.few_steps_and_updates
def test_empty_lists_are_nothing_to_do_and_empty_tensors_count(device, operation, options):
    cases.run(operation, cases.build(operation, options, [], cases.IN_FLOAT, device), **options)
    lists = cases.build(operation, options, [(0,), (0, 3)], cases.IN_FLOAT, device)
    cases.run(operation, lists, **options)
    assert all(step.item() == 4 for step in lists.get("steps", []))


@cases.few_steps_and_updates
def test_written_tensors_get_a_new_version_and_gradients_none(device, operation, options):
    lists = cases.build(operation, options, [(5,)], cases.WITH_MASTERS, device)
    before = {name: tensors[0]._version for name, tensors in lists.items()}
    cases.run(operation, lists, **options)
    for name, (tensor,) in lists.items():
        assert (tensor._version > before[name]) == (name != "grads"), name


@cases.few_steps
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_the_number_of_threads_does_not_change_a_bit_of_what_is_clipped(dtypes, operation, options):
    lists = cases.build(operation, options, [(70_000,), (5,), (200_001,)], dtypes, "cpu", bad=True)
    alone = cases.copied(lists)
    for side, count in ((alone, 1), (lists, 3)):
        norm = torch.zeros(())
        with threads(count):
            cases.run(operation, side, grad_norm=norm, **WITH_LIMITS, **options)
        side["norm"] = [norm]
    cases.assert_same(lists, alone)
