"""Numbers of all sizes as each kind of number stores them, beside a reference in plain torch.

`make test-numbers` takes every float32 there is.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from harness.edge_shapes import BF16, F16, LAYOUT_SHAPE, LAYOUTS, SHAPES, placed, threads
from harness.gradient_lists import equal
from harness.number_codes import (
    GROUP,
    IS_NAN,
    counter_of,
    decode_q8h,
    dequantize_blockwise,
    dither_words,
    encode_q8h,
    join,
    numbers_of_all_sizes,
    quantize_blockwise,
    root_of,
    rounded,
    split,
)
from harness.optimizer_cases import HALVES
from harness.reference import same_bits
from harness.rows import rows

from amp_ext import ops

formats = pytest.mark.parametrize(("dtype", "low_bits"), [*itertools.product((BF16, F16), (16, 8))])
every_code = pytest.mark.parametrize("code", ["q8s", "q8m"])
DITHERED_STEPS = (1, 2, 1000, *range(2**24 - 2, 2**24 + 3), 2**24 + 2**23 + 1, 2**24 + 2**29)
# A step of SGD from zero with a learning rate of -1 makes of each gradient its number.
AS_IT_IS = {"lr": -1.0}


@pytest.mark.parametrize("step", [None, *DITHERED_STEPS])
@HALVES
def test_a_16_bit_number_is_the_nearest_or_dithered(device, dtype, step):
    for numbers in numbers_of_all_sizes():
        param, grad = torch.zeros_like(numbers, dtype=dtype).to(device), numbers.to(device)
        if step is None:
            master = torch.zeros_like(grad)
            ops.sgd_([param], [grad], master_params=[master], **AS_IT_IS)
            assert equal(master, numbers + 0.0)
            words = None
        else:
            counter = counter_of(step - 1).to(device)
            ops.sgd_([param], [grad], steps=[counter], dither=True, **AS_IT_IS)
            assert counter.item() == counter_of(step).item()
            words = dither_words(0, len(numbers), step, "param")
        # That of a zero is the one sign that does not come through a step.
        assert equal(param, rounded(numbers + 0.0, dtype, words))


@pytest.mark.parametrize("step", [None, 7])
@formats
def test_a_master_is_split_and_stays_as_it_is(device, dtype, low_bits, step):
    dither = {} if step is None else {"dither": True, "timestep": step}
    for numbers in numbers_of_all_sizes():
        words = None if step is None else dither_words(0, len(numbers), step, "param")
        param, residual = (
            part.to(device) for part in split(torch.zeros_like(numbers), dtype, low_bits)
        )
        ops.sgd_([param], [numbers.to(device)], master_params=[residual], **AS_IT_IS, **dither)
        wanted, wanted_residual = split(numbers + 0.0, dtype, low_bits, words)
        assert equal(param, wanted)
        assert same_bits(residual, wanted_residual)
        masters = join(wanted, wanted_residual)
        assert equal(ops.join_fp32(param, residual), masters)
        ops.sgd_([param], [torch.zeros_like(param)], master_params=[residual], lr=0.0, **dither)
        assert equal(ops.join_fp32(param, residual), masters)


@formats
def test_every_parameter_with_every_kind_of_lower_part_is_joined(device, dtype, low_bits):
    """A step of SGD without a gradient leaves each pair that can come from a master as it is."""
    residuals = torch.cat([torch.arange(-128, 128), torch.randint(-(2**15), 2**15, (64,))])
    residuals = (
        (residuals * 129).clamp(-(2**15), 2**15 - 1) if low_bits == 16 else torch.arange(-128, 128)
    )
    bits = torch.arange(2**16)[:: 7 if low_bits == 8 else 9].to(torch.int16)
    params = bits.view(dtype).repeat_interleave(len(residuals))
    residuals = residuals.repeat(len(bits))
    residuals = (
        residuals.to(torch.int8) if low_bits == 8 else residuals.short()[:, None].view(torch.uint8)
    )
    param, residual = params.to(device, copy=True), residuals.to(device, copy=True)
    ops.sgd_([param], [torch.zeros_like(param)], master_params=[residual], lr=0.0)
    master = join(params, residuals)
    expected, expected_residual = split(master, dtype, low_bits)
    assert equal(param, expected)
    assert same_bits(residual[~master.isnan()], expected_residual[~master.isnan()])


@pytest.mark.parametrize("spread", [False, True], ids=["like-numbers", "all-sizes-in-a-group"])
@every_code
def test_groups_are_those_of_the_reference(device, code, spread):
    for numbers in numbers_of_all_sizes():
        numbers = numbers[torch.randperm(len(numbers))] if spread else numbers
        moment = (numbers.abs() if code == "q8s" else numbers).view(-1, 2 * GROUP)
        moment = torch.cat([moment, torch.where(moment.isfinite(), moment, 0.0)])
        codes, exponents = ops.quantize_blockwise(moment.to(device), code)
        wanted, wanted_exponents = quantize_blockwise(moment, code)
        assert codes.device == exponents.device == device
        assert same_bits(exponents, wanted_exponents)
        assert same_bits(codes, wanted)
        found, expected = (
            ops.dequantize_blockwise(codes, exponents, code),
            dequantize_blockwise(wanted, wanted_exponents, code),
        )
        assert equal(found, expected)
        # A second moment that was rounded down from 2^-126 counts as 0.
        is_kept = (expected == 0) | (expected.abs() >= 2.0**-126) | torch.tensor(code == "q8m")
        groups = (is_kept | expected.isnan()).view(-1, GROUP).all(1)
        again, again_exponents = (each.cpu() for each in ops.quantize_blockwise(found, code))
        assert same_bits(again.view(-1, GROUP)[groups], wanted.view(-1, GROUP)[groups])
        assert same_bits(again_exponents.view(-1)[groups], wanted_exponents.view(-1)[groups])


@every_code
def test_every_code_is_decoded_with_every_exponent(device, code):
    # No group has the exponent of subnormal numbers.
    codes = torch.arange(256).to(torch.uint8).repeat(255, 1)
    exponents = torch.arange(1, 256).to(torch.uint8).view(-1, 1).repeat(1, 8)
    found = ops.dequantize_blockwise(codes.to(device), exponents.to(device), code).cpu()
    assert exponents[-1, 0] == IS_NAN
    assert same_bits(found[:-1], dequantize_blockwise(codes, exponents, code)[:-1])
    assert not found[-1].isfinite().any()  # none but code 0 is ever stored with that exponent
    assert found[-1, 0].isnan()


SECOND_MOMENTS = {
    **{
        f"unit-{unit}": lambda first, unit=unit: torch.full_like(first, unit).square()
        for unit in (2.0**-64, 2.0**-25, 1.0, 2.0**63, torch.inf)
    },
    "like-size": lambda first: (first * torch.exp2(torch.rand(len(first)) * 17 - 12)) ** 2,
    "any-size": lambda first: first[torch.randperm(len(first))].abs(),
}


@pytest.mark.parametrize("second_of", rows(SECOND_MOMENTS))
def test_ratios_are_those_of_the_reference(device, second_of):
    for first in numbers_of_all_sizes():
        second = second_of(first)
        codes = ops.quantize_ratios(first.to(device), second.to(device))
        wanted = encode_q8h(first, root_of(second))
        assert codes.device == device
        assert same_bits(codes, wanted)
        found = ops.dequantize_ratios(codes, second.to(device))
        assert equal(found, decode_q8h(wanted, root_of(second)))
        assert same_bits(ops.quantize_ratios(found, second.to(device)), wanted)


def test_ratios_of_any_shape_are_coded(device):
    for shape in [*SHAPES, (0, 3), (7, 5), (100_003,)]:
        first, second = torch.randn(shape), torch.rand(shape) + 0.01
        codes = ops.quantize_ratios(first.to(device), second.to(device))
        wanted = encode_q8h(first, root_of(second))
        assert same_bits(codes, wanted)
        found = ops.dequantize_ratios(codes, second.to(device))
        assert same_bits(found, decode_q8h(wanted, root_of(second)).view(shape))


@every_code
def test_groups_of_any_shape_are_coded(device, code):
    """Rows of whole groups, none and some, and more than one thread takes."""
    for shape in [(0, GROUP), (1, GROUP), (3, 2, 16), (5, 0), (7, 4, 8, 3), (40, 33 * GROUP)]:
        moment = torch.rand(shape) + 0.01
        for count in (1, 3):
            with threads(count):
                codes, exponents = ops.quantize_blockwise(moment.to(device), code)
                found = ops.dequantize_blockwise(codes, exponents, code)
            assert exponents.shape == (shape[0], moment[:1].numel() // GROUP if shape[0] else 1)
            if moment.numel() == 0:
                assert found.shape == codes.shape == shape
                continue
            wanted = quantize_blockwise(moment, code)
            assert all(map(same_bits, (codes, exponents), wanted))
            assert same_bits(found, dequantize_blockwise(*wanted, code))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ratios_in_any_layout_are_coded(device, layout):
    first, second = torch.randn(LAYOUT_SHAPE), torch.rand(LAYOUT_SHAPE) + 0.01
    wanted = encode_q8h(first, root_of(second))
    expected = decode_q8h(wanted, root_of(second))
    sides = [(placed(first, layout), second), (first, placed(second, layout))]
    for moment, beside in [*sides, (placed(first, layout), placed(second, layout))]:
        codes = ops.quantize_ratios(moment.to(device), beside.to(device))
        assert same_bits(codes, wanted)
        assert codes.stride() == torch.empty_like(moment).stride()
        for kept in (codes, placed(codes, layout)):
            assert same_bits(ops.dequantize_ratios(kept, beside.to(device)), expected)


# Those whose rows are in one piece of memory.
@pytest.mark.parametrize("layout", [row for row in LAYOUTS if row.id != "transposed"])
@every_code
def test_groups_are_in_the_order_of_memory_within_a_row(device, code, layout):
    moment = torch.rand(3, 8, 12, 40) + 0.01
    there = placed(moment, layout)
    strides = torch.empty_like(there).stride()
    order = sorted(range(4), key=lambda dim: -strides[dim])
    codes, exponents = ops.quantize_blockwise(there.to(device), code)
    wanted = quantize_blockwise(moment.permute(order).contiguous(), code)
    assert same_bits(codes.permute(order), wanted[0])
    assert same_bits(exponents, wanted[1])
    found = ops.dequantize_blockwise(codes, exponents, code)
    assert same_bits(found.permute(order), dequantize_blockwise(*wanted, code))
    strided = torch.stack([exponents, exponents], dim=-1)[..., 0]
    assert same_bits(ops.dequantize_blockwise(codes, strided, code), found)
