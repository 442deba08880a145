"""Steps of every list operation and of every form of numbers: what all have from the engines."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import list_operations as cases
from harness.coded_lists import CODED_STEPS, build_coded, moved
from harness.edge_shapes import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FEW_DTYPES,
    INF,
    LAYOUT_SHAPE,
    LAYOUTS,
    NAN,
    SHAPES,
    Dtypes,
    misaligned,
    neighbours_untouched,
    placed,
    threads,
)
from harness.number_codes import GROUP
from harness.reference import same_bits
from harness.rows import rows

from amp_ext import ops


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
CLIPPING = {
    "norm": {"max_grad_norm": 3.0},
    "large-norm": {"max_grad_norm": 1e6},
    "norm-0": {"max_grad_norm": 0.0},
    "value": {"clip_value": 0.25},
    "norm-and-value": {"max_grad_norm": 30.0, "clip_value": 0.25},
}


@pytest.mark.parametrize("clipping", rows(CLIPPING))
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
def test_written_tensors_get_a_new_version_and_gradients_that_are_written_back(
    device, operation, options
):
    for writes_back in (False, True) if cases.OPERATIONS[operation].has_scaler else (False,):
        lists = cases.build(operation, options, [(5,), (5,)], cases.WITH_MASTERS, device)
        more = {"max_grad_norm": 1e-3, "write_back_grads": True} if writes_back else {}
        before = {name: [each._version for each in tensors] for name, tensors in lists.items()}
        cases.run(operation, lists, **more, **options)
        for name, tensors in lists.items():
            is_written = name != "grads" or writes_back
            for index, (tensor, version) in enumerate(zip(tensors, before[name], strict=True)):
                assert (tensor._version > version) == is_written, f"{name}[{index}]"


# Layouts: the bits of contiguous tensors, and no other memory written.


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


# `skip_nonfinite`: elements whose gradient is inf or NaN are left alone, all others step.

SKIP = {"skip_nonfinite": True}


@cases.few_steps_and_updates
def test_nothing_but_the_step_count_changes_where_no_gradient_is_finite(device, operation, options):
    for bad in (INF, -INF, NAN):
        lists = cases.build(operation, options, [(5,), (70,)], cases.WITH_MASTERS, device)
        for grad in lists["grads"]:
            grad.fill_(bad)
        before = cases.copied(lists)
        skipping = SKIP if cases.OPERATIONS[operation].has_scaler else {}  # the others always do
        cases.run(operation, lists, max_grad_norm=1.0, clip_value=0.5, **skipping, **options)
        for step in before.get("steps", []):
            step.add_(1)
        cases.assert_same(lists, before)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        pytest.param(F16, torch.tensor([0x7FC1, -0x3F, 0x7F80]).short().view(BF16), id="nan"),
        pytest.param(BF16, torch.tensor([0x7E01, -0x1FF, 0x7C00]).short().view(F16), id="nan16"),
        pytest.param(F32, torch.tensor([1e300, -1e39, NAN], dtype=F64), id="too-large"),
    ],
)
def test_a_skipped_gradient_keeps_what_a_conversion_would_change(device, dtype, bad):
    """No kernel takes its dtype beside that of the parameter: a copy in float32 is stepped."""
    before = torch.cat([bad, torch.full((5,), 2.0, dtype=bad.dtype)])
    grad, param = before.to(device, copy=True), torch.ones(8, dtype=dtype, device=device)
    scale = torch.tensor(4.0, device=device)
    ops.sgd_([param], [grad], lr=0.5, grad_scale=scale, write_back_grads=True, **SKIP)
    before[3:] = 0.5
    assert same_bits(grad, before)
    assert param.tolist() == [1.0] * 3 + [0.75] * 5


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_the_gradient_as_it_came_decides_not_the_unscaled_one(device, dtypes):
    largest = torch.finfo(dtypes.grad).max
    for write_back_grads in (False, True):
        start = torch.zeros(70, dtype=dtypes.param, device=device)
        grad = torch.full((70,), largest, dtype=dtypes.grad, device=device)
        grad[7] = INF
        ops.sgd_(
            *([start], [grad]),
            master_params=[start.float()] if dtypes.master else None,
            lr=1.0,
            grad_scale=torch.tensor(2.0**-10, device=device),
            clip_value=2.0,
            write_back_grads=write_back_grads,
            **SKIP,
        )
        expected = torch.full_like(start, -2.0)
        expected[7] = 0.0
        assert same_bits(start, expected)


@pytest.mark.parametrize("size", [1e-25, 1e30], ids=["tiny", "huge"])
def test_the_norm_keeps_its_range_beside_infinite_elements(device, size):
    lists = cases.build("sgd_", {}, [(16385,), (70,), (5,)], cases.IN_FLOAT, device, bad=True)
    lists["grads"] = [grad * size for grad in lists["grads"]]
    norm = torch.zeros((), device=device)
    before, options = cases.copied(lists), {"max_grad_norm": 1.0, "grad_norm": norm} | SKIP
    cases.run("sgd_", lists, **options)
    assert 0 < norm.item() < INF
    cases.assert_is_the_formula("sgd_", lists, before, **options)


@pytest.mark.parametrize(("size", "limit"), [(1e60, 1.0), (1e38, 1e30), (1e30, 1e-30)])
def test_norms_and_coefficients_of_float64_may_be_no_float32(size, limit, device):
    grad = torch.randn(70, dtype=F64, device=device) * size
    param = torch.zeros_like(grad)
    ops.sgd_([param], [grad], lr=1.0, max_grad_norm=limit)
    torch.testing.assert_close(param, -grad * (limit / grad.norm()), rtol=1e-13, atol=0)


def test_a_norm_too_large_for_float64_clips_finite_elements_to_zero_as_torch_does(device):
    param = torch.ones(4, dtype=F64, device=device)
    grad = torch.tensor([1e300, 1.0, INF, NAN], dtype=F64, device=device)
    norm = torch.zeros((), device=device)
    options = {"max_grad_norm": 1.0, "grad_norm": norm, "weight_decay": 0.5} | SKIP
    ops.sgd_([param], [grad], lr=1.0, decoupled_weight_decay=True, **options)
    assert norm.item() == INF
    assert param.tolist() == [0.5, 0.5, 1.0, 1.0]


# Steps of every form of numbers: any split, layout, alignment and number of threads is one.


@dataclasses.dataclass(frozen=True)
class Form:
    """A step, and how its numbers are kept."""

    operation: str
    options: cases.Options
    dtypes: Dtypes
    code: str = ""
    low_bits: int = 0

    @property
    def has_groups(self) -> bool:
        return self.code in ("q8s", "q8m")

    def build(self, *shapes: tuple[int, ...]) -> cases.Lists:
        args = self.code, self.dtypes, list(shapes), self.low_bits
        return build_coded(self.operation, self.options, *args)

    def run(self, lists: Any, **more: Any) -> None:
        cases.run(self.operation, lists, **self.options, **more)


def forms() -> Iterator[tuple[str, Form]]:
    for row in cases.FEW_STEPS:
        for dtypes in FEW_DTYPES:
            yield f"{row.id}-{dtypes.id}", Form(*row.values, *dtypes.values)
        for dtype, low_bits in ((BF16, 16), (F16, 8)):
            dtypes = Dtypes(dtype, dtype, F32, master=True)
            yield f"{row.id}-split{low_bits}", Form(*row.values, dtypes, low_bits=low_bits)
    for row in cases.DITHERED_STEPS:
        yield row.id, Form(*row.values, Dtypes(BF16, BF16, BF16))
    for row in CODED_STEPS:
        operation, options, code = row.values
        for dtypes in (cases.IN_FLOAT, Dtypes(F16, F16, F32, master=True)):
            yield f"{row.id}-codes-{dtypes.param}", Form(operation, options, dtypes, code)


each_form = pytest.mark.parametrize("form", rows(dict(forms())))
# Lists that are not of the shape of the parameter.
APART = {"steps", "exponents"}


def placed_lists(lists: cases.Lists, layout: Any) -> cases.Lists:
    """Copies, in views of a layout but for lower parts of two bytes, which stay side by side."""

    def is_apart(name: str, tensor: torch.Tensor, param: torch.Tensor) -> bool:
        return name in APART or tensor.dim() > param.dim()

    return {
        name: [
            tensor.clone() if is_apart(name, tensor, param) else placed(tensor, layout)
            for tensor, param in zip(tensors, lists["params"], strict=True)
        ]
        for name, tensors in lists.items()
    }


@each_form
def test_parts_of_a_tensor_are_stepped_as_the_whole(device, form):
    shape = (40, 7 * GROUP) if form.has_groups else (40, 401)
    whole = moved(form.build(shape), device)
    rows_of_parts = [7, 0, 33]
    parts: dict[str, Any] = {
        name: [part.clone() for part in tensors[0].split(rows_of_parts)]
        for name, tensors in whole.items()
        if name != "steps"
    }
    if "steps" in whole:
        parts["steps"] = [whole["steps"][0].clone() for _ in rows_of_parts]
    for _ in range(3):
        form.run(whole)
        form.run(parts, global_offsets=[0, 7 * shape[1], 7 * shape[1]])
    for name in whole.keys() - {"steps"}:
        assert same_bits(torch.cat(parts[name]), whole[name][0]), name


@each_form
def test_any_number_of_threads_gives_the_same_bits(form):
    sizes = (100_000, GROUP, 0, 40_000) if form.has_groups else (100_003, 1, 0, 40_000)
    lists = form.build(*((size,) for size in sizes))
    others = moved(lists, "cpu")
    for side, count in ((lists, 1), (others, 3)):
        with threads(count):
            form.run(side)
    cases.assert_same(others, lists)


@each_form
def test_an_overflow_leaves_every_bit_alone_and_a_clean_flag_changes_none(device, form):
    lists = moved(form.build((GROUP,), (3, 4096 + GROUP), (0, GROUP)), device)
    before, expected = moved(lists, device), moved(lists, device)
    lists["grads"][0].view(-1)[1] = INF
    scale = torch.tensor(65536.0, device=device)
    for found_inf in (1.0, 0.5, NAN):
        flag = torch.full((1,) if found_inf == 0.5 else (), found_inf, device=device)
        skips = {"skip_nonfinite": found_inf == 0.5}
        form.run(lists, found_inf=flag, grad_scale=scale, max_grad_norm=1.0, **skips)
    form.run(lists, grad_scale=torch.tensor(0.0, device=device))
    lists["grads"][0].view(-1)[1] = before["grads"][0].view(-1)[1]
    cases.assert_same(lists, before)
    form.run(expected)
    form.run(lists, found_inf=torch.zeros(1, device=device))
    cases.assert_same(lists, expected)


@each_form
def test_misaligned_memory_gives_the_same_bits(device, form):
    shapes = [(GROUP,), (3, 4096 + GROUP)] if form.has_groups else [(5,), (8193,), (3, 7)]
    lists = moved(form.build(*shapes), device)
    others = placed_lists(lists, misaligned)
    for _ in range(2):
        form.run(lists)
        form.run(others)
    cases.assert_same(others, lists)
    for name in others.keys() - APART - {"master_params"}:
        assert all(map(neighbours_untouched, others[name])), name


@pytest.mark.parametrize("layout", LAYOUTS)
@each_form
def test_elements_are_in_the_order_of_the_parameters_memory(device, form, layout):
    """They are dithered by their number there, and have their groups there."""
    shape = (3, 8, 12, 40) if form.has_groups else LAYOUT_SHAPE
    strides = placed(torch.empty(shape), layout).stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(4)]
    in_order = moved(form.build(tuple(shape[d] for d in order)), device)
    others, dense = moved(in_order, device), moved(in_order, device)
    for name in in_order.keys() - APART:
        (tensor,) = in_order[name]
        if tensor.dim() == 5:  # the two bytes of a lower part stay beside each other
            others[name], dense[name] = ([tensor.permute(*back, 4).clone()] for _ in range(2))
            continue
        permuted = tensor.permute(back)
        others[name] = [placed(permuted, layout)]
        # States that a step makes are dense where the parameter is not.
        is_state = name not in ("params", "grads")
        dense[name] = [permuted.clone() if is_state else placed(permuted, layout)]
    for _ in range(2):
        for lists in (in_order, others, dense):
            form.run(lists)
    for lists in (others, dense):
        for name in in_order.keys() - APART:
            (wanted,) = in_order[name]
            axes = (*order, 4) if wanted.dim() == 5 else order
            assert same_bits(lists[name][0].permute(*axes), wanted), name
        cases.assert_same(lists, {name: in_order[name] for name in in_order.keys() & APART})
    for name in others.keys() - APART:
        if others[name][0].dim() == 4:
            assert neighbours_untouched(others[name][0]), name
