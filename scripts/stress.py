"""Stress test of optimizer and scaler: 65,543 tensors, over 2^31 elements, and 20,000 steps.

`make stress` takes some minutes and 9 GB of memory. With `--small`, everything is smaller and takes
seconds. Checks the results, and that memory, file handles and threads do not grow.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last, so that an installed amp_ext comes first

import amp_ext  # noqa: E402

PROCESS = Path("/proc/self")
INF = math.inf
# Allowed growth of each resource (memory in bytes). Some pages and cached objects always vary.
MOST_GROWTH = {"file handles": 0, "threads": 0, "memory": 2 * 2**20, "Python objects": 10}


def memory(what: str) -> int:
    """Returns this process's memory in bytes: "VmRSS" is the present value, "VmHWM" the peak."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+) kB", (PROCESS / "status").read_text())[1])


def same(what: str, actual: Any, wanted: Any) -> None:
    """Raises an AssertionError unless two values are equal, even under ``python -O``."""
    if actual != wanted:
        raise AssertionError(f"{what}: {actual}, not {wanted}")


# Many tensors.


def many_tensors(count: int) -> None:
    """Compares steps of many tensors with steps of one long tensor that has the same elements.

    In one of the steps, the last tensor overflows.
    """
    torch.manual_seed(0)
    sizes = [1 + index % 3 for index in range(count)]
    whole = Parameter(torch.randn(sum(sizes)))
    params = [Parameter(part.clone()) for part in whole.detach().split(sizes)]
    named = [(f"tensor {index}", param) for index, param in enumerate(params)]
    scalers = [amp_ext.GradScaler("cpu", 2.0**10) for _ in range(2)]
    one = amp_ext.optim.AdamW([whole], max_grad_norm=INF)
    many = amp_ext.optim.AdamW(named, max_grad_norm=INF)
    for step in range(4):
        whole.grad = scalers[0].scale(torch.randn_like(whole))
        scalers[1].scale(torch.ones(()))
        for param, grad in zip(params, whole.grad.split(sizes), strict=True):
            param.grad = grad.clone()
        if step == 2:
            whole.grad[-1] = params[-1].grad[-1] = INF
            same("find_nonfinite", amp_ext.find_nonfinite(many), {f"tensor {count - 1}": 1})
        if step == 3:
            many.load_state_dict(many.state_dict())
        for scaler, optimizer in zip(scalers, (one, many), strict=True):
            scaler.step(optimizer)
            scaler.update()
        together = torch.cat([param.detach() for param in params])
        same(f"parameters after step {step} equal", together.equal(whole.detach()), True)
    stats = scalers[1].stats(wait=True)
    same("steps and skips", (stats.steps, stats.skips), (3, 1))
    same("the tensor that overflowed", stats.last_nonfinite, f"tensor {count - 1}")
    norms = [optimizer.grad_norm.item() for optimizer in (one, many)]
    same("norms agree", math.isclose(*norms, rel_tol=1e-6), True)


# Many elements.


def many_elements(border: int) -> None:
    """Steps and scans a tensor that has seven elements more than ``border``, such as 2^31."""
    count = border + 7
    watched = sorted({0, 1, count // 2, count - 1, *range(border - 2, border + 3)})
    param = Parameter(torch.zeros(count, dtype=torch.bfloat16))
    optimizer = amp_ext.optim.SGD(
        [("long", param)], lr=0.5, master_weights=False, state_dtype=None, max_grad_norm=INF
    )
    with torch.no_grad():
        param[watched] = torch.arange(1, 1 + len(watched)).to(param)

    def check(moved: float) -> None:
        wanted = [1.0 + index + moved for index in range(len(watched))]
        same("watched elements", param.detach()[watched].tolist(), wanted)
        others = count * moved + sum(range(1, 1 + len(watched)))
        # All values are integers, so the sums in float64 are exact.
        same("sum", sum(p.double().sum().item() for p in param.detach().split(2**24)), others)

    # Expanding one value to a gradient of all elements takes no memory.
    param.grad = torch.full((), -2.0, dtype=torch.bfloat16).expand(count)
    optimizer.step()
    check(1.0)
    norm = 2.0 * math.sqrt(count)
    same("norm", math.isclose(optimizer.grad_norm.item(), norm, rel_tol=1e-6), True)
    param.grad = torch.full((), INF, dtype=torch.bfloat16).expand(count)
    same("elements that are inf", amp_ext.find_nonfinite(optimizer), {"long": count})

    scaler = amp_ext.GradScaler("cpu", 2.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((count,), -4.0, dtype=torch.bfloat16)
    for place in (border - 1, border, count - 1, None):
        if place is not None:
            param.grad[place] = INF
        scaler.step(optimizer)
        scaler.update(2.0)
        check(1.0 if place is not None else 2.0)
        param.grad[place] = -4.0
    amp_ext.clip_grad_norm_([param], norm)  # halves the gradients, whose norm is 2 * norm
    same("clipped", param.grad[watched].tolist(), [-2.0] * len(watched))


# Many steps.


def many_steps(count: int) -> None:
    """Trains with some overflows; raises if resources grow in the last two thirds of the steps.

    The first third of the steps fills the pools of the allocator. Every 100 steps, optimizer and
    scaler load their own states.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)).bfloat16()
    optimizer = amp_ext.optim.AdamW(model.named_parameters(), lr=1e-4, max_grad_norm=1.0)
    scaler = amp_ext.GradScaler("cpu", 2.0**10, growth_interval=15, max_scale=2.0**12)
    batch = torch.randn(8, 16, dtype=torch.bfloat16)

    def held() -> dict[str, int]:
        gc.collect()
        handles, threads = (len(os.listdir(PROCESS / kind)) for kind in ("fd", "task"))
        objects = len(gc.get_objects())
        return dict(zip(MOST_GROWTH, (handles, threads, memory("VmRSS"), objects), strict=True))

    before: dict[str, int] = {}
    for number in range(count):
        if number == count // 3:
            held()  # a first call allocates the memory that the measurement itself needs
            before = held()
        optimizer.zero_grad()
        scaler.scale(model(batch).float().square().mean()).backward()
        if number % 37 == 0:
            model[0].weight.grad[0, 0] = INF
        if number % 10 == 0:
            scaler.unscale_(optimizer) if number % 20 else amp_ext.find_nonfinite(model)
        scaler.step(optimizer)
        scaler.update()
        if number % 100 == 0:
            optimizer.load_state_dict(optimizer.state_dict())
            scaler.load_state_dict(scaler.state_dict())
    after = held()
    for what, most in MOST_GROWTH.items():
        if after[what] > before[what] + most:
            raise AssertionError(f"{what} grew from {before[what]:,} to {after[what]:,}")


# Maps the name of a part to its function, its full size and its small size.
PARTS: dict[str, tuple[Callable[[int], None], int, int]] = {
    "tensors": (many_tensors, 2**16 + 7, 2**12 + 7),
    "elements": (many_elements, 2**31, 2**20),
    "steps": (many_steps, 20_000, 1_500),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="less of everything, in seconds")
    arguments = parser.parse_args()
    for name, (part, large, small) in PARTS.items():
        start = time.perf_counter()
        part(small if arguments.small else large)
        seconds, peak = time.perf_counter() - start, memory("VmHWM") / 2**20
        print(f"{name}: {seconds:.1f} s, peak of memory {peak:,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
