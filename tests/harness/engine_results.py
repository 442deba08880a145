"""What the engines compute from awkward numbers, for comparison between them to the bit.

It lies beside the folders of tests, so that a fresh interpreter finds it by its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from harness.awkward import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FEW_DTYPES,
    INF,
    LAYOUT_SHAPE,
    NAN,
    Dtypes,
    misaligned,
    placed,
)
from harness.coded_lists import CODED_STEPS, encode
from harness.list_operations import DITHERED_STEPS, FEW_STEPS, STEPS, Lists, build, run
from harness.number_codes import GROUP, numbers_of_all_sizes

# Less than a vector, one and a tail, a tile, and more than one of every kernel; also misaligned.
SHAPES = [(size + start,) for size in (1, 7, 37, 2048, 8207) for start in (0, 1)]
STARTS = [0, 1] * 5
# The same in whole groups.
GROUPED_SHAPES = [(size * GROUP,) for size in (1, 2, 128, 259)]

Results = dict[str, Tensor]


def numbers(dtype: torch.dtype, device: torch.device, bad: float = 0.0) -> list[Tensor]:
    """Numbers of all sizes that a dtype has, from zeros of both signs and subnormals up to inf.

    Args:
        dtype: Of the tensors.
        device: Where they are.
        bad: Share of elements that are inf or NaN besides.
    """
    exponents = {F16: (-26, 17), BF16: (-60, 60)}.get(dtype, (-70, 60))
    tensors = []
    for shape, start in zip(SHAPES, STARTS, strict=True):
        drawn = torch.randn(shape, dtype=F64)
        drawn *= torch.exp2(torch.empty_like(drawn).uniform_(*exponents))
        drawn[torch.rand(shape) < 0.02] = 0.0
        drawn[torch.rand(shape) < 0.02] *= -0.0
        drawn[torch.rand(shape) < bad / 2] = INF
        drawn[torch.rand(shape) < bad / 2] = NAN
        tensors.append(drawn.to(dtype).to(device)[start:])
    return tensors


def coded_steps_of(
    operation: str,
    options: dict[str, Any],
    code: str,
    dtypes: Dtypes,
    device: torch.device,
    low_bits: int = 0,
) -> Lists:
    """The same with moments in codes, from tensors that are aligned and some that are not."""
    shapes = [(size + 5,) for (size,) in SHAPES] if code == "q8h" else GROUPED_SHAPES * 2
    lists = build(operation, options, shapes, dtypes, "cpu", step=2)
    for name, tensors in lists.items():
        for tensor in tensors if name != "steps" else []:
            tensor.mul_(torch.exp2(torch.empty(tensor.shape).uniform_(-12, 3)))
    if dtypes.master:
        lists["params"] = [master.to(dtypes.param) for master in lists["master_params"]]
    lists = encode(lists, operation, code)
    if low_bits:
        pairs = zip(lists["params"], lists["master_params"], strict=True)
        lists["master_params"] = [ops.split_master(*pair, low_bits) for pair in pairs]
    halfway = len(shapes) // 2
    for name, tensors in lists.items():
        tensors = [tensor.to(device) for tensor in tensors]
        moved = tensors[halfway:] if name == "steps" else map(one_element_on, tensors[halfway:])
        lists[name] = [*tensors[:halfway], *moved]
    scale = torch.tensor(3.0, device=device)
    starts = [index * 2**31 + index * GROUP for index in range(len(shapes))]
    for step in range(3):
        for grad in lists["grads"]:
            new = torch.randn(grad.shape) * torch.exp2(torch.empty(grad.shape).uniform_(-30, 9))
            new[torch.rand(grad.shape) < 0.01] = INF if step == 1 else NAN
            grad.copy_(new)
        # In the last step what is not finite spoils codes, and groups as a whole.
        skips = {"skip_nonfinite": step != 2, "write_back_grads": step == 1, "clip_value": 2.0}
        run(operation, lists, **options, **skips, grad_scale=scale, first_elements=starts)
    return lists


def one_element_on(tensor: Tensor) -> Tensor:
    """Moves a tensor off the boundaries of vectors; the lower halves of masters by two bytes."""
    if tensor.dim() == 2:
        return placed(tensor.view(torch.int16), misaligned).view(tensor.dtype)
    return placed(tensor, misaligned)


def gathered(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()


def steps_of(
    operation: str,
    options: dict[str, Any],
    dtypes: Dtypes,
    device: torch.device,
    bad: float = 0.0,
    low_bits: int = 0,
) -> Lists:
    """Takes three steps with gradients of any size, and returns all that they wrote.

    Args:
        operation: A name of ``OPERATIONS``.
        options: Its options; the scale and others that lie on the device are numbers here.
        dtypes: Of each parameter and what belongs to it.
        device: Where the steps are taken, from numbers that are drawn on the CPU.
        bad: Share of the gradients' elements that are inf or NaN.
        low_bits: Of split masters, in place of float32 ones.
    """
    numbers_on_device = {
        name: torch.tensor(options[name], device=device, dtype=F64 if "sum" in name else F32)
        for name in ("grad_scale", "found_inf", "sum_of_squares", "grad_norm")
        if name in options
    }
    lists = build(operation, options, SHAPES, dtypes, "cpu", step=2)
    tensors_of = {name: tensors for name, tensors in lists.items() if name != "steps"}
    for tensors in tensors_of.values():
        for tensor in tensors:
            tensor.mul_(torch.exp2(torch.empty(tensor.shape).uniform_(-12, 3)))
    if dtypes.master:
        tensors_of["params"] = [master.to(dtypes.param) for master in lists["master_params"]]
    for name, tensors in tensors_of.items():
        pairs = zip(tensors, STARTS, strict=True)
        lists[name] = [tensor.to(device)[start:] for tensor, start in pairs]
    if low_bits:
        pairs = zip(lists["params"], lists["master_params"], strict=True)
        lists["master_params"] = [ops.split_master(*pair, low_bits) for pair in pairs]
    if "steps" in lists:
        lists["steps"] = [step.to(device) for step in lists["steps"]]
    for _ in range(3):
        lists["grads"] = numbers(dtypes.grad, device, bad)
        run(operation, lists, **options | numbers_on_device)
    return lists | {"numbers": list(numbers_on_device.values())}


SCALED = {"grad_scale": 3.0, "found_inf": 0.0}
CLIPPED = {
    "grad_scale": 3.0,
    "clip_value": 0.5,
    "max_grad_norm": 1e3,
    "sum_of_squares": 1e8,
    "grad_norm": 0.0,
    "write_back_grads": True,
    "skip_nonfinite": True,
}
# Of tensors whose parts before are of all sizes, around one of 2^32 elements.
PARTS = SCALED | {
    "first_elements": [
        *(2**32 + offset for offset in (-5000, -7, 0, -4096)),
        *(0, 1, 7, 2**40, 9, 2**63 - 9000),
    ]
}


def results(device: torch.device = torch.device("cpu")) -> Results:  # noqa: B008
    """Runs every operation on every dtype, from the same numbers each time."""
    torch.manual_seed(0)
    found: Results = {}
    cases = [(row, dtypes, SCALED) for row in STEPS for dtypes in FEW_DTYPES]
    cases += [(row, dtypes, SCALED) for row in FEW_STEPS for dtypes in DTYPES]
    cases += [(row, dtypes, CLIPPED) for row in FEW_STEPS for dtypes in FEW_DTYPES]
    cases += [(row, dtypes, PARTS) for row in DITHERED_STEPS for dtypes in DTYPES]
    for row, dtypes, more in cases:
        operation, options = row.values
        bad = 0.1 if more is CLIPPED else 0.0
        lists = steps_of(operation, options | more, dtypes.values[0], device, bad)
        for name, tensors in lists.items():
            found[f"{row.id} {dtypes.id} {len(more)} options {name}"] = gathered(tensors)
    for row in DITHERED_STEPS:
        for dtype, state, low_bits in itertools.product((BF16, F16), (F32, BF16), (16, 8)):
            operation, options = row.values
            dtypes = Dtypes(dtype, dtype, state, master=True)
            lists = steps_of(operation, options | PARTS, dtypes, device, 0.1, low_bits)
            for name, tensors in lists.items():
                found[f"{row.id} {dtype} {state} {low_bits} lower {name}"] = gathered(tensors)
    for row in CODED_STEPS:
        for dtype, low_bits in itertools.product((F32, BF16, F16), (None, 0, 16, 8)):
            if dtype == F32 and low_bits is not None:
                continue
            operation, options, code = row.values
            dtypes = Dtypes(dtype, dtype, F32, master=low_bits is not None)
            lists = coded_steps_of(operation, options, code, dtypes, device, low_bits or 0)
            for name, tensors in lists.items():
                found[f"{row.id} {dtype} {low_bits} in codes {name}"] = gathered(tensors)
    sizes = next(numbers_of_all_sizes())[::8].to(device)
    for dtype, low_bits in itertools.product((BF16, F16), (0, 8, 16)):
        params = [torch.zeros_like(sizes, dtype=dtype)]
        lows = [ops.split_master(params[0], params[0].float(), low_bits)] if low_bits else None
        ops.sgd_(params, [sizes], master_params=lows, lr=-1.0, dither=True, timestep=7)
        found[f"all sizes {dtype} {low_bits}"] = gathered(
            [ops.join_master(params[0], lows[0])] if low_bits else params
        )
    for dtype in (F32, F64, F16, BF16):
        for inverse in (1 / 3, 2.0**-16, 2.0**-140, 1e30):
            grads, found_inf = numbers(dtype, device), torch.zeros((), device=device)
            ops.unscale_(grads, torch.tensor(inverse, device=device), found_inf)
            found[f"unscale {inverse} {dtype}"] = gathered(grads)
    for dtype, low_bits in ((F32, 0), (F16, 0), (BF16, 0), (F16, 16), (BF16, 16), (BF16, 8)):
        for average_dtype, decay in itertools.product((F32, BF16), (0.99, 0.3)):
            weights = numbers(F32, device, 0.1)
            params = [weight.to(dtype) for weight in weights]
            pairs = zip(params, weights, strict=True) if low_bits else ()
            masters = [ops.split_master(*pair, low_bits) for pair in pairs] or None
            averages = [each.to(average_dtype) for each in numbers(F32, device)]
            counters = torch.tensor([2, 2], device=device)
            for _ in range(2):
                ops.average_weights_(averages, params, counters, decay=decay, master_params=masters)
            found[f"average {average_dtype} {decay} {dtype} {low_bits}"] = gathered(averages)
    scale = torch.tensor(65536.0, device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    scales = []
    for step in range(60):
        found_inf = torch.tensor(float(step % 7 == 6), device=device)
        factors = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
        ops.update_scale_(scale, tracker, [found_inf], **factors)
        scales += [scale.clone(), tracker.float()]
    found["update_scale"] = gathered(scales)
    return found


# Squares that are 0, subnormal, just normal, just finite or inf in float32; and, from 1e-20 on and
# from 1e17 on, many of them that are more than one of them is.
EXTREMES = [
    *[(F32, value) for value in (1e-45, 1e-40, 1.2e-38, 1e-30, 1e-22, 4e-22, 1e-21, 1e-20)],
    *[(F32, value) for value in (1.1e-19, 1e-18, 1e17, 1e18, 1.8e19, 1.9e19, 1e30, 3e38)],
    *[(BF16, value) for value in (1e-40, 1e-30, 1e-22, 1e-20, 1.8e19, 3.38e38)],
    *[(F16, value) for value in (6e-8, 1e-5, 65504.0)],
    *[(F64, value) for value in (1e-150, 1e-40, 1e-22, 3e38, 1e39, 1e150)],
]


def lists_to_sum(device: torch.device | str) -> Iterator[list[Tensor]]:
    """Lists whose sums of squares depend on the order of the additions."""
    for dtype in (F32, F16, BF16, F64):
        yield [torch.randn(size, device=device).to(dtype) for size in (1, 100_001, 0, 7, 30_000)]
        yield [torch.randn(index % 40, device=device).to(dtype) for index in range(500)]
    yield [
        torch.randn(LAYOUT_SHAPE, device=device).permute(3, 1, 0, 2),
        torch.rand(5, 9, device=device).t(),
    ]
    spread = (10 ** (torch.rand(60_000, dtype=F64) * 76 - 38)).float().to(device)
    yield [spread, spread[1:], spread[::3]]
    yield [spread.double(), spread.bfloat16(), spread]


def sums_of_squares() -> Results:
    """Sums up awkward lists on the CPU; another device adds in another order."""
    torch.manual_seed(0)
    lists = [*lists_to_sum("cpu")]
    lists += [[torch.full((16385,), value, dtype=F64).to(dtype)] for dtype, value in EXTREMES]
    sums = []
    for tensors in lists:
        sums.append(torch.zeros((), dtype=F64))
        ops.check_finite_(tensors, torch.zeros(()), sum_of_squares=sums[-1])
    return {"sums of squares": torch.stack(sums)}


def cpu_results() -> Results:
    """Returns everything that every instruction set of the CPU computes alike."""
    return results() | sums_of_squares()
