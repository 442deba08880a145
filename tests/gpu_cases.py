"""One call of every kind that reaches a kernel, on a device and on the CPU: the bits must agree.

    python tests/gpu_cases.py                      # on the GPU
    compute-sanitizer python tests/gpu_cases.py    # with every access checked

Inputs are made on the CPU and copied, so that few kernels but ours run: a sanitizer that is told of
every allocation (PYTORCH_NO_CUDA_MEMORY_CACHING=1) finds our faults, in a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness.awkward import BF16, DTYPES, F16, F32, F64, FEW_DTYPES, INF, NAN, Dtypes
from harness.coded_lists import CODED_STEPS
from harness.engine_results import CLIPPED, SCALED, SHAPES, STARTS, coded_steps_of, steps_of
from harness.gradient_lists import OPERATIONS, GradientOperation, equal
from harness.list_operations import FEW_STEPS, IN_FLOAT, STEPS, UPDATES, WITH_MASTERS, build, run
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext import ops

Tensors = list[Tensor]
Case = Callable[[torch.device], Tensors]


def placed(tensors: Tensors, device: torch.device) -> Tensors:
    """Returns copies on a device, every other one a view that starts in the middle of 16 bytes."""
    pairs = zip(tensors, STARTS, strict=True)
    return [tensor.to(device, copy=True)[start:] for tensor, start in pairs]


def randoms(dtype: torch.dtype = F32) -> Tensors:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def scalar(value: float, device: torch.device, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(value, dtype=dtype).to(device)


def step(operation: str, options: dict[str, Any], dtypes: Dtypes, bad: float = 0.0) -> Case:
    """Returns a case of three steps."""

    def case(device: torch.device) -> Tensors:
        lists = steps_of(operation, options, dtypes, device, bad)
        return [tensor for tensors in lists.values() for tensor in tensors]

    return case


def coded_step(operation: str, options: dict[str, Any], code: str) -> Case:
    """Returns a case of three steps with moments in 8 bits, under split masters."""

    def case(device: torch.device) -> Tensors:
        dtypes = Dtypes(BF16, BF16, F32, master=True)
        lists = coded_steps_of(operation, options, code, dtypes, device, low_bits=16)
        return [tensor for tensors in lists.values() for tensor in tensors]

    return case


def gradients(operation: GradientOperation, dtype: torch.dtype, factor: float = 1.0) -> Case:
    """Returns a case of an operation on clean gradients and on some of which one is bad."""

    def case(device: torch.device) -> Tensors:
        results = []
        for bad in (None, 6, 9):
            values = [(factor * value).to(dtype) for value in randoms()]
            if bad is not None:
                values[bad][-1] = (INF, -INF, NAN)[bad % 3]
            tensors = placed(values, device)
            # Its sum, right to seven digits, need not have the same bits.
            found = operation.run(tensors)
            right = found == operation.finds([tensor.cpu() for tensor in placed(values, device)])
            results += [scalar(right, device), *tensors]
        return results

    return case


def update_scale(device: torch.device) -> Tensors:
    """Lets the scale grow, back off and stay."""
    scale, tracker = scalar(1024.0, device), scalar(0, device, torch.int32)
    results = []
    for flags in ([0.0], [0.0, 0.0], [0.0, 1.0], [0.0], [2.0], [0.0] * 17):
        found_infs = [scalar(flag, device) for flag in flags]
        factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
        ops.update_scale_(scale, tracker, found_infs, **factors)
        results += [scale.clone(), tracker.clone()]
    return results


def refresh_masters(device: torch.device) -> Tensors:
    """Changes some parameters behind their masters."""
    values = randoms()
    masters = placed(values, device)
    values[3] = values[3] + 1
    ops.refresh_masters_(placed([value.half() for value in values], device), masters)
    return masters


def many_tensors(device: torch.device) -> Tensors:
    """Steps more tensors than the arguments of a launch hold, neighbours in one buffer."""
    dtypes = Dtypes(F16, F16, F32)
    whole = build("adam_", {}, [(6001,)], dtypes, "cpu")
    whole["steps"] = [torch.full((1202,), 3.0)]
    buffers = {name: tensor.to(device) for name, (tensor,) in whole.items()}
    lists = {
        name: buffer[1:].split(1 if name == "steps" else 5) for name, buffer in buffers.items()
    }
    lists["steps"] = [step[0] for step in lists["steps"]][:1200]
    found_inf = scalar(0.0, device)
    ops.check_finite_(lists["grads"], found_inf)
    run("adam_", lists, found_inf=found_inf)
    return [*buffers.values(), found_inf]


def strided(device: torch.device) -> Tensors:
    """Steps a transposed parameter and one with gaps."""
    lists = build("sgd_", {"momentum": 0.9}, [(33, 130)] * 2, IN_FLOAT, "cpu")
    for name in ("params", "momentum_buffers"):
        one, other = (tensor.to(device) for tensor in lists[name])
        lists[name] = [one.t(), other[:, ::2]]
    lists["grads"] = [torch.randn(130, 33).to(device), torch.randn(33, 65).to(device)]
    found_inf = scalar(0.0, device)
    ops.unscale_(lists["grads"], scalar(0.25, device), found_inf)
    run("sgd_", lists, momentum=0.9)
    return [*lists["params"], *lists["momentum_buffers"], found_inf]


def training(
    optimizer_class: type, dtype: torch.dtype, guards: bool = False, **options: Any
) -> Case:
    """Returns a case of our scaler over our optimizer, with an overflow on the way.

    A guard skips the last step.
    """

    def case(device: torch.device) -> Tensors:
        params = [Parameter(value) for value in placed(randoms(dtype), device)]
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}]
        optimizer = optimizer_class(groups, lr=0.05, **options)
        guard = amp_ext.optim.NormGuard(warmup_steps=2)
        optimizer.norm_guard = guard if guards else None
        scaler = amp_ext.GradScaler(device.type, init_scale=8.0, growth_interval=2)
        scaler.scale(scalar(1.0, device))
        scales = []
        for iteration in range(5):
            values = randoms(dtype)
            if iteration == 2:
                values[4][7] = INF
            if guards and iteration == 4:
                values = [64 * value for value in values]
            for param, grad in zip(params, placed(values, device), strict=True):
                param.grad = grad
            scaler.step(optimizer)
            scaler.update()
            scales.append(scalar(scaler.get_scale(), device))
        states = [optimizer.state[param] for param in params]
        outliers = scalar(guard.stats(wait=True).outliers, device)
        return [*params, *(state[name] for state in states for name in state), *scales, outliers]

    return case


# A sanitizer has a minute for all cases.
SOME_DTYPES = [*FEW_DTYPES, *(row for row in DTYPES if row.id in ("fp32-grad16", "bf16-state32"))]


def all_cases() -> Iterator[tuple[str, Case]]:
    for row in FEW_STEPS:
        operation, options = row.values
        for dtypes in SOME_DTYPES:
            yield f"{row.id}-{dtypes.id}", step(operation, options | SCALED, *dtypes.values)
        for name, dtypes in (("fp32", IN_FLOAT), ("bf16", WITH_MASTERS)):
            yield f"clipped-{row.id}-{name}", step(operation, options | CLIPPED, dtypes, 0.1)
    for row in STEPS + UPDATES:
        if row not in FEW_STEPS:
            yield row.id, step(*row.values, WITH_MASTERS)
    for row in CODED_STEPS:
        yield f"coded-{row.id}", coded_step(*row.values)
    yield "skipped", step("adam_", {"found_inf": 2.0}, IN_FLOAT)
    for operation in OPERATIONS:
        for dtype in (F32, F64, F16, BF16):
            yield f"{operation.id or operation.name}-{dtype}", gradients(operation, dtype)
    yield "large-squares", gradients(OPERATIONS[1], F32, 1e25)
    for case in (update_scale, refresh_masters, many_tensors, strided):
        yield case.__name__, case
    yield "training-adamw-fp16", training(amp_ext.optim.AdamW, F16)
    yield "training-adam-fp32", training(amp_ext.optim.Adam, F32)
    yield "training-adam-norms", training(amp_ext.optim.Adam, F32, track_grad_norms=True)
    yield "training-adamw-guard", training(amp_ext.optim.AdamW, F16, guards=True)
    momentum = {"momentum": 0.9, "dampening": 0.1}
    yield "training-momentum-bf16", training(amp_ext.optim.SGD, BF16, **momentum)


CASES: dict[str, Case] = dict(all_cases())


def differences(case: Case, device: torch.device) -> Iterator[str]:
    """Yields which results of a case differ between a device and the CPU."""
    torch.manual_seed(0)
    expected = case(torch.device("cpu"))
    torch.manual_seed(0)
    actual = case(device)
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        if left.device.type != device.type or not equal(left, right):
            yield f"result {index} of {len(expected)}"


def main() -> int:
    """Runs the cases and returns 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default="cuda")
    device = parser.parse_args().device
    failed = 0
    for name, case in CASES.items():
        different = list(differences(case, device))
        failed += bool(different)
        print(f"{name}: {', '.join(different) + ' differ' if different else 'the same bits'}")
    print(f"{len(CASES) - failed} of {len(CASES)} cases have the bits of the CPU")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
