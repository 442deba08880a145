"""Every engine gives the same bits: plain C++, AVX2, the CUDA kernels emulated and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from awkward import DTYPES, Dtypes
from torch import Tensor

from amp_ext import ops

ADAM = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
SGD: dict[str, Any] = {"lr": 0.02}
ADAM_CASES = {
    "plain": {},
    "decay-maximize": {"weight_decay": 0.1, "maximize": True},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "amsgrad": {"amsgrad": True, "beta1": 0.3, "eps": 1e-3},
}
SGD_CASES = {
    "plain": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "nesterov-decay-maximize": {
        "momentum": 0.8,
        "nesterov": True,
        "weight_decay": 0.1,
        "maximize": True,
    },
    "dampening-decoupled": {
        "momentum": 0.9,
        "dampening": 0.3,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    },
}
# Less than a vector, one and a tail, and more than a tile; each also misaligned.
SIZES = [1, 7, 37, 4111]
STEPS = 3

Results = dict[str, Tensor]


def numbers(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Numbers of all sizes that a dtype has, from zeros of both signs and subnormals up to inf."""
    exponents = {torch.float16: (-26, 17), torch.bfloat16: (-60, 60)}.get(dtype, (-70, 60))
    tensors = []
    for size in SIZES:
        for start in (0, 1):
            drawn = torch.randn(size + start, dtype=torch.float64)
            drawn *= torch.exp2(torch.empty_like(drawn).uniform_(*exponents))
            drawn[torch.rand(size + start) < 0.02] = 0.0
            drawn[torch.rand(size + start) < 0.02] *= -0.0
            tensors.append(drawn.to(dtype).to(device)[start:])
    return tensors


def buffers(dtype: torch.dtype, device: torch.device, *, squares: bool = False) -> list[Tensor]:
    tensors = []
    for size in SIZES:
        for start in (0, 1):
            drawn = torch.randn(size + start, dtype=torch.float64)
            drawn *= torch.exp2(torch.empty_like(drawn).uniform_(-12, 3))
            drawn = drawn.square() if squares else drawn
            tensors.append(drawn.to(dtype).to(device)[start:])
    return tensors


def scalars(value: float, device: torch.device) -> list[Tensor]:
    return [torch.full((), value, device=device) for _ in range(2 * len(SIZES))]


def gathered(case: str, lists: dict[str, list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields what was computed, in one tensor for each list."""
    for name, tensors in lists.items():
        yield f"{case} {name}", torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()


def steps_of(
    operation: Callable[..., None], lists: dict[str, list[Tensor]], dtypes: Dtypes, options: dict
) -> dict[str, list[Tensor]]:
    """Takes some steps with scaled gradients of any size, and returns all that they wrote."""
    device = lists["params"][0].device
    grad_scale = torch.tensor(3.0, device=device)
    if dtypes.master:
        lists["master_params"] = [param.float() for param in lists["params"]]
    for _ in range(STEPS):
        grads = numbers(dtypes.grad, device)
        operation(**lists, grads=grads, grad_scale=grad_scale, **options)
    return lists


def results(device: torch.device = torch.device("cpu")) -> Results:  # noqa: B008
    """Runs every operation on every dtype, from the same numbers each time."""
    torch.manual_seed(0)
    found: Results = {}
    for row in DTYPES:
        dtypes: Dtypes = row.values[0]
        for name, case in ADAM_CASES.items():
            lists = {
                "params": buffers(dtypes.param, device),
                "exp_avgs": buffers(dtypes.state, device),
                "exp_avg_sqs": buffers(dtypes.state, device, squares=True),
                "steps": scalars(2.0, device),
            }
            options = ADAM | case
            if options.pop("amsgrad", False):
                lists["max_exp_avg_sqs"] = buffers(dtypes.state, device, squares=True)
            lists = steps_of(ops.adam_, lists, dtypes, options)
            found.update(gathered(f"adam {name} {row.id}", lists))
        for name, case in SGD_CASES.items():
            lists = {"params": buffers(dtypes.param, device)}
            if "momentum" in case:
                lists["momentum_buffers"] = buffers(dtypes.state, device)
            if "dampening" in case:
                lists["steps"] = scalars(0.0, device)
            lists = steps_of(ops.sgd_, lists, dtypes, SGD | case)
            found.update(gathered(f"sgd {name} {row.id}", lists))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for inverse in (1 / 3, 2.0**-16, 2.0**-140, 1e30):
            grads = numbers(dtype, device)
            found_inf = torch.zeros((), device=device)
            ops.unscale_(grads, torch.tensor(inverse, device=device), found_inf)
            found.update(gathered(f"unscale {inverse} {dtype}", {"grads": grads}))
    scale = torch.tensor(65536.0, device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    scales = []
    for step in range(60):
        found_inf = torch.tensor(float(step % 7 == 6), device=device)
        factors = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
        ops.update_scale_(scale, tracker, [found_inf], **factors)
        scales += [scale.clone(), tracker.float()]
    found.update(gathered("update_scale", {"scales": scales}))
    return found


@pytest.fixture(scope="module")
def plain(under_isa) -> Results:
    isa, found = under_isa(results, "plain")
    assert isa == "plain"
    return found


def bits(tensor: Tensor) -> Tensor:
    """The integers that a tensor's numbers are stored as; of a NaN only that it is one."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.masked_fill(tensor.isnan(), torch.nan).view(integers)


def assert_same_bits(actual: Results, expected: Results) -> None:
    differing = {}
    for name, tensor in expected.items():
        different = bits(actual[name]) != bits(tensor)
        if different.any():
            first = int(different.nonzero()[0])
            count = int(different.sum())
            differing[name] = (count, first, actual[name][first].item(), tensor[first].item())
    assert not differing, "count, first index, value and expected value: " + "\n".join(
        f"{name}: {difference}" for name, difference in differing.items()
    )
    assert actual.keys() == expected.keys()


def test_the_numbers_are_of_all_kinds(plain):
    whole = torch.cat([tensor.double() for tensor in plain.values()])
    assert whole.isfinite().double().mean().item() > 0.9
    assert whole.isnan().any()
    assert whole.isinf().any()
    tiny = torch.finfo(torch.float32).smallest_normal
    assert ((whole != 0) & (whole.abs() < tiny)).any()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this processor lacks AVX2",
)
def test_avx2_gives_the_bits_of_plain_cpp(plain, under_isa):
    isa, found = under_isa(results, "avx2")
    assert isa == "avx2"
    assert_same_bits(found, plain)


def test_every_device_gives_the_bits_of_plain_cpp(device, plain):
    assert_same_bits(results(device), plain)
