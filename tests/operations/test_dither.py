"""Numbers that are dithered when they are stored in 16 bits, beside a reference in plain torch."""

from __future__ import annotations

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
from harness.list_operations import (
    BUFFERS,
    DITHERED_STEPS,
    OPERATIONS,
    STEP,
    Lists,
    Options,
    build,
    run,
)
from harness.number_codes import SLOPES, counter_of, dither_words, round_bfloat16, round_float16
from harness.rows import rows
from torch import Tensor

from amp_ext import ops

every_dithered_step = pytest.mark.parametrize(STEP, DITHERED_STEPS)
narrow = pytest.mark.parametrize(
    "dtypes",
    rows(
        {
            "fp32": Dtypes(F32, F32, BF16),
            "fp16": Dtypes(F16, F16, BF16),
            "fp16-as-torch": Dtypes(F16, F32, F16),
            "fp16-master": Dtypes(F16, F16, BF16, master=True),
            "bf16": Dtypes(BF16, BF16, BF16),
            "bf16-state32": Dtypes(BF16, F32, F32),
            "bf16-master": Dtypes(BF16, BF16, BF16, master=True),
        }
    ),
)


def slope_of(operation: str, name: str, options: Options) -> int:
    """Returns the slope of the words that dither the tensors of a list, 0 where none does."""
    if name == "params":
        return SLOPES["param"]
    buffer, settings = BUFFERS[operation][name], OPERATIONS[operation]
    numbers = settings.hyperparameters | options
    decay = numbers[settings.decays[name]] if name in settings.decays else 0.0
    return buffer.dither_stride if buffer.role == "second moment" or decay >= 0.99 else 0


def wide(lists: Lists) -> Lists:
    """Returns the same numbers in float32, of which a step rounds nothing."""
    found = {name: [t.clone().float() for t in tensors] for name, tensors in lists.items()}
    if "master_params" in found:
        found["params"] = found.pop("master_params")
    return found


def rounded(value: Tensor, dtype: torch.dtype, words: Tensor | None) -> Tensor:
    if dtype == F32:
        return value
    words = None if words is None else words.reshape(value.shape)
    return (round_bfloat16 if dtype == BF16 else round_float16)(value, words)


@pytest.mark.parametrize(
    ("operation", "name", "stream"),
    [
        ("adam_", "exp_avgs", "first_moment"),
        ("adam_", "exp_avg_sqs", "second_moment"),
        ("lion_", "exp_avgs", "lion"),
        ("sgd_", "momentum_buffers", "momentum"),
    ],
)
def test_buffers_have_the_slopes_of_their_streams(operation, name, stream):
    assert BUFFERS[operation][name].dither_stride == SLOPES[stream]


@pytest.mark.parametrize("operation", BUFFERS)
def test_what_one_step_dithers_has_odd_slopes_of_its_own(operation):
    slopes = [each.dither_stride for each in BUFFERS[operation].values() if each.dither_stride]
    assert all(slope % 2 == 1 for slope in slopes)
    assert len({*slopes, SLOPES["param"]}) == len(slopes) + 1


@pytest.mark.parametrize("taken", [2, 2**24 + 4])
@every_dithered_step
@narrow
def test_numbers_are_those_of_the_reference(device, operation, options, dtypes, taken):
    lists = build(operation, options, SHAPES, dtypes, device, step=taken)
    exact = wide(lists)
    run(operation, lists, **options, first_elements=FIRST_ELEMENTS)
    run(operation, exact, **options)
    for name in lists.keys() - {"grads", "steps", "master_params"}:
        slope = slope_of(operation, name, options)
        if name == "params" and dtypes.master:
            slope = 0
        for index, tensor in enumerate(lists[name]):
            value = exact[name][index].cpu()
            words = dither_words(FIRST_ELEMENTS[index], value.numel(), taken + 1, slope)
            expected = rounded(value, tensor.dtype, words if slope else None)
            assert torch.equal(tensor.cpu(), expected), f"{name}[{index}] {tuple(value.shape)}"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_numbers_of_all_sizes_are_dithered(device, dtype):
    exponents = torch.arange(-150, 129, dtype=F64).repeat_interleave(40)
    numbers = (torch.exp2(exponents) * (1 + torch.rand(exponents.shape, dtype=F64))).float()
    special = [0.0, -0.0, INF, -INF, NAN, 65504.0, 65519.0, 65520.0, 65535.9, 65536.0, 3.4e38]
    grads = torch.cat([numbers, -numbers, torch.tensor(special)]).to(device)
    exact = torch.zeros_like(grads)
    ops.sgd_([exact], [grads], lr=1.0)
    for step in (1, 2, 1000, *range(2**24 - 2, 2**24 + 3), 2**24 + 2**23 + 1, 2**24 + 2**29):
        param = torch.zeros_like(grads, dtype=dtype)
        counter = counter_of(step - 1).to(device)
        ops.sgd_([param], [grads], steps=[counter], lr=1.0, dither=True)
        assert counter.item() == counter_of(step).item()
        words = dither_words(0, grads.numel(), step, "param")
        expected = rounded(exact.cpu(), dtype, words)
        nan = expected.isnan()
        assert torch.equal(param.cpu().isnan(), nan)
        assert torch.equal(param.cpu()[~nan].view(torch.int16), expected[~nan].view(torch.int16))


def test_a_dither_asks_for_the_number_of_the_step():
    param, grad = torch.ones(3, dtype=BF16), torch.ones(3)
    with pytest.raises(RuntimeError, match=r"sgd_: steps\[0\] must be there to dither, got None"):
        ops.sgd_([param], [grad], lr=1.0, dither=True)
    assert torch.equal(param, torch.ones(3, dtype=BF16))
    wide_param = torch.ones(3)
    ops.sgd_([wide_param], [grad], lr=1.0, dither=True)  # nothing is narrow
    assert torch.equal(wide_param, torch.zeros(3))


def test_first_elements_are_checked():
    def step(first_elements: list[int]) -> None:
        param, counter = torch.ones(3, dtype=BF16), torch.zeros(())
        numbers = {"lr": 1.0, "dither": True, "first_elements": first_elements}
        ops.sgd_([param], [torch.ones(3)], steps=[counter], **numbers)

    with pytest.raises(RuntimeError, match="first_elements must have 1 elements, as params, got 2"):
        step([0, 1])
    with pytest.raises(RuntimeError, match=r"first_elements\[0\] must be at least 0, got -1"):
        step([-1])
