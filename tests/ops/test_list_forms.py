"""Steps of every form of numbers: any split, layout, alignment and number of threads is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.coded_lists import CODED_STEPS, build_coded, moved
from harness.edge_shapes import (
    BF16,
    F16,
    F32,
    FEW_DTYPES,
    INF,
    LAYOUT_SHAPE,
    LAYOUTS,
    NAN,
    Dtypes,
    misaligned,
    neighbours_untouched,
    placed,
    threads,
)
from harness.list_operations import (
    DITHERED_STEPS,
    FEW_STEPS,
    IN_FLOAT,
    Lists,
    Options,
    assert_same,
    run,
)
from harness.number_codes import GROUP
from harness.reference import same_bits
from harness.rows import rows


@dataclasses.dataclass(frozen=True)
class Form:
    """A step, and how its numbers are kept."""

    operation: str
    options: Options
    dtypes: Dtypes
    code: str = ""
    low_bits: int = 0

    @property
    def has_groups(self) -> bool:
        return self.code in ("q8s", "q8m")

    def build(self, *shapes: tuple[int, ...]) -> Lists:
        args = self.code, self.dtypes, list(shapes), self.low_bits
        return build_coded(self.operation, self.options, *args)

    def run(self, lists: Any, **more: Any) -> None:
        run(self.operation, lists, **self.options, **more)


def forms() -> Iterator[tuple[str, Form]]:
    for row in FEW_STEPS:
        for dtypes in FEW_DTYPES:
            yield f"{row.id}-{dtypes.id}", Form(*row.values, *dtypes.values)
        for dtype, low_bits in ((BF16, 16), (F16, 8)):
            dtypes = Dtypes(dtype, dtype, F32, master=True)
            yield f"{row.id}-split{low_bits}", Form(*row.values, dtypes, low_bits=low_bits)
    for row in DITHERED_STEPS:
        yield row.id, Form(*row.values, Dtypes(BF16, BF16, BF16))
    for row in CODED_STEPS:
        operation, options, code = row.values
        for dtypes in (IN_FLOAT, Dtypes(F16, F16, F32, master=True)):
            yield f"{row.id}-codes-{dtypes.param}", Form(operation, options, dtypes, code)


each_form = pytest.mark.parametrize("form", rows(dict(forms())))
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
    assert_same(others, lists)


@each_form
def test_an_overflow_leaves_every_bit_alone_and_a_clean_flag_changes_none(device, form):
    lists = moved(form.build((GROUP,), (3, 4096 + GROUP), (0, GROUP)), device)
    before, expected = moved(lists, device), moved(lists, device)
    lists["grads"][0].view(-1)[1] = INF
    scale = torch.tensor(65536.0, device=device)
    for found_inf in (1.0, 0.5, NAN):
        flag = torch.full((1,) if found_inf == 0.5 else (), found_inf, device=device)
        form.run(lists, found_inf=flag, grad_scale=scale, max_grad_norm=1.0)
    form.run(lists, grad_scale=torch.tensor(0.0, device=device))
    lists["grads"][0].view(-1)[1] = before["grads"][0].view(-1)[1]
    assert_same(lists, before)
    form.run(expected)
    form.run(lists, found_inf=torch.zeros(1, device=device))
    assert_same(lists, expected)


@each_form
def test_misaligned_memory_gives_the_same_bits(device, form):
    shapes = [(GROUP,), (3, 4096 + GROUP)] if form.has_groups else [(5,), (8193,), (3, 7)]
    lists = moved(form.build(*shapes), device)
    others = placed_lists(lists, misaligned)
    for _ in range(2):
        form.run(lists)
        form.run(others)
    assert_same(others, lists)
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
        assert_same(lists, {name: in_order[name] for name in in_order.keys() & APART})
    for name in others.keys() - APART:
        if others[name][0].dim() == 4:
            assert neighbours_untouched(others[name][0]), name
