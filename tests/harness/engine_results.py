"""What the engines compute from awkward numbers, for comparison between them to the bit.

It lies beside the folders of tests, so that a fresh interpreter finds it by its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext import ops
from harness.coded_lists import CODED_STEPS, encode
from harness.edge_numbers import few_edge_cases
from harness.edge_shapes import (
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
from harness.gradient_lists import (
    OPERATIONS,
    SUM_OF_SQUARES,
    GradientOperation,
    assert_right,
    spoiled,
)
from harness.list_operations import (
    DITHERED_STEPS,
    FEW_STEPS,
    STEPS,
    Lists,
    build,
    on_device,
    run,
)
from harness.number_codes import GROUP, numbers_of_all_sizes
from harness.optimizer_cases import bits_of

# Less than a vector, one and a tail, a tile, and more than one of every kernel; half misaligned.
SHAPES = [(size,) for size in (1, 7, 37, 2048, 8207)] * 2
# The same in whole groups.
GROUPED_SHAPES = [(size * GROUP,) for size in (1, 2, 128, 259)] * 2

Results = dict[str, Tensor]
Case = Callable[[torch.device], dict[str, list[Tensor]]]


def half_misaligned(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Returns copies on a device, the second half of them off the boundaries of vectors."""
    half = len(tensors) // 2
    return [t.to(device) for t in tensors[:half]] + [
        # The lower halves of masters by two bytes.
        placed(t.to(device).view(torch.int16), misaligned).view(t.dtype)
        if t.dim() == 2
        else placed(t.to(device), misaligned)
        for t in tensors[half:]
    ]


def numbers(
    dtype: torch.dtype, device: torch.device, bad: float = 0.0, shapes: Any = SHAPES
) -> list[Tensor]:
    """Numbers of all sizes that a dtype has, from zeros of both signs and subnormals up to inf.

    Args:
        dtype: Of the tensors.
        device: Where they are.
        bad: Share of elements that are inf or NaN besides.
        shapes: Of each.
    """
    exponents = {F16: (-26, 17), BF16: (-60, 60)}.get(dtype, (-70, 60))
    tensors = []
    for shape in shapes:
        drawn = torch.randn(shape, dtype=F64)
        drawn *= torch.exp2(torch.empty_like(drawn).uniform_(*exponents))
        drawn[torch.rand(shape) < 0.02] = 0.0
        drawn[torch.rand(shape) < 0.02] *= -0.0
        drawn[torch.rand(shape) < bad / 2] = INF
        drawn[torch.rand(shape) < bad / 2] = NAN
        tensors.append(drawn.to(dtype))
    return half_misaligned(tensors, device)


def three_steps(
    operation: str,
    options: dict[str, Any],
    dtypes: Dtypes,
    bad: float = 0.0,
    low_bits: int = 0,
    code: str = "",
) -> Case:
    """Returns a case of three steps with gradients of any size, and of all that they write.

    Args:
        operation: A name of ``OPERATIONS``.
        options: Its options; the scale and others that lie on the device are numbers here.
        dtypes: Of each parameter and what belongs to it.
        bad: Share of the gradients' elements that are inf or NaN.
        low_bits: Of split masters, in place of float32 ones.
        code: Of moments in 8 bits. What is not finite spoils codes in the last step.
    """

    def case(device: torch.device) -> Lists:
        numbers_on_device = on_device(options, device)
        shapes = GROUPED_SHAPES if code in ("q8s", "q8m") else SHAPES
        lists = build(operation, options, shapes, dtypes, "cpu", step=2)
        for name, tensors in lists.items():
            for tensor in tensors if name != "steps" else ():
                tensor.mul_(torch.exp2(torch.empty(tensor.shape).uniform_(-12, 3)))
        if dtypes.master:
            lists["params"] = [master.to(dtypes.param) for master in lists["master_params"]]
        lists = encode(lists, operation, code) if code else lists
        if low_bits:
            pairs = zip(lists["params"], lists["master_params"], strict=True)
            lists["master_params"] = [ops.split_fp32(*pair, low_bits) for pair in pairs]
        steps = {"steps": [t.to(device) for t in lists["steps"]]} if "steps" in lists else {}
        lists = {name: half_misaligned(tensors, device) for name, tensors in lists.items()} | steps
        more = {
            "global_offsets": [index * (2**31 + GROUP) for index in range(len(shapes))]
        } | options
        for step in range(3):
            lists["grads"] = numbers(dtypes.grad, device, bad, shapes)
            more |= numbers_on_device | ({"skip_nonfinite": False} if code and step == 2 else {})
            run(operation, lists, **more)
        return lists | {"numbers": list(numbers_on_device.values())}

    return case


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
    "global_offsets": [
        *(2**32 + offset for offset in (-5000, -7, 0, -4096)),
        *(0, 1, 7, 2**40, 9, 2**63 - 9000),
    ]
}
IN_CODES = {"grad_scale": 3.0, "clip_value": 2.0, "write_back_grads": True, "skip_nonfinite": True}


def all_sizes(dtype: torch.dtype, low_bits: int) -> Case:
    """Returns a case of a step from zero to numbers of all sizes."""

    def case(device: torch.device) -> Lists:
        sizes = next(numbers_of_all_sizes())[::8].to(device)
        params = [torch.zeros_like(sizes, dtype=dtype)]
        residuals = [ops.split_fp32(params[0], params[0].float(), low_bits)] if low_bits else None
        ops.sgd_(params, [sizes], master_params=residuals, lr=-1.0, dither=True, timestep=7)
        return {"params": params, "master_params": residuals or []}

    return case


def averaged(dtype: torch.dtype, low_bits: int, average_dtype: torch.dtype, decay: float) -> Case:
    def case(device: torch.device) -> Lists:
        masters = numbers(F32, device, 0.1)
        params = [each.to(dtype) for each in masters]
        pairs = zip(params, masters, strict=True)
        residuals = [ops.split_fp32(*pair, low_bits) for pair in pairs] if low_bits else None
        averages = [each.to(average_dtype) for each in numbers(F32, device)]
        weight, third, fourth = torch.tensor([1.0 - decay, 3.0, 4.0], dtype=F64, device=device)
        for count in (third, fourth):
            ops.average_params_(averages, params, weight, count, residuals=residuals)
        return {"averages": averages}

    return case


def looked_at(operation: GradientOperation, dtype: torch.dtype, factor: float = 1.0) -> Case:
    """Returns a case of an operation on gradients of which some elements are bad."""

    def case(device: torch.device) -> Lists:
        grads = [(factor * spoiled(shape, dtype, "cpu", 0.1)).to(dtype) for shape in SHAPES]
        grads = half_misaligned(grads, device)
        assert_right(operation, grads)
        return {"grads": grads}

    return case


def refreshed_masters(device: torch.device) -> Lists:
    """Changes some parameters behind their masters."""
    masters = half_misaligned([torch.randn(shape) for shape in SHAPES], device)
    params = [master.half() for master in masters]
    params[3] += 1
    ops.refresh_masters_(params, masters)
    return {"masters": masters}


def training(name: str, dtype: torch.dtype, guards: bool = False, **options: Any) -> Case:
    """Returns a case of our scaler over our optimizer, with an overflow on the way.

    A guard skips the last step.
    """

    def case(device: torch.device) -> Lists:
        def drawn() -> list[Tensor]:
            return half_misaligned([torch.randn(shape).to(dtype) for shape in SHAPES], device)

        params = [Parameter(value) for value in drawn()]
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}]
        optimizer = getattr(amp_ext.optim, name)(groups, lr=0.05, **options)
        guard = amp_ext.optim.NormGuard(warmup_steps=2)
        optimizer.norm_guard = guard if guards else None
        scaler = amp_ext.GradScaler(device.type, init_scale=8.0, growth_interval=2)
        scaler.scale(torch.ones((), device=device))
        scales = []
        for iteration in range(5):
            for param, grad in zip(params, drawn(), strict=True):
                param.grad = 64 * grad if guards and iteration == 4 else grad
            if iteration == 2:
                params[4].grad[7] = INF
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        outliers = torch.tensor(float(guard.stats(wait=True).outliers))
        states = [state for row in bits_of(optimizer) for state in row.values()]
        return {"states": states, "scales": [*scales, outliers]}

    return case


def cases() -> Iterator[tuple[str, Case]]:
    """Yields every operation on every dtype, by name."""
    others = [row for row in STEPS if row not in FEW_STEPS]
    rows = [(row, dtypes, SCALED) for row in others for dtypes in FEW_DTYPES]
    rows += [(row, dtypes, SCALED) for row in FEW_STEPS for dtypes in DTYPES]
    rows += [(row, dtypes, CLIPPED) for row in FEW_STEPS for dtypes in FEW_DTYPES]
    rows += [(row, dtypes, PARTS) for row in DITHERED_STEPS for dtypes in DTYPES]
    for row, dtypes, more in rows:
        operation, options = row.values
        bad = 0.1 if more is CLIPPED else 0.0
        name = f"{row.id} {dtypes.id} {len(more)} options"
        yield name, three_steps(operation, options | more, dtypes.values[0], bad)
    halves = (BF16, F16)
    for row in DITHERED_STEPS:
        operation, options = row.values
        for dtype, state, low_bits in itertools.product(halves, (F32, BF16), (16, 8)):
            dtypes = Dtypes(dtype, dtype, state, master=True)
            case = three_steps(operation, options | PARTS, dtypes, 0.1, low_bits)
            yield f"{row.id} {dtype} {state} {low_bits} lower", case
    for row in CODED_STEPS:
        operation, options, code = row.values
        for dtype, low_bits in [(F32, None), *itertools.product(halves, (None, 0, 16, 8))]:
            dtypes = Dtypes(dtype, dtype, F32, master=low_bits is not None)
            case = three_steps(operation, options | IN_CODES, dtypes, 0.02, low_bits or 0, code)
            yield f"{row.id} {dtype} {low_bits} in codes", case
    for dtype, low_bits in itertools.product(halves, (0, 8, 16)):
        yield f"all sizes {dtype} {low_bits}", all_sizes(dtype, low_bits)
    kinds = ((F32, 0), (F16, 0), (BF16, 0), (F16, 16), (BF16, 16), (BF16, 8))
    for kind, dtype, decay in itertools.product(kinds, (F32, BF16), (0.99, 0.3)):
        yield f"average {dtype} {decay} {kind}", averaged(*kind, dtype, decay)
    for operation, dtype in itertools.product(OPERATIONS, (F32, F64, *halves)):
        yield f"{operation.id or operation.name} {dtype}", looked_at(operation, dtype)
    yield "large squares", looked_at(SUM_OF_SQUARES, F32, 1e25)
    yield "refresh_masters", refreshed_masters
    yield from few_edge_cases()


def trainings() -> Iterator[tuple[str, Case]]:
    """Yields cases that a GPU has to repeat, not each set of instructions."""
    yield "training AdamW", training("AdamW", F16, guards=True)
    yield "training Adam", training("Adam", F32)
    yield "training SGD", training("SGD", BF16, momentum=0.9, dampening=0.1)


def results_of(name: str, case: Case, device: torch.device) -> Results:
    """Runs a case from the same numbers each time."""
    torch.manual_seed(0)
    lists = {key: tensors for key, tensors in case(device).items() if tensors}
    return {
        f"{name} {key}": torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
        for key, tensors in lists.items()
    }


def results(device: torch.device = torch.device("cpu")) -> Results:  # noqa: B008
    found: Results = {}
    for name, case in cases():
        found |= results_of(name, case, device)
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
