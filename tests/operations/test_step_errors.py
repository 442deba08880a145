"""Bad input of the list operations: named in the error, before anything is written."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from harness import list_operations as cases
from harness.awkward import F16, F32, F64, Dtypes
from harness.rows import rows
from torch import Tensor

DTYPES = Dtypes(F16, F16, F32, master=True)


def some_lists(operation, options):
    return cases.build(operation, options, [(5,)] * 3, DTYPES, "cpu")


def named(lists, kinds: str) -> list[str]:
    """Returns the names of some lists of an operation; "buffers" are those of its states."""
    others = {"params", "grads", "steps", "master_params"}
    wanted = set(kinds.split())
    return [
        name for name in lists if name in wanted or ("buffers" in wanted and name not in others)
    ]


def assert_refused(operation, options, lists, words):
    tensors = {name: list(lists[name] or []) for name in lists}
    before = {
        name: [None if t.is_meta else t.to_dense().clone() for t in tensors[name]] for name in lists
    }
    with pytest.raises(RuntimeError, match=f"^{operation}: {words}"):
        cases.run(operation, lists, **options)
    for name, values in before.items():
        for tensor, value in zip(tensors[name], values, strict=True):
            assert value is None or torch.equal(tensor.to_dense(), value), name


def overlapping(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor)


ITSELF = r"is written and must not overlap itself, got sizes \[5\] with strides \[0\]"
SIZES = r"must be of sizes \[5\], got"
TWO = r"must be one element, got sizes \[2\]"


@pytest.mark.parametrize(
    ("kinds", "spoil", "words"),
    rows(
        {
            "buffer-double": ("buffers", Tensor.double, "must be Float.*, got Double"),
            "buffer-integer": ("buffers", Tensor.int, "must be Float.*, got Int"),
            "step-integer": ("steps", Tensor.long, "must be Float, got Long"),
            "step-half": ("steps", Tensor.half, "must be Float, got Half"),
            "master-half": ("master_params", Tensor.half, "must be Float, Byte or Char, got Half"),
            "integer": ("params grads", Tensor.int, "must be Float, .*got Int"),
            "complex": ("params grads", Tensor.cfloat, "must be Float, .*got Complex"),
            "sparse": ("grads", Tensor.to_sparse, "must be .*[sS]parse"),
            "shape": ("grads buffers master_params", lambda t: t[:-1], f"{SIZES} \\[4\\]"),
            "dimensions": ("grads", lambda t: t.view(1, -1), f"{SIZES} \\[1, 5\\]"),
            "step-shape": ("steps", lambda t: t.repeat(2), TWO),
            "overlaps-itself": ("params buffers master_params", overlapping, ITSELF),
            "device": ("grads buffers", lambda t: t.to("meta"), "must be .*meta"),
        }
    ),
)
@cases.few_steps_and_updates
def test_a_bad_tensor_is_named_before_anything_is_written(operation, options, kinds, spoil, words):
    for name in named(some_lists(operation, options), kinds):
        lists = some_lists(operation, options)
        lists[name][1] = spoil(lists[name][1])
        assert_refused(operation, options, lists, rf"{name}\[1\] {words}")


@cases.few_steps
def test_a_gradient_that_overlaps_itself_is_not_written_back(operation, options):
    options = options | {"write_back_grads": True}
    lists = some_lists(operation, options)
    lists["grads"][1] = overlapping(lists["grads"][1])
    assert_refused(operation, options, lists, rf"grads\[1\] {ITSELF}")


@cases.few_steps_and_updates
def test_a_list_that_is_too_short_is_named(operation, options):
    for name in named(some_lists(operation, options), "grads buffers steps master_params"):
        lists = some_lists(operation, options)
        lists[name].pop()
        words = f"{name} must have 3 tensors, one for each of params, got 2"
        assert_refused(operation, options, lists, words)


@cases.few_steps_and_updates
def test_tensors_that_share_memory_are_named(operation, options):
    lists = some_lists(operation, options)
    in_float = named(lists, "buffers master_params")
    pairs = [*itertools.combinations_with_replacement(in_float, 2), ("params", "params")]
    pairs += [("steps", "steps")] if "steps" in lists else []
    for name, other in pairs:
        lists = some_lists(operation, options)
        lists[name][1] = lists[other][0]
        one = rf"({name}|{other})\[[01]\]"
        words = f"{one} is written and must not share memory with {one}"
        assert_refused(operation, options, lists, words)


NOT_FLOATING = r"must be one floating-point element, got Long of sizes \[\]"
NOT_ONE = r"must be one floating-point element, got Float of sizes \[2\]"


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        *[(name, torch.tensor(1), NOT_FLOATING) for name in ("found_inf", "grad_scale", "lr")],
        *[(name, torch.ones(2), NOT_ONE) for name in ("found_inf", "grad_scale", "lr")],
        ("grad_norm", torch.ones(()).double(), "must be Float, got Double"),
        ("grad_norm", torch.ones(2), r"must be one element, got sizes \[2\]"),
        ("sum_of_squares", torch.ones(()), "must be Double, got Float"),
        ("sum_of_squares", torch.ones(2, dtype=F64), r"must be one element, got sizes \[2\]"),
        ("grad_norm", torch.ones((), device="meta"), "must .*meta"),
        *[(name, -1.0, "must be at least 0, got -1") for name in ("max_grad_norm", "clip_value")],
        *[(name, math.nan, "must be .*, got nan") for name in ("max_grad_norm", "clip_value")],
    ],
)
@cases.few_steps
def test_a_bad_number_is_named_before_anything_is_written(operation, options, name, number, words):
    options = options | {"max_grad_norm": 1.0, name: number}
    assert_refused(operation, options, some_lists(operation, options), f"{name} {words}")


@pytest.mark.parametrize(("operation", "options"), cases.UPDATES)
def test_a_learning_rate_of_two_numbers_is_named(operation, options):
    options = options | {"lr": torch.ones(2)}
    assert_refused(operation, options, some_lists(operation, options), f"lr {NOT_ONE}")
