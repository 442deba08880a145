"""Steps over numbers at the edges of formats and formulas, to compare engines to the bit.

Zeros of both signs, subnormal and tiny moments, second moments around 2^64, parameters that are
tiny or 0, and options and scales at the ends of their ranges. The same on every machine: no number
is drawn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from harness.coded_lists import encode
from harness.edge_shapes import BF16, F16, F32, INF, Dtypes
from harness.list_operations import OPERATIONS, SQUARES, Lists, on_device, run

PARAMS = (0.0, -0.0, 0.01, -1.0, 1e-30, -1e-41, 2.0**-62, 6e4)
MOMENTS = (0.0, -0.0, 2.0**-149, -(2.0**-131), 2.0**-101, -1e-35, 0.1, -3.0)
SECOND_MOMENTS = (0.0, -0.0, 2.0**-149, 2.0**-131, 1.2e-38, 1e-30)
SECOND_MOMENTS += (1e-8, 1.0, 2.0**63, 2.0**64, 1e30)
GRADS = (0.0, -0.0, 1e-30, -1e-12, 0.5, 3e18)

# Numbers that a warp or a vector often has side by side: of dead rows and of pruned weights.
RUN = 256
RUNS = (
    (0.0, -0.0, 0.01),
    (-0.0, 2.0**-149, -(2.0**-131)),
    (0.0, 2.0**-131, 1e-8),
    (0.0, 1e-30, 0.5),
)

SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "maximize": {"maximize": True, "grad_scale": 3.0},
    "eps-0": {"eps": 0.0},
    "eps-1e-30": {"eps": 1e-30},
    "lr-0": {"lr": 0.0},
    "lr-inf": {"lr": INF},
    "scale-2^-149": {"grad_scale": 2.0**-149},
    "scale-2^127": {"grad_scale": 2.0**127},
    "clipped-to-0": {"max_grad_norm": 1e-300, "sum_of_squares": 1e8, "grad_norm": 0.0},
    "cautious": {
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "cautious_weight_decay": True,
    },
}

# The operation, its options, the dtypes, the bits of a split master and the code of the moments.
Form = tuple[str, dict[str, Any], Dtypes, int, str]
_ADAM = {"lr": 1e-3, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01}
_ADAM |= {"decoupled_weight_decay": True}
_LION = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01}
_SGD = {"lr": 1e-3, "momentum": 0.9}


def _forms() -> Iterator[tuple[str, Form]]:
    """Yields every way in which numbers are kept that has kernels of its own, by name."""
    kept = [("fp32", F32, False, 0)]
    for name, dtype in (("bf16", BF16), ("fp16", F16)):
        kept += [(name, dtype, False, 0), (f"{name}-master", dtype, True, 0)]
        kept += [(f"{name}-split{bits}", dtype, True, bits) for bits in (16, 8)]
    for operation, options, codes in (
        ("adam_", _ADAM, ("q8s", "q8h")),
        ("lion_", _LION, ("q8m",)),
        ("sgd_", _SGD, ("q8m",)),
    ):
        for name, dtype, master, low_bits in kept:
            for state, code in ((F32, ""), (BF16, ""), *((F32, code) for code in codes)):
                dtypes = Dtypes(dtype, dtype, state, master=master)
                form = f"{operation} {name} {code or str(state).removeprefix('torch.')}"
                yield form, (operation, options, dtypes, low_bits, code)


FORMS = dict(_forms())


def _mixed(values: tuple[float, ...], repeats: int, count: int, dtype: torch.dtype) -> Tensor:
    """Returns one factor of a product of values, in an order that has no runs."""
    each = torch.tensor(values, dtype=torch.float64)
    place = torch.arange(count) * 1009 % count
    return each[place // repeats % len(values)].to(dtype)


def _products(*factors: tuple[float, ...]) -> list[tuple[tuple[float, ...], int]]:
    """Returns each factor with the number of products in which its value stays the same."""
    sizes = [len(factor) for factor in factors]
    return [(f, torch.Size(sizes[i + 1 :]).numel()) for i, f in enumerate(factors)]


@functools.cache
def lists_of(name: str) -> Lists:
    """Returns the lists of a form on the CPU: all products of numbers, and runs of the same."""
    operation, options, dtypes, low_bits, code = FORMS[name]
    buffers = OPERATIONS[operation].buffers(options)
    factors = _products(PARAMS, MOMENTS, SECOND_MOMENTS, GRADS)
    count = len(PARAMS) * len(MOMENTS) * len(SECOND_MOMENTS) * len(GRADS)
    runs = [torch.tensor(run_) for run_ in itertools.product(*RUNS)]
    in_runs = torch.stack(runs).double().repeat_interleave(RUN, 0).unbind(1)

    def pair(which: int, dtype: torch.dtype) -> list[Tensor]:
        values, repeats = factors[which]
        return [_mixed(values, repeats, count, dtype), in_runs[which].to(dtype)]

    masters = pair(0, F32 if dtypes.master else dtypes.param)
    lists = {
        "params": [m.to(dtypes.param, copy=True) for m in masters],
        "grads": pair(3, dtypes.grad),
    }
    for name in buffers:
        lists[name] = pair(2 if name in SQUARES else 1, dtypes.state)
    lists["steps"] = [torch.tensor(2.0), torch.tensor(2000.0)]
    if code:
        lists = encode(lists, operation, code)
    if dtypes.master:
        pairs = list(zip(lists["params"], masters, strict=True))
        split = [ops.split_fp32(*each, low_bits) for each in pairs] if low_bits else masters
        lists["master_params"] = split
    return lists


def edge_case(name: str, setting: dict[str, Any]) -> Callable[[torch.device], Lists]:
    """Returns a case of two steps of a form; only one with the usual options has the runs."""
    operation, options, *_ = FORMS[name]
    wanted = options | setting
    tensors = 1 if setting else 2

    def case(device: torch.device) -> Lists:
        lists = {
            key: [tensor.clone().to(device) for tensor in each[:tensors]]
            for key, each in lists_of(name).items()
        }
        more = {**wanted, "dither": True} | on_device(wanted, device)
        if wanted["lr"] == INF:
            more["lr"] = torch.tensor(INF, device=device)
        for _ in range(2):
            run(operation, lists, **more)
        return lists

    return case


def few_edge_cases() -> Iterator[tuple[str, Callable[[torch.device], Lists]]]:
    """Yields every form with the usual options, and two with every setting."""
    of_all_settings = ("adam_ bf16-split8 q8s", "adam_ bf16 bfloat16")
    for name, case in edge_cases():
        _, form, setting = name.split("/")
        if setting == "usual" or form in of_all_settings:
            yield name, case


def edge_cases() -> Iterator[tuple[str, Callable[[torch.device], Lists]]]:
    """Yields every form with every setting that it knows, by name."""
    for form, (_, options, *_) in FORMS.items():
        for setting, changed in SETTINGS.items():
            if "eps" not in changed or "eps" in options:
                yield f"edges/{form}/{setting}", edge_case(form, changed)
