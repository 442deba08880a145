"""Masters that are split into a 16-bit parameter and what is below it, beside a reference."""

from __future__ import annotations

import re

import pytest
import torch
from harness.awkward import (
    BF16,
    F16,
    F32,
    F64,
    FIRST_ELEMENTS,
    INF,
    NAN,
    SHAPES,
    Dtypes,
)
from harness.list_operations import DECAY, FEW_STEPS, STEP, Lists, assert_same, build, run
from harness.number_codes import (
    dither_words,
    join_bfloat16,
    join_float16,
    split_bfloat16,
    split_float16,
)
from torch import Tensor

from amp_ext import ops

few_steps = pytest.mark.parametrize(STEP, FEW_STEPS)
formats = pytest.mark.parametrize(
    ("dtype", "low_bits"), [(BF16, 16), (BF16, 8), (F16, 16), (F16, 8)]
)
states = pytest.mark.parametrize("state", [F32, BF16], ids=["state32", "statebf16"])


def in_memory(low: Tensor) -> Tensor:
    """The lower part as it is kept: 16 bits as two bytes."""
    return low.unsqueeze(-1).view(torch.uint8) if low.dtype == torch.int16 else low


def in_numbers(low: Tensor) -> Tensor:
    return low.view(torch.int16).squeeze(-1) if low.dtype == torch.uint8 else low


def split(master: Tensor, dtype: torch.dtype, low_bits: int, words: Tensor | None = None):
    words = None if words is None else words.reshape(master.shape)
    return (split_bfloat16 if dtype == BF16 else split_float16)(master, low_bits, words)


def join(param: Tensor, low: Tensor) -> Tensor:
    return (join_bfloat16 if param.dtype == BF16 else join_float16)(param, in_numbers(low))


def build_split(operation, options, shapes, dtype, low_bits, state, device, **more) -> Lists:
    """The lists of a step with split masters, which it takes as ``master_params``."""
    lists = build(
        operation, options, shapes, Dtypes(dtype, dtype, state, master=True), "cpu", **more
    )
    parts = [split(master, dtype, low_bits) for master in lists["master_params"]]
    lists["params"] = [param for param, _ in parts]
    lists["master_params"] = [in_memory(low) for _, low in parts]
    return {name: [tensor.to(device) for tensor in tensors] for name, tensors in lists.items()}


def joined(lists: Lists) -> Lists:
    """The same numbers with float32 parameters, of which a step rounds none."""
    pairs = zip(lists["params"], lists["master_params"], strict=True)
    found = {name: [t.clone() for t in tensors] for name, tensors in lists.items()}
    found["params"] = [join(param.cpu(), low.cpu()).to(param.device) for param, low in pairs]
    found["grads"] = [grad.float() for grad in lists["grads"]]
    del found["master_params"]
    return found


@few_steps
@formats
@states
def test_masters_are_those_of_the_reference(device, operation, options, dtype, low_bits, state):
    lists = build_split(operation, options, SHAPES, dtype, low_bits, state, device)
    exact = joined(lists)
    run(operation, lists, **options)
    run(operation, exact, **options)
    for index, master in enumerate(exact["params"]):
        param, low = split(master.cpu(), dtype, low_bits)
        what = f"{index} {tuple(master.shape)}"
        assert torch.equal(lists["params"][index].cpu(), param), what
        assert torch.equal(lists["master_params"][index].cpu(), in_memory(low)), what
    for name in exact.keys() - {"params", "grads"}:
        assert_same({name: lists[name]}, {name: exact[name]})


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("taken", [4, 2**24 + 6])
@states
def test_the_lower_byte_is_dithered(device, dtype, state, taken):
    numbers = DECAY | {"dither": True}
    lists = build_split("adam_", DECAY, SHAPES, dtype, 8, state, device, step=taken)
    exact = joined(lists)
    run("adam_", lists, **numbers, first_elements=FIRST_ELEMENTS)
    run("adam_", exact, **numbers, first_elements=FIRST_ELEMENTS)
    for index, master in enumerate(exact["params"]):
        words = dither_words(FIRST_ELEMENTS[index], master.numel(), taken + 1, "param")
        param, low = split(master.cpu(), dtype, 8, words)
        assert torch.equal(lists["params"][index].cpu(), param)
        assert torch.equal(lists["master_params"][index].cpu(), low)
    assert_same({"exp_avg_sqs": lists["exp_avg_sqs"]}, {"exp_avg_sqs": exact["exp_avg_sqs"]})


def of_all_sizes() -> Tensor:
    exponents = torch.arange(-149, 128, dtype=F64).repeat_interleave(50)
    numbers = (torch.exp2(exponents) * (1 + torch.rand(exponents.shape, dtype=F64))).float()
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25])
    largest = torch.tensor([65504.0, 65519.9, 65520.0, 65536.0, 3.39e38, 3.4e38, 3.4028235e38])
    special = torch.tensor([0.0, INF, NAN])
    positive = torch.cat([numbers, ties, largest, special])
    return torch.cat([positive, -positive])


@formats
def test_numbers_of_all_sizes_are_split(device, dtype, low_bits):
    """A step of SGD with a learning rate of -1 from zero makes of each gradient its master."""
    wanted = of_all_sizes()
    param = torch.zeros(wanted.shape, dtype=dtype, device=device)
    low = torch.zeros(*wanted.shape, *([2] if low_bits == 16 else []), dtype=torch.uint8)
    low = (low if low_bits == 16 else low.view(torch.int8)).to(device)
    ops.sgd_([param], [-wanted.to(device)], master_params=[low], lr=1.0)
    # -0 + 0 is 0: that of a zero is the one sign that does not come through a step
    expected, expected_low = split(wanted + 0.0, dtype, low_bits)
    nan = wanted.isnan()
    assert torch.equal(param.cpu().isnan(), nan)
    assert torch.equal(param.cpu()[~nan], expected[~nan])
    assert torch.equal(low.cpu(), in_memory(expected_low))


@formats
def test_every_parameter_with_every_kind_of_lower_part_is_joined(device, dtype, low_bits):
    """A step of SGD without a gradient leaves each pair that can come from a master as it is."""
    lows = torch.cat([torch.arange(-128, 128), torch.randint(-(2**15), 2**15, (64,))])
    lows = (lows * 129).clamp(-(2**15), 2**15 - 1) if low_bits == 16 else torch.arange(-128, 128)
    lows = lows.to(torch.int16 if low_bits == 16 else torch.int8)
    bits = torch.arange(2**16)[:: 7 if low_bits == 8 else 9].to(torch.int16)
    params = bits.view(dtype).repeat_interleave(len(lows))
    lows = lows.repeat(len(bits))
    param, low = params.clone().to(device), in_memory(lows.clone()).to(device)
    ops.sgd_([param], [torch.zeros_like(param)], master_params=[low], lr=0.0)
    master = join(params, lows)
    expected, expected_low = split(master, dtype, low_bits)
    nan = master.isnan()
    assert torch.equal(param.cpu().isnan(), expected.isnan())
    assert torch.equal(param.cpu()[~nan], expected[~nan])
    assert torch.equal(low.cpu()[~nan], in_memory(expected_low)[~nan])


@formats
def test_a_master_is_split_for_the_parameter_that_is_there(device, dtype, low_bits):
    master = torch.randn(1000, device=device)
    param = master.to(dtype)
    low = ops.split_master(param, master, low_bits)
    error = (ops.join_master(param, low) - master).abs() / master.abs()
    assert error.max().item() <= {16: 2**-24, 8: 2**-15}[low_bits]
    # A tie goes to even in torch and away from zero here: the nearest that the parameter carries.
    unit = 2.0**-7 if dtype == BF16 else 2.0**-10
    tie = torch.full((4,), 1 + unit / 2, device=device)
    down = tie.to(dtype)
    assert (down == 1).all()
    found = ops.join_master(down, ops.split_master(down, tie, low_bits))
    assert (found - tie).abs().max().item() <= unit * 2.0**-low_bits
    # A parameter that the master does not round to has been changed, and is its own master.
    other = torch.full((4,), 3.0, dtype=dtype, device=device)
    assert torch.equal(
        ops.join_master(other, ops.split_master(other, tie, low_bits)), other.float()
    )


FLAT, SQUARE, PAIRS = (torch.zeros(*size, dtype=torch.uint8) for size in ((3,), (3, 3), (3, 2)))
KINDS = "master_params[0] must be Float, Byte or Char, got"


@pytest.mark.parametrize(
    ("dtype", "low", "text", "more"),
    [
        (BF16, FLAT.long(), f"{KINDS} Long", {}),
        (BF16, FLAT.half(), f"{KINDS} Half", {}),
        (BF16, FLAT, "master_params[0] must be of sizes [3, 2], got [3]", {}),
        (BF16, torch.zeros(4, dtype=torch.int8), "must be of sizes [3], got [4]", {}),
        (BF16, SQUARE[:2].t(), "master_params[0] must have its last dimension in one piece", {}),
        (F32, PAIRS, "master_params[0] must be None for a parameter of Float", {}),
        (
            *(F16, PAIRS, "must be Float or BFloat16 with a split master, got Half"),
            {"momentum_buffers": [torch.zeros(3, dtype=F16)], "momentum": 0.9},
        ),
    ],
)
def test_a_lower_part_that_does_not_fit_is_named(dtype, low, text, more):
    param = torch.ones(3, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"^sgd_: .*{re.escape(text)}"):
        ops.sgd_([param], [torch.ones(3)], master_params=[low], lr=1.0, **more)
    assert torch.equal(param, torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "low_bits", "text"),
    [(F32, 16, "param must be Half or BFloat16"), (BF16, 4, "low_bits must be 16 or 8, got 4")],
)
def test_a_split_of_another_kind_is_refused(dtype, low_bits, text):
    with pytest.raises(RuntimeError, match=f"split_master: {text}"):
        ops.split_master(torch.ones(3, dtype=dtype), torch.ones(3), low_bits)
