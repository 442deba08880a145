"""Tests of ``number_codes``, which judges the engines: what ``number_checks.h`` leaves open."""

from __future__ import annotations

import pytest
import torch
from harness.awkward import BF16, F16, F32, INF, NAN
from harness.number_codes import (
    SLOPES,
    bits_of,
    dither_words,
    encode_q8h,
    encode_q8m,
    encode_q8s,
    from_bits,
    root_of_q8s,
    round_bfloat16,
    round_float16,
)
from harness.reference import same_bits
from torch import Tensor

# The least and the largest, and some of the dither itself.
FEW_WORDS = [0, 1 << 15, 0x5A5A5A5A, 0x80000000, 0xFFFF7FFF, 0xFFFFFFFF]
ROUNDINGS = {F16: round_float16, BF16: round_bfloat16}


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


# 16 bits.


@pytest.mark.parametrize("words", FEW_WORDS)
@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_dither_rounds_to_one_of_the_neighbours(dtype, words):
    special = [0.0, -0.0, INF, -INF, NAN, 2**-149, 2**-126, 65504, 65519, 65520, -65536, 2**-24]
    largest = torch.tensor([0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0xFFFFFFFF])
    bits = torch.randint(2**32, (2**16,), generator=torch.Generator().manual_seed(1))
    value = torch.cat([torch.tensor(special), from_bits(torch.cat([largest, bits]), F32)])
    rounded = ROUNDINGS[dtype](value, torch.full(value.shape, words))
    toward_zero = ROUNDINGS[dtype](value, torch.zeros(value.shape, dtype=torch.int64))
    added = bits_of(rounded) - bits_of(toward_zero)
    assert set(added[~value.isnan()].tolist()) <= ({0} if words == 0 else {0, 1})
    is_below = toward_zero.double().abs() <= value.double().abs()
    assert is_below[value.abs() <= torch.finfo(dtype).max].all()
    assert torch.equal(rounded.isnan(), value.isnan())
    negative = ROUNDINGS[dtype](-value, torch.full(value.shape, words))
    assert same_bits(negative[~value.isnan()], -rounded[~value.isnan()])


# 8 bits.


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
