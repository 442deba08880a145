"""The codes of low-memory states in plain torch: what every engine must store, bit for bit.

A number is rounded to nearest without ``words`` and by a dither with them: ``words`` are those of
``dither_words`` in the shape of the values. Integers that C++ keeps in 32 bits are int64 here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.edge_shapes import INF, NAN

LOW_32_BITS = 0xFFFFFFFF

# The dither: a phase that looks random in the element and a slope in the step. Multiples of a slope
# fill the unit interval evenly. Those of parameters, "lion" and second moments are fractions of the
# three-dimensional R-sequence, that of Adam's first moments is the golden section, that of SGD's
# momenta sqrt(2) - 1.
SLOPES = {
    "param": 0xD1B54A33,
    "first_moment": 0x61C88647,
    "momentum": 0x6A09E667,
    "lion": 0xABC98389,
    "second_moment": 0x8CB92BA7,
}


def dither_words(global_offset: int, numel: int, step: int, stream: str | int) -> Tensor:
    """The uint32 that dither ``numel`` elements of a tensor in one step, as int64.

    ``global_offset`` counts in the global tensor, so that shards round as the whole would.
    ``stream`` is a slope or the name of one.
    """
    element = global_offset + torch.arange(numel)
    eight = element >> 3  # neighbours share a hash
    folded = (eight ^ times(eight >> 32 & LOW_32_BITS, 0x9E3779B9)) & LOW_32_BITS
    phase = times(folded, 0x9E3779B1)
    phase = times(phase ^ (phase >> 16), 0x85EBCA6B)
    phase = times(phase ^ (phase >> 13), 0xC2B2AE35)
    phase = phase + times(element & LOW_32_BITS, 0x9E3779B9)
    slope = SLOPES[stream] if isinstance(stream, str) else stream
    return (phase + (step * slope & LOW_32_BITS)) & LOW_32_BITS


def times(value: Tensor, factor: int) -> Tensor:
    """The product in uint32: int64 overflows, but its lower half is right."""
    return value * factor & LOW_32_BITS


LAST_COUNT = 2**24


def counter_of(steps: int) -> Tensor:
    """The float32 that counts so many steps: beyond 2^24 each takes the next one there is."""
    counter = torch.tensor(float(min(steps, LAST_COUNT)))
    beyond = max(steps - LAST_COUNT, 0)
    return from_bits((bits_of(counter) + beyond).clamp(max=0x7F7FFFFF), torch.float32)


# Bits.


def bits_of(value: Tensor) -> Tensor:
    """The bits of float32, float16 or bfloat16, unsigned in int64."""
    size = value.element_size()
    signed = value.contiguous().view({2: torch.int16, 4: torch.int32}[size])
    return signed.long() & (1 << 8 * size) - 1


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of ``dtype`` that have these bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return signed(bits, 8 * dtype.itemsize).to(integers).view(dtype)


def signed(code: Tensor, width: int) -> Tensor:
    """The value of ``width`` bits in two's complement."""
    return code if width == 64 else code - (code >> (width - 1) << width)


def power_of_two(exponent: Tensor) -> Tensor:
    """Float64, in which a product with a float32 is exact."""
    return from_bits((exponent.long() + 1023) << 52, torch.float64)


# Every which float32 is tried; 1 tries all of them.
STRIDE = int(os.environ.get("AMP_EXT_NUMBER_STRIDE", "8009"))
# Ties of both 16-bit types, and numbers around their largest.
SPECIAL = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 0.0, INF, NAN]
SPECIAL += [65504.0, 65519.0, 65519.9, 65520.0, 65535.9, 65536.0, 3.39e38, 3.4e38, 3.4028235e38]


def numbers_of_all_sizes() -> Iterator[Tensor]:
    """Yields every STRIDE-th float32 by its bits, in parts of whole groups, and ``SPECIAL``."""
    special = torch.tensor([*SPECIAL, *(-number for number in SPECIAL)]).repeat(16)
    for first in range(0, 2**32, STRIDE << 19):
        bits = torch.arange(first, min(first + (STRIDE << 19), 2**32), STRIDE)
        yield torch.cat([from_bits(bits[: len(bits) // 64 * 64], torch.float32), special])


# 16 bits alone.


def rounded(value: Tensor, dtype: torch.dtype, words: Tensor | None = None) -> Tensor:
    """Float32 as bfloat16 or float16, in which NaN is 0x7fc0 or 0x7e00; as itself if asked."""
    if dtype == torch.float32:
        return value
    if words is None:
        bits = bits_of(value.to(dtype))
    elif dtype == torch.bfloat16:
        bits = (bits_of(value) + (words.view(value.shape) >> 16)) >> 16
    else:
        fine = fine_float16(value) + (words.view(value.shape) >> 19)
        bits = (fine >> 13).clamp(max=0x7C00) | (bits_of(value) >> 31 << 15)
    nan = 0x7FC0 if dtype == torch.bfloat16 else 0x7E00
    return from_bits(torch.where(value.isnan(), nan, bits), dtype)


def fine_float16(value: Tensor) -> Tensor:
    """The magnitudes of float32 as the bits that a float16 with 13 more would have."""
    # Below 2^-14 the distance of float16 numbers is constant, and what is finer is cut off.
    fixed_point = (value.abs().clamp(max=2**-14).double() * 2**37).nan_to_num().long()
    floating_point = (bits_of(value) & 0x7FFFFFFF) - (112 << 23)
    return torch.where(value.abs() < 2**-14, fixed_point, floating_point)


# 16 bits with 8 or 16 more that together are the master.


def split(
    value: Tensor, dtype: torch.dtype, low_bits: int, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Float32 as the parameter and what is below it, as it is kept: 16 bits as two bytes."""
    words = None if words is None else words.view(value.shape)
    of_dtype = _split_bfloat16 if dtype == torch.bfloat16 else _split_float16
    param, residual = of_dtype(value, low_bits, words)
    return param, residual.to(torch.int8) if low_bits == 8 else residual.short()[..., None].view(
        torch.uint8
    )


def join(param: Tensor, residual: Tensor) -> Tensor:
    """The master that ``split`` was given."""
    residual = residual if residual.dtype == torch.int8 else residual.view(torch.int16).squeeze(-1)
    return (_join_bfloat16 if param.dtype == torch.bfloat16 else _join_float16)(param, residual)


def _split_bfloat16(value: Tensor, low_bits: int, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """``low_bits`` is 16, which is exact, or 8, for which the upper 24 bits are kept."""
    bits = bits_of(value)
    param, residual = split_bits(bits if low_bits == 16 else drop_bits(bits, 8, words), low_bits)
    param = from_bits(torch.where(value.isnan(), 0x7FC0, param), torch.bfloat16)
    return param, residual.masked_fill(value.isnan(), 0)


def _join_bfloat16(param: Tensor, residual: Tensor) -> Tensor:
    low_bits = 8 * residual.element_size()
    bits = bits_of(param)
    joined = join_bits(bits & 0x7FFF, residual.long(), low_bits) << (16 - low_bits)
    return from_bits(joined | (bits >> 15 << 31), torch.float32)


def drop_bits(bits: Tensor, count: int, words: Tensor | None) -> Tensor:
    """Drops the last bits, to nearest even or with the first bits of ``words`` added."""
    to_even = (1 << (count - 1)) - 1 + (bits >> count & 1)
    return (bits + (to_even if words is None else words >> (32 - count))) >> count


def split_bits(bits: Tensor, low_bits: int) -> tuple[Tensor, Tensor]:
    """The upper bits, rounded by the lower ones, and those in two's complement.

    The top bit of the lower ones says both that they are a half or more and that one was added.
    """
    residual = signed(bits & ((1 << low_bits) - 1), low_bits)
    return (bits >> low_bits) + (residual < 0), residual


def join_bits(magnitude: Tensor, residual: Tensor, low_bits: int) -> Tensor:
    """The bits that ``split_bits`` was given, without the sign."""
    joined = ((magnitude - (residual < 0).long()) << low_bits) | (residual & ((1 << low_bits) - 1))
    # Nothing is stored like that: somebody wrote a zero into the parameter, and it is one.
    return torch.where((magnitude == 0) & (residual < 0), 0, joined)


def _split_float16(value: Tensor, low_bits: int, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Float32 as the parameter and what is missing; inf and NaN miss nothing.

    With 8 bits ``low`` are the bits below the parameter, as with bfloat16; so a dither carries the
    master over the middle of two parameters. With 16 bits it is a number, in units of 2^-15 of the
    parameter's last place, and the parameter is the nearest. The largest master with 8 bits is the
    last that rounds to 65504; with 16 bits whatever would round to inf becomes 65504.
    """
    is_finite = value.isfinite()
    if low_bits == 8:
        kept = drop_bits(fine_float16(value), 5, words).clamp(max=0x7BFF7F)
        magnitude, residual = split_bits(kept, 8)
        param = from_bits(magnitude | (bits_of(value) >> 31 << 15), torch.float16)
        param = torch.where(is_finite, param, rounded(value, torch.float16))
        return param, residual.masked_fill(~is_finite, 0)
    saturates = is_finite & (value.abs() >= 65520)
    value = torch.where(saturates, value.sign() * 65504, value)
    param = rounded(value, torch.float16)
    missing = torch.where(is_finite, value.double() - param.double(), 0.0)
    return param, (missing / last_place(param) * 2**15).round()


def _join_float16(param: Tensor, residual: Tensor) -> Tensor:
    """With 16 bits -0.0 becomes 0.0."""
    if residual.dtype == torch.int16:
        # A power of two has neighbours at half the distance below: what is nearer to one of them is
        # of another parameter, to which somebody has written this one.
        missing = residual.double() * 2**-15
        is_power = (bits_of(param) & 0x3FF == 0) & (param.abs() > 2**-14)
        least = torch.where(is_power & (param > 0), -0.25, -1.0)
        most = torch.where(is_power & (param < 0), 0.25, 1.0)
        return (param.double() + missing.clamp(least, most) * last_place(param)).float()
    bits = bits_of(param)
    joined = join_bits(bits & 0x7FFF, residual.long(), 8)
    normal = from_bits((joined << 5) + (112 << 23), torch.float32)
    magnitude = torch.where(joined < 1 << 18, joined.float() * 2**-32, normal)
    master = torch.where(bits >> 15 == 1, -magnitude, magnitude)
    return torch.where(param.isfinite(), master, param.float())


def last_place(param: Tensor) -> Tensor:
    """The distance of float16 numbers around ``param``, in float64."""
    return power_of_two((bits_of(param) >> 10 & 31).clamp(min=1) - 25)


# 8 bits with a power of two for each group of 32: sqrt(v), and a momentum.

GROUP = 32
# The exponent byte of a group in which something is inf or NaN. All of it decodes to NaN.
IS_NAN = 255
EIGHTH = 0x3E000000
# The first bits of 1/16, which roots are coded with: floats are linear near to 0 then.
SIXTEENTH = 0x3D800000 >> 17


def group_exponents(value: Tensor, added: int | Tensor, last: int, reserve: int = 0) -> Tensor:
    """A byte for each group: that of the power of two above its largest member, as float32 has it.

    Of the largest as it is rounded, by what is ``added`` to the bits: cut off at the last code
    below that, what grows by less than a code in a step would stand still. Beyond the ``last`` byte
    codes saturate. ``reserve`` is what the largest code lies below the unit.

    The shape is (shape[0], groups in one row), or (groups,) if there is one dimension.
    """
    rows = value.shape[:1] if value.dim() > 1 else ()
    shape = (*rows, math.prod(value.shape[len(rows) :]) // GROUP)
    bits = bits_of(value) & 0x7FFFFFFF
    lifted = torch.where(bits < 1 << 23, bits, (bits + added).clamp(max=0x7F7FFFFF))
    lifted = torch.where(bits >= 0x7F800000, bits, lifted)
    largest = lifted.view(-1, GROUP).amax(-1).view(shape)
    byte = ((largest + reserve >> 23) + 1).clamp(max=last)
    return torch.where(largest >= 0x7F800000, IS_NAN, byte).to(torch.uint8)


def scales(exponents: Tensor, shape: torch.Size) -> Tensor:
    """What each element of a tensor of ``shape`` is measured in, in float64."""
    each = exponents.long().view(-1, 1).expand(-1, GROUP).reshape(shape)
    return torch.where(each == IS_NAN, torch.nan, power_of_two(each - 127))


def encode_magnitude(scaled: Tensor, mantissa_bits: int, added: int | Tensor) -> Tensor:
    """Codes numbers from 0 to 1: four ranges of 2^mantissa_bits codes each.

    The first is linear, the others are octaves. Below 1/8 an eighth is added, so that floats are
    linear there. ``added`` goes to the bits that are dropped.
    """
    is_linear = scaled < 0.125
    bits = bits_of(torch.where(is_linear, scaled + 0.125, scaled)) - EIGHTH
    above = torch.where(is_linear, 0, 1 << mantissa_bits)
    return ((bits + added) >> (23 - mantissa_bits)).add(above).clamp(max=(4 << mantissa_bits) - 1)


def decode_magnitude(code: Tensor, mantissa_bits: int) -> Tensor:
    """What ``encode_magnitude`` was given, in float32."""
    linear = code.float() * 2 ** -(mantissa_bits + 3)
    above = EIGHTH + ((code - (1 << mantissa_bits)) << (23 - mantissa_bits))
    return torch.where(code < 1 << mantissa_bits, linear, from_bits(above, torch.float32))


def quantize_blockwise(
    moment: Tensor, code: str, words: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Float32 moments as codes of 8 bits, and the exponents of their groups."""
    words = None if words is None else words.view(moment.shape)
    return (_encode_q8s if code == "q8s" else _encode_q8m)(moment, words)


def dequantize_blockwise(codes: Tensor, exponents: Tensor, code: str) -> Tensor:
    """Undoes ``quantize_blockwise``; a second moment is its root times itself."""
    if code == "q8s":
        return root_of_q8s(codes, exponents).square()
    sign = 1.0 - (codes.long() >> 7) * 2
    scaled = sign * decode_magnitude(codes.long() & 127, 5)
    return (scaled * scales(exponents, codes.shape)).float()


def _encode_q8s(exp_avg_sq: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Float32 second moments as codes of their roots, and the exponents of the groups.

    A moment below 2^-126 counts as zero; any other has a code of at least 1, or a small number
    beside large ones would soon divide its first moment by eps.
    """
    root = root_of(exp_avg_sq)
    root = torch.where(root < 2**-63, 0.0, root)
    added = 1 << 16 if words is None else words >> 15
    # The square of 2^64 is no number, and the last code is 15/16 of a unit.
    exponents = group_exponents(root, added, 191, 0x100000)
    scaled = (root / scales(exponents, root.shape)).float().nan_to_num()
    code = (((bits_of(scaled + 0.0625) + added) >> 17) - SIXTEENTH).clamp(max=255)
    code = torch.where(root == 0, code, code.clamp(min=1))
    return code.masked_fill(is_nan_group(exponents, code), 0).to(torch.uint8), exponents


def root_of(exp_avg_sq: Tensor) -> Tensor:
    """The nearest float32, which ``sqrt`` of float32 does not always give on every machine."""
    return exp_avg_sq.double().sqrt().float()


def is_nan_group(exponents: Tensor, code: Tensor) -> Tensor:
    return scales(exponents, code.shape).isnan()


def root_of_q8s(code: Tensor, exponents: Tensor) -> Tensor:
    """The roots of the second moments, and the units of the first ones beside them."""
    scaled = from_bits((code.long() + SIXTEENTH) << 17, torch.float32) - 0.0625
    return (scaled * scales(exponents, code.shape)).float()


def _encode_q8m(momentum: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
    """Float32 momenta as sign and magnitude, and the exponents of the groups."""
    added = 1 << 17 if words is None else words >> 14
    # The inverse of 2^127 is no normal number.
    exponents = group_exponents(momentum, added, 253)
    scaled = (momentum.abs() / scales(exponents, momentum.shape)).float().nan_to_num()
    code = encode_magnitude(scaled, 5, added)
    code = code | (bits_of(momentum) >> 31 << 7)
    return code.masked_fill(is_nan_group(exponents, code), 0).to(torch.uint8), exponents


# 8 bits without a group: m in units of the power of two below sqrt(v), by the stored v.

# The bits of 128 plus those of 0.75, about which x and the ratio with its offset are mirrored.
MIRROR = 0x82400000
ORIGIN = 132.0
OFFSET = 0.734375
RATIO_IS_NAN = 127
# The widest distance of two codes, in units and beside (ratio + OFFSET)^2.
WIDEST_CODE = 1.52 / 97


def unit_below(root: Tensor) -> Tensor:
    """The powers of two at or below roots, 2^-64 at least; inf where a root is not finite."""
    bits = torch.where(root.isnan(), 0x7F800000, bits_of(root) & 0x7F800000)
    return from_bits(bits.clamp(min=0x1F800000), torch.float32)


def encode_q8h(exp_avg: Tensor, root: Tensor, words: Tensor | None = None) -> Tensor:
    """Float32 first moments in units of the powers of two below the roots of the second as stored.

    With ``words`` they are dithered. To nearest, those of a row without gradients would stop at a
    small code and move the row in the direction of its last gradient until the next; larger ones
    would stand still where beta1 is near to 1, or while gradients agree.
    """
    words = None if words is None else words.view(exp_avg.shape)
    sign = bits_of(exp_avg) >> 31
    total = (exp_avg.abs() / unit_below(root) + OFFSET).clamp(max=16.0)
    total = torch.where(total.isnan(), 16.0, total)
    x = from_bits(MIRROR - bits_of(total), torch.float32)
    added = 4096 if words is None else words >> 19
    place = (bits_of(1024 + ORIGIN - x) + added >> 13) & 127
    is_nan = ~(exp_avg.isfinite() & root.isfinite())
    is_nan |= (exp_avg.abs() / unit_below(root)).isinf()
    code = torch.where(is_nan, RATIO_IS_NAN, place | sign << 7)
    return code.to(torch.uint8).view(torch.int8)


def decode_q8h(code: Tensor, root: Tensor) -> Tensor:
    """The first moments; a negative zero is one."""
    bits = code.long() & 255
    x = ORIGIN - (bits & 127).float()
    ratio = from_bits(MIRROR - bits_of(x), torch.float32) - OFFSET
    moment = (1.0 - (bits >> 7) * 2) * ratio * unit_below(root)
    return torch.where(bits & 127 == RATIO_IS_NAN, torch.nan, moment)
