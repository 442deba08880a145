"""Steps over tensors of any layout: the bits of contiguous ones, and no other memory written."""

from __future__ import annotations

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import FEW_DTYPES, LAYOUT_SHAPE, LAYOUTS, neighbours_untouched, placed
from harness.reference import same_bits


def in_layout(lists, layout, names):
    """Copies lists, some of them into views of a layout; step counters have none."""
    views = cases.copied(lists)
    for name in names - {"steps"}:
        views[name] = [placed(tensor, layout) for tensor in lists[name]]
    return views


@pytest.mark.parametrize("layout", LAYOUTS)
@cases.few_steps
def test_one_list_may_have_a_layout_of_its_own(device, operation, options, layout):
    start = cases.build(operation, options, [LAYOUT_SHAPE], cases.WITH_MASTERS, device)
    expected = cases.copied(start)
    cases.run(operation, expected, **options)
    for name in start.keys() - {"steps"}:
        actual = in_layout(start, layout, {name})
        cases.run(operation, actual, **options)
        cases.assert_same(actual, expected)
        assert all(map(neighbours_untouched, actual[name])), name


@pytest.mark.parametrize("layout", LAYOUTS)
@cases.few_steps
def test_any_layout_is_clipped_skipped_and_written_back(device, operation, options, layout):
    """The norm is summed in the order of the memory, so that the last bit may differ."""
    limits = {"skip_nonfinite": True, "max_grad_norm": 20.0, "write_back_grads": True}
    for row in FEW_DTYPES:
        before = cases.build(operation, options, [LAYOUT_SHAPE], row.values[0], device, bad=True)
        actual = in_layout(before, layout, before.keys())
        cases.run(operation, actual, **limits, **options)
        cases.assert_is_the_formula(operation, actual, before, **limits, **options)
        for name in actual.keys() - {"steps"}:
            assert all(map(neighbours_untouched, actual[name])), name


@pytest.mark.parametrize(cases.STEP, cases.FEW_STEPS[:1] + cases.FEW_STEPS[-1:])
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_a_gradient_may_be_expanded(device, dtypes, operation, options):
    start = cases.build(operation, options, [(6, 5)], dtypes, device)
    for shape in [(1,), (6, 1), (1, 5), (6, 5)]:
        actual, expected = cases.copied(start), cases.copied(start)
        small = torch.randn(shape, device=device).to(dtypes.grad)
        actual["grads"] = [small.expand(6, 5)]
        expected["grads"] = [small.expand(6, 5).contiguous()]
        for side in (expected, actual):
            cases.run(operation, side, **options)
        cases.assert_same(actual, expected)
        assert same_bits(small.expand(6, 5), expected["grads"][0])
