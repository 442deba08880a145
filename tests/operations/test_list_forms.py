"""Steps of every form of numbers: any split, layout, alignment and number of threads is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.awkward import (
    BF16,
    F16,
    F32,
    FEW_DTYPES,
    LAYOUT_SHAPE,
    LAYOUTS,
    Dtypes,
    misaligned,
    neighbours_untouched,
    placed,
    threads,
)
from harness.coded_lists import CODED_STEPS, build_coded, moved
from harness.list_operations import (
    DITHERED_STEPS,
    FEW_STEPS,
    IN_FLOAT,
    Lists,
    assert_same,
    build,
    run,
)
from harness.number_codes import GROUP
from harness.reference import same_bits

from amp_ext import ops

NARROW = Dtypes(BF16, BF16, BF16)
FP16_MASTER = Dtypes(F16, F16, F32, master=True)


def split(lists: Lists, low_bits: int) -> Lists:
    pairs = zip(lists["params"], lists["master_params"], strict=True)
    return lists | {"master_params": [ops.split_master(*pair, low_bits) for pair in pairs]}


# The operation, its options, what makes its lists of shapes, and whether these have groups of 32.
FORMS = [
    *(
        pytest.param(
            *row.values,
            lambda *args, dtypes=dtypes.values[0]: build(*args, dtypes, "cpu"),
            False,
            id=f"{row.id}-{dtypes.id}",
        )
        for row in FEW_STEPS
        for dtypes in FEW_DTYPES
    ),
    *(
        pytest.param(*row.values, lambda *args: build(*args, NARROW, "cpu"), False, id=row.id)
        for row in DITHERED_STEPS
    ),
    *(
        pytest.param(
            *row.values[:2],
            lambda *args, code=row.values[2], dtypes=dtypes: build_coded(
                *args[:2], code, dtypes, args[2]
            ),
            row.values[2] != "q8h",
            id=f"{row.id}-{dtypes.param}",
        )
        for row in CODED_STEPS
        for dtypes in (IN_FLOAT, FP16_MASTER)
    ),
    *(
        pytest.param(
            *row.values,
            lambda *args, dtype=dtype, low_bits=low_bits: split(
                build(*args, Dtypes(dtype, dtype, F32, master=True), "cpu"), low_bits
            ),
            False,
            id=f"{row.id}-split{low_bits}-{dtype}",
        )
        for row in FEW_STEPS
        for dtype, low_bits in ((BF16, 16), (F16, 8))
    ),
]
each_form = pytest.mark.parametrize(("operation", "options", "make", "has_groups"), FORMS)
# Lists that are not of the shape of the parameter.
APART = {"steps", "exponents"}


def placed_lists(lists: Lists, layout: Any) -> Lists:
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
def test_parts_of_a_tensor_are_stepped_as_the_whole(device, operation, options, make, has_groups):
    shape = (40, 7 * GROUP) if has_groups else (40, 401)
    whole = moved(make(operation, options, [shape]), device)
    rows_of_parts = [7, 0, 33]
    parts: dict[str, Any] = {
        name: [part.clone() for part in tensors[0].split(rows_of_parts)]
        for name, tensors in whole.items()
        if name != "steps"
    }
    if "steps" in whole:
        parts["steps"] = [whole["steps"][0].clone() for _ in rows_of_parts]
    for _ in range(3):
        run(operation, whole, **options)
        run(operation, parts, **options, first_elements=[0, 7 * shape[1], 7 * shape[1]])
    for name in whole.keys() - {"steps"}:
        assert same_bits(torch.cat(parts[name]), whole[name][0]), name


@each_form
def test_any_number_of_threads_gives_the_same_bits(operation, options, make, has_groups):
    sizes = (100_000, GROUP, 0, 40_000) if has_groups else (100_003, 1, 0, 40_000)
    lists = make(operation, options, [(size,) for size in sizes])
    others = moved(lists, "cpu")
    for side, count in ((lists, 1), (others, 3)):
        with threads(count):
            run(operation, side, **options)
    assert_same(others, lists)


@each_form
def test_an_overflow_leaves_every_bit_alone(device, operation, options, make, has_groups):
    lists = moved(make(operation, options, [(GROUP,), (3, 4096 + GROUP), (0, GROUP)]), device)
    before = moved(lists, device)
    for name, value in (("found_inf", 1.0), ("grad_scale", 0.0)):
        run(operation, lists, **options, **{name: torch.tensor(value, device=device)})
        assert_same(lists, before)


@each_form
def test_misaligned_memory_gives_the_same_bits(device, operation, options, make, has_groups):
    shapes = [(GROUP,), (3, 4096 + GROUP)] if has_groups else [(5,), (8193,), (3, 7)]
    lists = moved(make(operation, options, shapes), device)
    others = placed_lists(lists, misaligned)
    for _ in range(2):
        run(operation, lists, **options)
        run(operation, others, **options)
    assert_same(others, lists)
    for name in others.keys() - APART - {"master_params"}:
        assert all(map(neighbours_untouched, others[name])), name


@pytest.mark.parametrize("layout", LAYOUTS)
@each_form
def test_elements_are_in_the_order_of_the_parameters_memory(
    device, operation, options, make, has_groups, layout
):
    """They are dithered by their number there, and have their groups there."""
    shape = (3, 8, 12, 40) if has_groups else LAYOUT_SHAPE
    strides = placed(torch.empty(shape), layout).stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(4)]
    in_order = moved(make(operation, options, [tuple(shape[d] for d in order)]), device)
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
            run(operation, lists, **options)
    for lists in (others, dense):
        for name in in_order.keys() - APART:
            (wanted,) = in_order[name]
            axes = (*order, 4) if wanted.dim() == 5 else order
            assert same_bits(lists[name][0].permute(*axes), wanted), name
        assert_same(lists, {name: in_order[name] for name in in_order.keys() & APART})
    for name in others.keys() - APART:
        if others[name][0].dim() == 4:
            assert neighbours_untouched(others[name][0]), name
