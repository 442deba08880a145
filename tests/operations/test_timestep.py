"""``timestep`` of the operations: the number of a step that no tensors count."""

from __future__ import annotations

import pytest
from harness import list_operations as cases
from harness.awkward import BF16, F32, INF, NAN, Dtypes
from harness.list_operations import OPERATIONS, STEP, STEPS

COUNTED = [row for row in STEPS if OPERATIONS[row.values[0]].keeps_steps(row.values[1])]


@pytest.mark.parametrize("step", [0, 3, 2**24])
@pytest.mark.parametrize(STEP, [*COUNTED, *cases.DITHERED_STEPS])
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


@pytest.mark.parametrize("timestep", [0, -1, NAN, INF, 1.5, True, "2"], ids=str)
@pytest.mark.parametrize("operation", cases.BUFFERS)
def test_what_is_no_number_of_a_step_is_refused_by_name(operation, timestep):
    lists = cases.build(operation, {}, [(5,)], cases.IN_FLOAT, "cpu")
    lists.pop("steps", None)
    before = cases.copied(lists)
    words = rf"^{operation}: timestep must be an int of at least 1, got {timestep}$"
    with pytest.raises(RuntimeError, match=words):
        cases.run(operation, lists, timestep=timestep)
    cases.assert_same(lists, before)


@pytest.mark.parametrize(STEP, COUNTED)
def test_counters_and_a_number_are_refused_together_and_so_is_neither(operation, options):
    lists = cases.build(operation, options, [(5,)] * 3, cases.IN_FLOAT, "cpu")
    before = cases.copied(lists)
    words = f"^{operation}: steps must be None beside a timestep, got 3 tensors$"
    with pytest.raises(RuntimeError, match=words):
        cases.run(operation, lists, timestep=4, **options)
    with pytest.raises(RuntimeError, match=f"^{operation}: steps must be given "):
        cases.run(operation, {**lists, "steps": None}, **options)
    cases.assert_same(lists, before)
