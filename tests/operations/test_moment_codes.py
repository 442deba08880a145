"""States that are converted to codes of 8 bits and back, beside a reference in plain torch."""

from __future__ import annotations

import pytest
import torch
from harness.awkward import F32, F64, INF, LAYOUT_SHAPE, LAYOUTS, NAN, SHAPES, placed, threads
from harness.number_codes import (
    GROUP,
    IS_NAN,
    decode_q8h,
    decode_q8m,
    encode_q8h,
    encode_q8m,
    encode_q8s,
    root_of,
    root_of_q8s,
)
from harness.reference import same_bits
from torch import Tensor

from amp_ext import ops

ENCODERS = {"q8s": encode_q8s, "q8m": encode_q8m}
every_code = pytest.mark.parametrize("code", ENCODERS)
# Rows of whole groups, none and some, and more than one thread takes.
GROUPED_SHAPES = [
    (0, GROUP),
    (1, GROUP),
    (3, 2, 16),
    (5, 0),
    (7, 4, 8, 3),
    (3, 4096),
    (40, 33 * GROUP),
]


def decoded(codes: Tensor, exponents: Tensor, code: str) -> Tensor:
    if code == "q8m":
        return decode_q8m(codes, exponents)
    root = root_of_q8s(codes, exponents)
    return root * root


def of_all_sizes(*, spread: bool) -> Tensor:
    """Rows of 64 numbers of all exponents: each row of its own one, or all in every row."""
    exponents = torch.arange(-149, 128, dtype=F64).repeat_interleave(64)
    numbers = torch.exp2(exponents) * (1 + torch.rand(exponents.shape, dtype=F64))
    if spread:
        numbers = numbers[torch.randperm(len(numbers))]
    return numbers.float().view(-1, 2 * GROUP)


def awkward_numbers(code: str) -> Tensor:
    """The same, zeros and the largest number, and all with some zeros, inf or NaN among them."""
    found = torch.cat([of_all_sizes(spread=False), of_all_sizes(spread=True)])
    found = torch.cat(
        [found, torch.zeros(2, 2 * GROUP), torch.full((2, 2 * GROUP), torch.finfo(F32).max)]
    )
    spoilt = [found.clone() for _ in range(3)]
    for numbers, special in zip(spoilt, (INF, NAN, 0.0), strict=True):
        numbers[torch.rand(numbers.shape) < 0.005] = special
    found = torch.cat([found, *spoilt])
    if code == "q8m":
        found = torch.where(torch.rand(found.shape) < 0.5, -found, found)
    return found


@every_code
def test_groups_of_awkward_numbers_are_those_of_the_reference(device, code):
    numbers = awkward_numbers(code)
    there = numbers.to(device)
    codes, exponents = ops.encode_groups(there, code)
    wanted, wanted_exponents = ENCODERS[code](numbers)
    assert codes.device == exponents.device == there.device
    assert same_bits(exponents, wanted_exponents)
    assert same_bits(codes, wanted)
    assert 100 < (wanted_exponents == IS_NAN).sum() < wanted_exponents.numel() - 100
    found = ops.decode_groups(codes, exponents, code)
    expected = decoded(wanted, wanted_exponents, code)
    assert torch.equal(found.isnan().cpu(), expected.isnan())
    finite = ~expected.isnan()
    assert same_bits(found.cpu()[finite], expected[finite])
    again = ops.encode_groups(found, code)
    # A second moment that was rounded down from 2^-126 counts as 0.
    is_kept = (expected == 0) | (expected.abs() >= 2.0**-126) | (torch.tensor(code == "q8m"))
    groups = (is_kept | expected.isnan()).view(-1, GROUP).all(1)
    assert groups.sum() > 0.9 * len(groups)
    assert same_bits(again[0].cpu().view(-1, GROUP)[groups], wanted.view(-1, GROUP)[groups])
    assert same_bits(again[1].cpu().view(-1)[groups], wanted_exponents.view(-1)[groups])


@every_code
def test_every_code_is_decoded_with_every_exponent(device, code):
    # No group has the exponent of subnormal numbers.
    codes = torch.arange(256).to(torch.uint8).repeat(255, 1)
    exponents = torch.arange(1, 256).to(torch.uint8).view(-1, 1).repeat(1, 8)
    found = ops.decode_groups(codes.to(device), exponents.to(device), code).cpu()
    expected = decoded(codes, exponents, code)
    assert same_bits(found[:-1], expected[:-1])
    assert not found[-1].isfinite().any()  # none but code 0 is ever stored with that exponent
    assert found[-1, 0].isnan()


def test_awkward_ratios_are_those_of_the_reference(device):
    second = torch.cat([awkward_numbers("q8s").view(-1), torch.tensor([0.0, INF, NAN, 1e-45, 1.0])])
    root = root_of(second)
    exponents = torch.empty(len(second), dtype=F64).uniform_(-12, 5)
    first = (root * torch.exp2(exponents).float()) * torch.randn(len(second)).sign()
    anything = awkward_numbers("q8m").view(-1)[torch.randperm(len(second) - 5)]
    for moment in (first, torch.cat([anything, torch.tensor([0.0, INF, NAN, -0.0, -INF])])):
        there = moment.to(device)
        codes = ops.encode_ratios(there, second.to(device))
        wanted = encode_q8h(moment, root)
        assert codes.device == there.device
        assert same_bits(codes, wanted)
        found = ops.decode_ratios(codes, second.to(device)).cpu()
        expected = decode_q8h(wanted, root)
        nan = expected.isnan()
        assert nan.any()
        assert torch.equal(found.isnan(), nan)
        assert torch.equal(found[~nan], expected[~nan])
        again = ops.encode_ratios(found, second)
        assert same_bits(again, wanted)


def test_ratios_of_any_shape_are_coded(device):
    for shape in [*SHAPES, (0, 3), (7, 5), (100_003,)]:
        first, second = torch.randn(shape), torch.rand(shape) + 0.01
        codes = ops.encode_ratios(first.to(device), second.to(device))
        wanted = encode_q8h(first, root_of(second))
        assert same_bits(codes, wanted)
        found = ops.decode_ratios(codes, second.to(device))
        assert same_bits(found, decode_q8h(wanted, root_of(second)).view(shape))


@every_code
def test_groups_of_any_shape_are_coded(device, code):
    for shape in GROUPED_SHAPES:
        moment = torch.rand(shape) + 0.01
        for count in (1, 3):
            with threads(count):
                codes, exponents = ops.encode_groups(moment.to(device), code)
                found = ops.decode_groups(codes, exponents, code)
            assert exponents.shape == (shape[0], moment[:1].numel() // GROUP if shape[0] else 1)
            if moment.numel() == 0:
                assert found.shape == codes.shape == shape
                continue
            wanted = ENCODERS[code](moment)
            assert same_bits(codes, wanted[0])
            assert same_bits(exponents, wanted[1])
            assert same_bits(found, decoded(*wanted, code))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ratios_in_any_layout_are_coded(device, layout):
    first, second = torch.randn(LAYOUT_SHAPE), torch.rand(LAYOUT_SHAPE) + 0.01
    wanted = encode_q8h(first, root_of(second))
    expected = decode_q8h(wanted, root_of(second))
    sides = [(placed(first, layout), second), (first, placed(second, layout))]
    for moment, beside in [*sides, (placed(first, layout), placed(second, layout))]:
        codes = ops.encode_ratios(moment.to(device), beside.to(device))
        assert same_bits(codes, wanted)
        assert codes.stride() == torch.empty_like(moment).stride()
        for stored in (codes, placed(codes, layout)):
            assert same_bits(ops.decode_ratios(stored, beside.to(device)), expected)


ROWS = {name: layout for row in LAYOUTS for name, layout in [(row.id, row.values[0])]}
del ROWS["transposed"]  # whose rows are not in one piece of memory


@every_code
@pytest.mark.parametrize("layout", ROWS.values(), ids=ROWS)
def test_groups_are_in_the_order_of_memory_within_a_row(device, code, layout):
    moment = torch.rand(3, 8, 12, 40) + 0.01
    there = placed(moment, layout)
    strides = torch.empty_like(there).stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    codes, exponents = ops.encode_groups(there.to(device), code)
    wanted = ENCODERS[code](moment.permute(order).contiguous())
    assert same_bits(codes.permute(order), wanted[0])
    assert same_bits(exponents, wanted[1])
    found = ops.decode_groups(codes, exponents, code)
    assert same_bits(found.permute(order), decoded(*wanted, code))
    strided = torch.stack([exponents, exponents], dim=-1)[..., 0]
    assert same_bits(ops.decode_groups(codes, strided, code), found)


FLOATS = torch.ones(2, GROUP)
CODES = torch.ones(2, GROUP, dtype=torch.uint8)
RATIOS = torch.ones(2, GROUP, dtype=torch.int8)
EXPONENTS = torch.ones(2, 1, dtype=torch.uint8)
TWO_ROWS = r"of sizes \[2, 32\], got"
ROWS_OF_GROUPS = r"must have rows of a multiple of 32 elements, dimension 0 outermost, got sizes"


WRONG = [
    ("encode_ratios", (FLOATS.half(), FLOATS), f"moment must be Float {TWO_ROWS} Half"),
    ("encode_ratios", (FLOATS, FLOATS.double()), f"second_moment must be Float {TWO_ROWS} Double"),
    ("encode_ratios", (FLOATS, FLOATS[:1]), rf"second_moment must be Float {TWO_ROWS} Float of s"),
    ("encode_ratios", (FLOATS.to_sparse(), FLOATS), "moment must be .*[sS]parse"),
    ("decode_ratios", (CODES, FLOATS), f"codes must be Char {TWO_ROWS} Byte"),
    ("decode_ratios", (RATIOS, FLOATS.bfloat16()), f"second_moment must be Float {TWO_ROWS} BF"),
    ("decode_ratios", (RATIOS, FLOATS.view(-1)), f"second_moment must be Float {TWO_ROWS} Float"),
    ("encode_groups", (FLOATS, "q8h"), "code must be 'q8s' or 'q8m', got 'q8h'"),
    ("encode_groups", (FLOATS.half(), "q8s"), f"moment must be Float {TWO_ROWS} Half"),
    ("encode_groups", (torch.ones(4, 33), "q8s"), rf"moment {ROWS_OF_GROUPS} \[4, 33\] and strid"),
    ("encode_groups", (torch.ones(GROUP), "q8m"), rf"moment {ROWS_OF_GROUPS} \[32\] and strides"),
    ("encode_groups", (torch.ones(()), "q8m"), rf"moment {ROWS_OF_GROUPS} \[\]"),
    ("encode_groups", (torch.ones(GROUP, 64).t(), "q8m"), rf"moment {ROWS_OF_GROUPS} \[64, 32\]"),
    ("decode_groups", (CODES, EXPONENTS, ""), "code must be 'q8s' or 'q8m', got ''"),
    ("decode_groups", (RATIOS, EXPONENTS, "q8m"), f"codes must be Byte {TWO_ROWS} Char"),
    ("decode_groups", (CODES[:, 1:], EXPONENTS, "q8m"), rf"codes {ROWS_OF_GROUPS} \[2, 31\]"),
    (
        "decode_groups",
        (CODES, EXPONENTS.view(-1), "q8m"),
        r"exponents must be Byte .* of sizes \[2\]",
    ),
    (
        "decode_groups",
        (CODES, EXPONENTS.char(), "q8s"),
        r"exponents must be Byte .* \[2, 1\], got C",
    ),
]


@pytest.mark.parametrize(("operation", "arguments", "words"), WRONG)
def test_what_does_not_fit_is_named(operation, arguments, words):
    with pytest.raises(RuntimeError, match=f"^{operation}: {words}"):
        getattr(ops, operation)(*arguments)
