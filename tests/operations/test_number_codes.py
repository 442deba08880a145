"""Tests of ``number_codes``, by which the engines are judged: what its codes promise."""

from __future__ import annotations

import math

import pytest
import torch
from harness.awkward import BF16, F16, F32, INF, NAN
from harness.number_codes import (
    GROUP,
    IS_NAN,
    OFFSET,
    RATIO_IS_NAN,
    SLOPES,
    WIDEST_CODE,
    bits_of,
    decode_q8h,
    decode_q8m,
    dither_words,
    encode_q8h,
    encode_q8m,
    encode_q8s,
    from_bits,
    join_bfloat16,
    join_float16,
    root_of_q8s,
    round_bfloat16,
    round_float16,
    split_bfloat16,
    split_float16,
)
from harness.reference import same_bits
from torch import Tensor

# The least and the largest, some of the dither itself, and nearest.
FEW_WORDS = [0, 1 << 15, 0x5A5A5A5A, 0x80000000, 0xFFFF7FFF, 0xFFFFFFFF]
EVERY_WORDS = [None, *FEW_WORDS]
ROUNDINGS = {F16: round_float16, BF16: round_bfloat16}
SPLITS = {F16: split_float16, BF16: split_bfloat16}
JOINS = {F16: join_float16, BF16: join_bfloat16}


def every_number(dtype: torch.dtype) -> Tensor:
    return from_bits(torch.arange(2**16), dtype)


def random_numbers(count: int = 2**20) -> Tensor:
    """Random bits, which are numbers of any exponent, with what is special."""
    bits = torch.randint(2**32, (count,), generator=torch.Generator().manual_seed(1))
    special = [0.0, -0.0, INF, -INF, NAN, 2**-149, 2**-126, 65504, 65519, 65520, -65536, 2**-24]
    largest = from_bits(torch.tensor([0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0xFFFFFFFF]), F32)
    return torch.cat([torch.tensor(special), largest, from_bits(bits, F32)])


def same(actual: Tensor, wanted: Tensor) -> bool:
    """Tells whether bits agree, where any NaN is as good as another."""
    both = actual.isnan() & wanted.isnan()
    return same_bits(actual.masked_fill(both, 0), wanted.masked_fill(both, 0))


def words_like(value: Tensor, words: int | None) -> Tensor | None:
    return None if words is None else torch.full(value.shape, words)


# The dither.


def word_by_hand(element: int, step: int, stream: str) -> int:
    low, high = (element >> 3) % 2**32, element >> 35
    word = (low ^ high * 0x9E3779B9 % 2**32) * 0x9E3779B1 % 2**32
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return (word + element * 0x9E3779B9 + step * SLOPES[stream]) % 2**32


@pytest.mark.parametrize("stream", SLOPES)
@pytest.mark.parametrize("first", [0, 7, 2**31 - 2, 2**32 - 2, 2**40 + 5, 2**62])
def test_words_are_those_of_integers_without_a_width(first, stream):
    for step in (0, 1, 3, 2**24, 2**40):
        wanted = [word_by_hand(first + i, step, stream) for i in range(5)]
        assert dither_words(first, 5, step, stream).tolist() == wanted


def test_a_shard_has_the_words_of_its_place_in_the_whole():
    whole = dither_words(0, 100, 9, "param")
    assert torch.equal(whole[37:], dither_words(37, 63, 9, "param"))


# 16 bits.


@pytest.mark.parametrize("words", EVERY_WORDS)
@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_a_number_of_16_bits_rounds_to_itself(dtype, words):
    numbers = every_number(dtype)
    value = numbers.float()
    assert same(ROUNDINGS[dtype](value, words_like(value, words)), numbers)


@pytest.mark.parametrize("words", FEW_WORDS)
@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_dither_rounds_to_one_of_the_neighbours(dtype, words):
    value = random_numbers()
    rounded = ROUNDINGS[dtype](value, words_like(value, words))
    toward_zero = ROUNDINGS[dtype](value, torch.zeros(value.shape, dtype=torch.int64))
    added = bits_of(rounded) - bits_of(toward_zero)
    assert set(added[~value.isnan()].tolist()) <= ({0} if words == 0 else {0, 1})
    is_below = toward_zero.double().abs() <= value.double().abs()
    assert is_below[value.abs() <= torch.finfo(dtype).max].all()
    assert torch.equal(rounded.isnan(), value.isnan())
    assert same(ROUNDINGS[dtype](-value, words_like(value, words)), -rounded)


# Masters of 24 and 32 bits.


def lows(dtype: torch.dtype, bits: int) -> Tensor:
    """Codes next to zero, to the ends and between."""
    top = 1 << 14 if dtype == F16 and bits == 16 else 1 << (bits - 1)
    each = [-top, -top + 1, -top // 2, -top // 2 + 1, -5, -1, 0, 1, 3, top // 2, top - 1]
    return torch.tensor(each).to({8: torch.int8, 16: torch.int16}[bits])


def every_pair(dtype: torch.dtype, bits: int) -> tuple[Tensor, Tensor]:
    """Each parameter with each of ``lows``."""
    low = lows(dtype, bits)
    return every_number(dtype).repeat_interleave(len(low)), low.repeat(2**16)


def test_16_and_16_bits_are_every_float32():
    value = random_numbers()
    param, low = split_bfloat16(value, 16)
    assert same(join_bfloat16(param, low), value)
    is_tie = (bits_of(value) & 0xFFFF) == 0x8000
    assert same(param[~is_tie], value.bfloat16()[~is_tie])
    away = from_bits((bits_of(value) >> 16) + 1, BF16)
    assert same(param[is_tie], away[is_tie])


def test_float16_and_16_bits_are_every_float32_of_its_normal_range():
    value = random_numbers()
    param, low = split_float16(value, 16)
    joined = join_float16(param, low)
    exact = (value.abs() >= 2**-16) & (value.abs() < 65520) | (value == 0) | ~value.isfinite()
    assert same(joined[exact].abs(), value[exact].abs())
    assert (joined - value).abs()[value.abs() < 2**-16].max() <= 2**-40
    is_large = value.isfinite() & (value.abs() >= 65520)
    assert torch.equal(joined[is_large], value[is_large].sign() * 65504)
    assert same(param[~is_large], value[~is_large].half())
    assert low.abs().max() <= 2**14


@pytest.mark.parametrize("words", EVERY_WORDS)
@pytest.mark.parametrize("dtype", SPLITS)
def test_8_more_bits_err_by_less_than_their_unit(dtype, words):
    value = random_numbers()
    value = value[(value.abs() >= 2**-14) & (value.abs() <= 65504)]
    joined = JOINS[dtype](*SPLITS[dtype](value, 8, words_like(value, words)))
    relative = ((joined.double() - value.double()) / value.double()).abs().max()
    bound = {BF16: 2**-16, F16: 2**-18}[dtype] * (1 if words is None else 2)
    assert relative <= bound


@pytest.mark.parametrize("words", EVERY_WORDS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", SPLITS)
def test_a_master_that_was_split_splits_the_same_again(dtype, bits, words):
    value = random_numbers(2**18)
    param, low = SPLITS[dtype](value, bits, words_like(value, words))
    settled = torch.full(value.shape, True)
    if dtype == F16 and bits == 16:
        # In the middle of two numbers a master of 16 and 16 bits has two names, and its negative
        # zero comes back as zero.
        settled = (low.abs() < 2**14) & ((param != 0) | (low != 0))
    param, low = param[settled], low[settled]
    again, low_again = SPLITS[dtype](JOINS[dtype](param, low), bits, words_like(param, words))
    assert same(again, param)
    assert torch.equal(low_again, low)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", SPLITS)
def test_no_parameter_written_from_outside_is_taken_far_away(dtype, bits):
    param, low = every_pair(dtype, bits)
    master = JOINS[dtype](param, low)
    is_zero = param == 0
    unit = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (master[is_zero].abs() <= unit / 2).all()
    finite = param.isfinite() & (param.abs() < torch.finfo(dtype).max) & ~is_zero
    higher = from_bits(bits_of(param.abs()) + 1, dtype).double() - param.abs().double()
    distance = (master.double() - param.double()).abs()
    assert (distance <= higher / 2)[finite].all()
    assert master[param.isnan()].isnan().all()


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 16), (BF16, 8), (F16, 8)])
def test_a_zero_with_a_negative_rest_stays_the_zero(dtype, bits):
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    for low in lows(dtype, bits)[:6]:
        assert low < 0
        assert same_bits(JOINS[dtype](zeros, low.expand(2)), zeros.float())


@pytest.mark.parametrize("words", EVERY_WORDS)
def test_a_large_master_of_float16_saturates(words):
    value = torch.tensor([65503.0, 65519.0, 65520.0, 7e4, 3e38])
    param, low = split_float16(value, 8, words_like(value, words))
    assert (param == 65504).all()
    # A unit is 32, and the last of its 256 parts below the middle is 15.875.
    assert (join_float16(param, low)[1:] >= 65518.875).all()
    assert (join_float16(param, low) <= 65504 + 15.875).all()
    assert same_bits(
        join_float16(*split_float16(-value, 8, words_like(value, words))), -join_float16(param, low)
    )


# 8 bits for second moments.


def q8s_states(exponent: int) -> tuple[Tensor, Tensor]:
    code = torch.arange(256).view(-1, 8)
    code = torch.cat([code, torch.full((32, GROUP - 8), 255)], dim=1).to(torch.uint8)
    return code, torch.full((32, 1), exponent, dtype=torch.uint8)


@pytest.mark.parametrize("exponent", [75, 100, 127, 160, 190, 191])
def test_second_moments_encode_to_their_codes_under_every_dither(exponent):
    code, exponents = q8s_states(exponent)
    root = root_of_q8s(code, exponents)
    moment = root * root
    assert (root.view(-1)[1:8] > root.view(-1)[:7]).all()
    for words in [*EVERY_WORDS, *dither_words(0, 50, 1, "second_moment").tolist()]:
        again, exponents_again = encode_q8s(moment, words_like(moment, words))
        assert torch.equal(again, code)
        assert torch.equal(exponents_again, exponents)


@pytest.mark.parametrize("words", EVERY_WORDS)
def test_no_positive_second_moment_decodes_to_zero(words):
    value = random_numbers().abs()
    value = value[value.isfinite()]
    moment = value[: len(value) // GROUP * GROUP].view(-1, GROUP)
    # The largest possible beside the least.
    moment[:, 0] = torch.finfo(F32).max
    moment[:9, 1] = 2.0**-126
    root = root_of_q8s(*encode_q8s(moment, words_like(moment, words)))
    assert torch.equal(root > 0, moment >= 2**-126)
    alone = torch.zeros(1, GROUP)
    alone[0, 3] = 2.0**-126
    root = root_of_q8s(*encode_q8s(alone, words_like(alone, words)))
    assert (root * root)[0, 3] > 0


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_second_moment_spoils_its_group_alone(bad):
    moment = torch.ones(4, 2 * GROUP)
    moment[2, 40] = bad
    code, exponents = encode_q8s(moment)
    assert exponents.tolist() == [[128, 128], [128, 128], [128, IS_NAN], [128, 128]]
    root = root_of_q8s(code, exponents)
    assert root[2, GROUP:].isnan().all()
    assert root.isnan().sum() == GROUP


def test_groups_of_zeros_are_zero():
    code, exponents = encode_q8s(torch.full((2, GROUP), 2.0**-127))
    assert (root_of_q8s(code, exponents) == 0).all()
    zeros = torch.zeros(2, GROUP, dtype=torch.uint8)
    assert (root_of_q8s(zeros, torch.zeros(2, 1, dtype=torch.uint8)) == 0).all()


@pytest.mark.parametrize("shift", [-40, -1, 1, 40])
def test_codes_do_not_depend_on_the_unit_of_the_gradients(shift):
    generator = torch.Generator().manual_seed(4)
    average = torch.randn(8, 64, generator=generator)
    moment = average.square() * torch.rand(8, 64, generator=generator) * 1e-2
    words = dither_words(0, 512, 3, "second_moment").view(8, 64)

    def codes(scale: float) -> list[Tensor]:
        code, exponents = encode_q8s(moment * scale**2, words)
        ratio = encode_q8h(average * scale, root_of_q8s(code, exponents))
        momentum, momentum_exponents = encode_q8m(average * scale)
        return [code, ratio, momentum, exponents.long(), momentum_exponents.long()]

    *coded, exponents, momentum_exponents = codes(1.0)
    *coded_again, exponents_again, momentum_exponents_again = codes(2.0**shift)
    assert all(map(torch.equal, coded, coded_again))
    assert torch.equal(exponents + shift, exponents_again)
    assert torch.equal(momentum_exponents + shift, momentum_exponents_again)


# 8 bits for first moments.


@pytest.mark.parametrize("root", [1e-30, 1e-6, 0.7, 1.0, 3e20])
def test_first_moments_encode_to_their_codes(root):
    places = torch.arange(RATIO_IS_NAN)
    code = torch.cat([places, places + 128]).to(torch.uint8).view(torch.int8)
    roots = torch.full(code.shape, root)
    average = decode_q8h(code, roots)
    for words in EVERY_WORDS:
        assert torch.equal(encode_q8h(average, roots, words_like(average, words)), code)
    positive, negative = average.chunk(2)
    assert (positive.diff() > 0).all()
    assert same_bits(negative, -positive)
    assert positive[-1] == 15.265625 * 2.0 ** max(math.floor(math.log2(root)), -64)


def test_an_update_of_the_ratio_errs_by_a_bounded_part():
    ratio = torch.linspace(-15, 15, 10001)
    error = (decode_q8h(encode_q8h(ratio, torch.ones(10001)), torch.ones(10001)) - ratio).abs()
    assert (error <= WIDEST_CODE / 2 * (ratio.abs() + OFFSET).square()).all()


def test_first_moments_beside_zero_inf_and_nan():
    average = torch.tensor([1.0, -1.0, 0.0, 0.0, NAN, INF, -INF, 1.0, 0.0, NAN, 1e-45, 1e9])
    root = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, INF, NAN, 1.0, 1e-30, 1.0])
    code = encode_q8h(average, root)
    bad = RATIO_IS_NAN
    assert code.tolist() == [126, -2, 0, 0, bad, bad, bad, bad, bad, bad, 0, 126]
    assert decode_q8h(code[4:10], torch.tensor([0.0, 1, 0, 1, 1, 1])).isnan().all()
    # The least unit is 2^-64.
    assert decode_q8h(code[:1], torch.zeros(1)).item() == 15.265625 * 2**-64


# 8 bits for momenta.


@pytest.mark.parametrize("exponent", [2, 100, 127, 252, 253])
def test_momenta_encode_to_their_codes_under_every_dither(exponent):
    code = torch.cat([torch.arange(256).view(-1, 16), torch.full((16, 16), 127)], dim=1)
    code = code.to(torch.uint8)
    exponents = torch.full((16, 1), exponent, dtype=torch.uint8)
    momentum = decode_q8m(code, exponents)
    for words in EVERY_WORDS:
        again, exponents_again = encode_q8m(momentum, words_like(momentum, words))
        assert torch.equal(again, code)
        assert torch.equal(exponents_again, exponents)


def test_momenta_round_to_the_nearest_code():
    codes = torch.arange(128).view(-1, 16)
    codes = torch.cat([codes, torch.full((8, 16), 127)], dim=1).to(torch.uint8)
    grid = decode_q8m(codes, torch.full((8, 1), 127, dtype=torch.uint8))[:, :16].reshape(-1)
    assert (grid.diff() > 0).all()
    value = torch.linspace(0, float(grid[-1]), 2**14).view(-1, 16)
    together = torch.cat([value, torch.full((len(value), 16), float(grid[-1]))], dim=1)
    decoded = decode_q8m(*encode_q8m(together))[:, :16].reshape(-1)
    nearest = (value.view(-1, 1) - grid).abs().min(dim=1).values
    assert torch.allclose((decoded - value.view(-1)).abs(), nearest, rtol=0, atol=1e-7)


def test_momenta_at_both_ends_of_float32():
    huge = torch.zeros(2, GROUP)
    huge[0, 0], huge[0, 1], huge[1, 0] = 3e38, -1e38, 2.0**-127
    decoded = decode_q8m(*encode_q8m(huge))
    # 2^126 is the last unit whose inverse is a normal number.
    assert decoded[0, :2].tolist() == [2.0**126 * (1 - 2**-6), -(2.0**126) * (1 - 2**-6)]
    assert decoded[1, 0] == huge[1, 0]
    for bad in (NAN, INF, -INF):
        huge[0, 5] = bad
        code, exponents = encode_q8m(huge)
        assert exponents[0, 0] == IS_NAN
        assert decode_q8m(code, exponents)[0].isnan().all()
        assert decode_q8m(code, exponents)[1].isfinite().all()
