"""Moments in codes of 8 bits that do not fit: named, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.awkward import BF16, F32, Dtypes
from harness.coded_lists import CODED_STEPS, FIRST_STATES, build_coded, coded_steps
from harness.list_operations import Lists, assert_same, run
from harness.number_codes import GROUP
from torch import Tensor

IN_FLOAT = Dtypes(F32, F32, F32)


def lists_of(operation: str, code: str) -> Lists:
    options = {"momentum": 0.9} if operation == "sgd_" else {}
    return build_coded(operation, options, code, IN_FLOAT, [(2 * GROUP,)] * 3)


def assert_refused(operation: str, lists: Lists, words: str, **options: Any) -> None:
    """Tells that an operation names what is wrong and leaves the tensors that hold elements."""
    if operation == "sgd_":
        options = {"momentum": 0.9} | options
    before = {
        name: [None if t.is_meta or t.is_sparse else t.clone() for t in all_]
        for name, all_ in lists.items()
    }
    with pytest.raises(RuntimeError, match=f"^{operation}: {words}"):
        run(operation, lists, **options)
    for name, tensors in before.items():
        kept = [
            (old, new) for old, new in zip(tensors, lists[name], strict=True) if old is not None
        ]
        assert_same({name: [new for _, new in kept]}, {name: [old for old, _ in kept]})


NARROW = "must be Float or BFloat16, got"
BESIDE = "must be BFloat16 or Byte beside first moments of Char, got"
SIZES = r"must be of sizes \[64\], got \[32\]"
NOT_BYTES = "must be Byte and contiguous, got"
BLOCKS = [("adam_", "q8s"), ("lion_", "q8m"), ("sgd_", "q8m")]
# The operation, its code, what is changed of the second tensor of a list, and what the error says.
WRONG = [
    ("lion_", "q8m", "exp_avgs", Tensor.char, f"{NARROW} Char"),
    ("sgd_", "q8m", "momentum_buffers", Tensor.char, f"{NARROW} Char"),
    ("sgd_", "q8m", "momentum_buffers", lambda t: t[:GROUP], SIZES),
    ("adam_", "q8h", "exp_avgs", Tensor.byte, f"{NARROW} Byte"),
    ("adam_", "q8s", "exp_avgs", lambda t: t[:GROUP], SIZES),
    ("adam_", "q8s", "exp_avg_sqs", Tensor.char, f"{BESIDE} Char"),
    ("adam_", "q8h", "exp_avg_sqs", Tensor.float, f"{BESIDE} Float"),
    ("adam_", "q8h", "exp_avg_sqs", Tensor.half, f"{BESIDE} Half"),
    *(
        (*block, "exponents", change, words)
        for block in BLOCKS
        for change, words in (
            (lambda t: t[:0], "must be of 2 elements, got 0"),
            (lambda t: t.repeat(2), "must be of 2 elements, got 4"),
            (Tensor.char, f"{NOT_BYTES} Char"),
            (Tensor.float, f"{NOT_BYTES} Float"),
            (lambda t: t.repeat_interleave(2)[::2], f"{NOT_BYTES} Byte"),
            (lambda t: t[:1].expand(2), f"{NOT_BYTES} Byte"),
            (lambda t: t.to("meta"), "must be on cpu, got meta"),
            (Tensor.to_sparse, "must be .*[sS]parse"),
        )
    ),
]


@pytest.mark.parametrize(("operation", "code", "name", "change", "words"), WRONG)
def test_a_tensor_that_does_not_fit_is_named(operation, code, name, change, words):
    lists = lists_of(operation, code)
    lists[name][1] = change(lists[name][1])
    assert_refused(operation, lists, rf"{name}\[1\] {words}")


def first_moments_in_float(lists: Lists) -> None:
    lists["exp_avgs"][1] = lists["exp_avgs"][1].float()


def with_maxima(lists: Lists) -> None:
    lists["max_exp_avg_sqs"] = [torch.zeros(2 * GROUP, dtype=BF16) for _ in lists["params"]]


def with_exponents(lists: Lists) -> None:
    lists["exponents"] = [torch.ones(2, dtype=torch.uint8) for _ in lists["params"]]


def without_exponents(lists: Lists) -> None:
    del lists["exponents"]


def lacking_exponents(lists: Lists) -> None:
    lists["exponents"].pop()


def not_of_whole_groups(lists: Lists) -> None:
    for name in lists.keys() - {"steps", "exponents"}:
        lists[name][1] = torch.cat([lists[name][1], lists[name][1][:1]])


LISTS = [
    ("adam_", "q8s", first_moments_in_float, rf"exp_avg_sqs\[1\] {NARROW} Byte"),
    ("adam_", "q8h", with_maxima, rf"exp_avgs\[0\] {NARROW} Char"),
    ("adam_", "q8s", with_maxima, rf"exp_avgs\[0\] {NARROW} Char"),
    ("adam_", "q8h", with_exponents, r"exponents\[0\] must be None for moments without groups"),
]
LISTS_OF_BLOCKS = [
    (without_exponents, r"exponents\[0\] must be of 2 elements, got 0"),
    (lacking_exponents, "exponents must have 3 tensors, one for each of params, got 2"),
    (not_of_whole_groups, r"params\[1\] must be of a multiple of 32 elements for moments in group"),
]


@pytest.mark.parametrize(
    ("operation", "code", "change", "words"),
    LISTS + [(*block, *row) for block in BLOCKS for row in LISTS_OF_BLOCKS],
)
def test_lists_that_do_not_fit_are_named(operation, code, change, words):
    lists = lists_of(operation, code)
    change(lists)
    assert_refused(operation, lists, words)


@pytest.mark.parametrize(("operation", "code"), BLOCKS)
def test_exponents_that_share_memory_are_named(operation, code):
    for other in lists_of(operation, code).keys() - {"grads"}:
        lists = lists_of(operation, code)
        lists["exponents"][1] = lists[other][0].view(-1).view(torch.uint8)[:2]
        one = rf"(exponents\[1\]|{other}\[0\])"
        assert_refused(operation, lists, f"{one} is written and must not share memory with {one}")


@coded_steps
def test_codes_of_a_float64_parameter_are_named(operation, options, code):
    lists = lists_of(operation, code)
    if "dither" in options:
        lists["steps"] = [torch.zeros(()) for _ in lists["params"]]
    for name in ("params", "grads"):
        lists[name][1] = lists[name][1].double()
    dtype = "Byte" if code == "q8m" else "Char"
    words = rf"{FIRST_STATES[operation]}\[1\] must be Double, got {dtype}"
    assert_refused(operation, lists, words, **options)


def test_exponents_without_any_moments_are_named():
    lists = {name: [torch.ones(2 * GROUP)] for name in ("params", "grads")}
    lists["exponents"] = [torch.ones(2, dtype=torch.uint8)]
    with pytest.raises(
        RuntimeError, match=r"sgd_: exponents\[0\] must be None for moments without groups, got 2"
    ):
        run("sgd_", lists)
    lists["exponents"] = [torch.ones(0, dtype=torch.uint8)]  # stands for none
    run("sgd_", lists)


@pytest.mark.parametrize(("operation", "options", "code"), CODED_STEPS[::2])
def test_gradients_of_another_dtype_than_a_16_bit_parameter_are_named(operation, options, code):
    dtypes = Dtypes(BF16, F32, F32)
    lists = build_coded(operation, options, code, dtypes, [(2 * GROUP,)] * 3)
    for index in (0, 2):
        lists["grads"][index] = lists["grads"][index].bfloat16()
    words = r"grads\[1\] must be of the parameter's dtype with moments in 8 bits, BFloat16, got"
    assert_refused(operation, lists, f"{words} Float", **options)
    lists["grads"][1] = lists["grads"][1].double()
    assert_refused(operation, lists, f"{words} Double", **options)


@pytest.mark.parametrize(("operation", "code"), [("lion_", "q8m"), ("sgd_", "q8m")])
def test_a_dither_of_codes_asks_for_the_number_of_the_step(operation, code):
    lists = lists_of(operation, code)
    slow = {"beta2": 0.99} if operation == "lion_" else {"momentum": 0.99}
    words = r"steps\[0\] must be there to dither, got None"
    assert_refused(operation, lists, words, dither=True, **slow)
