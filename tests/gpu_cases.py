"""One call of every kind that reaches a kernel, on a device and on the CPU: the bits must agree.

    python tests/gpu_cases.py                      # on the GPU
    compute-sanitizer python tests/gpu_cases.py    # with every access checked

Inputs are made on the CPU and copied, so that few kernels but ours run: a sanitizer that is told of
every allocation (PYTORCH_NO_CUDA_MEMORY_CACHING=1) finds our faults, in a minute.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from reference import same_bits
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext import ops

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# A tile of the kernels is 4096 elements. The last two tensors are views that start off a boundary.
SIZES = (0, 1, 3, 4095, 4096, 4097, 9000)
MISALIGNED = (5, 4099)

INF, NAN = float("inf"), float("nan")

Tensors = list[Tensor]
Case = Callable[[torch.device], Tensors]


def placed(tensors: Tensors, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Returns copies on a device; of the last ones views that start in the middle of 16 bytes."""
    copies = [tensor.to(dtype).to(device, copy=True) for tensor in tensors[: len(SIZES)]]
    for tensor in tensors[len(SIZES) :]:
        copies.append(torch.cat([tensor[:1], tensor]).to(dtype).to(device)[1:])
    return copies


def randoms() -> Tensors:
    return [torch.randn(size) for size in SIZES + MISALIGNED]


def scalar(value: float, device: torch.device, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(value, dtype=dtype).to(device)


def adam(
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype,
    master: bool = False,
    amsgrad: bool = False,
    found_inf: float = 0.0,
    **options: Any,
) -> Case:
    """Returns a case of three steps of Adam."""

    def case(device: torch.device) -> Tensors:
        values = randoms()
        params = placed(values, device, param)
        masters = placed(values, device, F32) if master else None
        moments = [placed([v * 0 for v in values], device, state) for _ in range(2 + amsgrad)]
        steps = [scalar(0.0, device) for _ in values]
        for _ in range(3):
            ops.adam_(
                params,
                placed([1024 * v for v in randoms()], device, grad),
                moments[0],
                moments[1],
                steps,
                max_exp_avg_sqs=moments[2] if amsgrad else None,
                master_params=masters,
                **{"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
                | options,
                grad_scale=scalar(1024.0, device),
                found_inf=scalar(found_inf, device),
            )
        return [*params, *steps, *itertools.chain(*moments), *(masters or [])]

    return case


def sgd(
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype | None,
    master: bool = False,
    dampening: float = 0.0,
    **options: Any,
) -> Case:
    """Returns a case of three steps of SGD; with momentum if there is a dtype for its buffer."""

    def case(device: torch.device) -> Tensors:
        values = randoms()
        params = placed(values, device, param)
        masters = placed(values, device, F32) if master else None
        buffers = steps = None
        if state is not None:
            buffers = placed([v * 0 for v in values], device, state)
            options["momentum"] = 0.9
        if dampening != 0:
            steps = [scalar(0.0, device) for _ in values]
        for _ in range(3):
            ops.sgd_(
                params,
                placed([1024 * v for v in randoms()], device, grad),
                momentum_buffers=buffers,
                steps=steps,
                master_params=masters,
                lr=0.05,
                dampening=dampening,
                **options,
                grad_scale=scalar(1024.0, device),
                found_inf=scalar(0.0, device),
            )
        return [*params, *(buffers or []), *(steps or []), *(masters or [])]

    return case


def check_finite(dtype: torch.dtype, bad: float | None = None, scale: float = 2.0) -> Case:
    """Returns a case that looks at tensors, the last element of which may be bad."""

    def case(device: torch.device) -> Tensors:
        found_infs = []
        for index, size in enumerate(SIZES + MISALIGNED):
            values = randoms()
            if bad is not None and size > 0:
                values[index][-1] = bad
            found_infs.append(scalar(0.0, device))
            ops.check_finite_(
                placed(values, device, dtype), found_infs[-1], grad_scale=scalar(scale, device)
            )
        return found_infs

    return case


def unscale(dtype: torch.dtype, bad: float | None = None) -> Case:
    """Returns a case that unscales tensors, the last element of which may be bad."""

    def case(device: torch.device) -> Tensors:
        values = randoms()
        if bad is not None:
            values[-1][-1] = bad
        grads, found_inf = placed(values, device, dtype), scalar(0.0, device)
        ops.unscale_(grads, scalar(1 / 3, device), found_inf)
        return [*grads, found_inf]

    return case


def clip_grads(dtype: torch.dtype) -> Case:
    """Returns a case that clips by a norm above the limit, and leaves what is below it."""

    def case(device: torch.device) -> Tensors:
        results = []
        for norm in (3.0, 0.5):
            grads = placed(randoms(), device, dtype)
            ops.clip_grads_(grads, scalar(norm, device), max_norm=1.0)
            results += grads
        return results

    return case


def count_nonfinite(device: torch.device) -> Tensors:
    """Counts in tensors of all dtypes, some of which hold infs and NaNs."""
    values = randoms()
    values[1][0], values[4][7], values[4][4095], values[-1][-1] = INF, NAN, -INF, NAN
    return [ops.count_nonfinite(placed(values, device, dtype)) for dtype in (F16, BF16, F32, F64)]


def sum_of_squares(dtype: torch.dtype, factor: float = 1.0) -> Case:
    """Returns a case whose sums, right to seven digits, need not have the same bits."""

    def case(device: torch.device) -> Tensors:
        values = [factor * value for value in randoms()]
        total, found_inf = scalar(0.0, device, F64), scalar(0.0, device)
        tensors = placed(values, device, dtype)
        ops.check_finite_(tensors, found_inf, sum_of_squares=total)
        exact = sum(value.to(dtype).double().square().sum().item() for value in values)
        return [scalar(abs(total.item() / exact - 1) < 1e-6, device), found_inf]

    return case


def clipped_step(optimizer: str, dtype: torch.dtype) -> Case:
    """Returns a case of a step that clips by norm and by value and writes the gradients back."""

    def case(device: torch.device) -> Tensors:
        values = randoms()
        params, masters = placed(values, device, dtype), placed(values, device, F32)
        moments = [placed([v * 0 for v in values], device, F32) for _ in range(2)]
        steps = [scalar(0.0, device) for _ in values]
        grads, grad_norm = placed([8 * v for v in randoms()], device, dtype), scalar(0.0, device)
        clipping = {
            "grad_scale": scalar(8.0, device),
            "clip_value": 0.02,
            "max_grad_norm": 2.0,
            "sum_of_squares": scalar(64.0 * 1e4, device, F64),
            "grad_norm": grad_norm,
            "write_back_grads": True,
            "master_params": None if dtype == F32 else masters,
        }
        if optimizer == "adam":
            options = {"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
            ops.adam_(params, grads, *moments, steps, **options, **clipping)
        else:
            ops.sgd_(params, grads, momentum_buffers=moments[0], lr=0.1, momentum=0.9, **clipping)
        return [*params, *grads, *moments[0], *moments[1], *steps, *masters, grad_norm]

    return case


def update_scale(device: torch.device) -> Tensors:
    """Lets the scale grow, back off and stay."""
    scale, tracker = scalar(1024.0, device), scalar(0, device, torch.int32)
    results = []
    for flags in ([0.0], [0.0, 0.0], [0.0, 1.0], [0.0], [2.0], [0.0] * 17):
        ops.update_scale_(
            scale,
            tracker,
            [scalar(flag, device) for flag in flags],
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=2,
        )
        results += [scale.clone(), tracker.clone()]
    return results


def refresh_masters(device: torch.device) -> Tensors:
    """Changes some parameters behind their masters."""
    values = randoms()
    masters = placed(values, device, F32)
    values[3] = values[3] + 1
    ops.refresh_masters_(placed(values, device, F16), masters)
    return masters


def many_tensors(device: torch.device) -> Tensors:
    """Steps more tensors than the arguments of a launch hold, neighbours in one buffer."""
    buffers = [torch.randn(6001).half().to(device) for _ in range(2)]
    moments = [torch.zeros(6001).to(device) for _ in range(2)]
    steps = torch.zeros(1200).to(device)
    params, grads, exp_avgs, exp_avg_sqs = (
        [buffer[1 + 5 * i : 6 + 5 * i] for i in range(1200)] for buffer in [*buffers, *moments]
    )
    found_inf = scalar(0.0, device)
    ops.check_finite_(grads, found_inf)
    ops.adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [steps[i] for i in range(1200)],
        lr=0.05,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.0,
        found_inf=found_inf,
    )
    return [*buffers, *moments, steps, found_inf]


def strided(device: torch.device) -> Tensors:
    """Steps a transposed parameter and one with gaps."""
    buffers = [torch.randn(33, 130), torch.randn(33, 130)]
    params = [buffers[0].to(device).t(), buffers[1].to(device)[:, ::2]]
    grads = [torch.randn(130, 33).to(device), torch.randn(33, 65).to(device)]
    momenta = [torch.zeros(33, 130).to(device).t(), torch.zeros(33, 130).to(device)[:, ::2]]
    found_inf = scalar(0.0, device)
    ops.unscale_(grads, scalar(0.25, device), found_inf)
    ops.sgd_(params, grads, momentum_buffers=momenta, lr=0.1, momentum=0.9)
    return [*params, *momenta, found_inf]


def training(optimizer_class: type, dtype: torch.dtype, **options: Any) -> Case:
    """Returns a case of our scaler over our optimizer, with an overflow on the way."""

    def case(device: torch.device) -> Tensors:
        params = [Parameter(value) for value in placed(randoms(), device, dtype)]
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}]
        optimizer = optimizer_class(groups, lr=0.05, **options)
        scaler = amp_ext.GradScaler(device.type, init_scale=8.0, growth_interval=2)
        scaler.scale(scalar(1.0, device))
        scales = []
        for iteration in range(5):
            values = randoms()
            if iteration == 2:
                values[4][7] = float("inf")
            for param, grad in zip(params, placed(values, device, dtype), strict=True):
                param.grad = grad
            scaler.step(optimizer)
            scaler.update()
            scales.append(scalar(scaler.get_scale(), device))
        states = [optimizer.state[param] for param in params]
        return [*params, *(state[name] for state in states for name in state), *scales]

    return case


CASES: dict[str, Case] = {
    "adam-fp32": adam(F32, F32, F32),
    "adam-fp64": adam(F64, F64, F64),
    "adam-fp16-master": adam(F16, F16, F32, master=True),
    "adam-fp16-master-grad32": adam(F16, F32, F32, master=True),
    "adam-bf16-master": adam(BF16, BF16, F32, master=True),
    "adam-bf16": adam(BF16, BF16, BF16),
    "adam-fp32-grad16": adam(F32, F16, F32),
    "adamw-amsgrad": adam(F32, F32, F32, amsgrad=True, decoupled_weight_decay=True, maximize=True),
    "adamw-amsgrad-fp16-master": adam(
        F16, F16, F32, master=True, amsgrad=True, decoupled_weight_decay=True
    ),
    "adam-skipped": adam(F32, F32, F32, found_inf=2.0),
    "sgd-fp32": sgd(F32, F32, None),
    "sgd-fp16-master": sgd(F16, F16, None, master=True),
    "momentum-fp32": sgd(F32, F32, F32, nesterov=True, weight_decay=0.1),
    "momentum-fp64": sgd(F64, F64, F64, dampening=0.5),
    "momentum-fp16-master": sgd(F16, F16, F32, master=True, dampening=0.5),
    "momentum-bf16": sgd(BF16, BF16, BF16, maximize=True),
    "check-finite-fp32": check_finite(F32),
    "check-finite-fp32-inf": check_finite(F32, INF),
    "check-finite-fp64-nan": check_finite(F64, NAN),
    "check-finite-fp16-nan": check_finite(F16, NAN),
    "check-finite-bf16-inf": check_finite(BF16, -INF),
    "check-finite-scale-0": check_finite(F32, scale=0.0),
    "unscale-fp32": unscale(F32),
    "unscale-fp64-inf": unscale(F64, INF),
    "unscale-fp16": unscale(F16),
    "unscale-bf16-nan": unscale(BF16, NAN),
    "clip-grads-fp32": clip_grads(F32),
    "clip-grads-fp16": clip_grads(F16),
    "clip-grads-fp64": clip_grads(F64),
    "count-nonfinite": count_nonfinite,
    "sum-of-squares-fp32": sum_of_squares(F32),
    "sum-of-squares-fp32-large": sum_of_squares(F32, 1e25),
    "sum-of-squares-fp16": sum_of_squares(F16),
    "sum-of-squares-bf16": sum_of_squares(BF16),
    "sum-of-squares-fp64": sum_of_squares(F64),
    "clipped-adam-fp32": clipped_step("adam", F32),
    "clipped-adam-fp16": clipped_step("adam", F16),
    "clipped-momentum-bf16": clipped_step("sgd", BF16),
    "update-scale": update_scale,
    "refresh-masters": refresh_masters,
    "many-tensors": many_tensors,
    "strided": strided,
    "training-adamw-fp16": training(amp_ext.optim.AdamW, F16),
    "training-adam-fp32": training(amp_ext.optim.Adam, F32),
    "training-momentum-bf16": training(amp_ext.optim.SGD, BF16, momentum=0.9, dampening=0.1),
}


def differences(case: Case, device: torch.device) -> Iterator[str]:
    """Yields which results of a case differ between a device and the CPU."""
    torch.manual_seed(0)
    expected = case(torch.device("cpu"))
    torch.manual_seed(0)
    actual = case(device)
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        if left.device.type != device.type or not same_bits(left, right):
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
