"""Times a step with states in host memory, without a GPU.

    python benchmarks/offload.py                     # 4 tensors of 8M elements, 20 seconds
    python benchmarks/offload.py --elements 1048576 --tensors 32

The copies to and from the device are copies within host memory, which run at once. So a step should
take as long as a step of the same optimizer on the CPU and a copy of the same bytes: the gradients
and the updated parameters. The last column is the ratio of both. All run in one thread and in
turns, the least CPU time of each counts, and the parameters of both optimizers have to stay equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext.optim import AdamW
from amp_ext.optim.offload import OffloadedStates
from amp_ext.program import format_table, run_program

FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16, fp32 masters": (torch.bfloat16, {}),
    "bf16, split masters, bf16 states": (
        torch.bfloat16,
        {"master_weights": "split", "state_dtype": torch.bfloat16},
    ),
    "bf16, split8 masters, 8bit states": (
        torch.bfloat16,
        {"master_weights": "split8", "state_dtype": "8bit"},
    ),
}


class ImmediateTransport:
    """Copies within host memory, which have ended when the call returns."""

    device = torch.device("cpu")

    def allocate(self, size: int) -> Tensor:
        """Returns memory whose pages exist already, as those of pinned memory."""
        return torch.zeros(size, dtype=torch.uint8)

    def copy_down(self, host: Tensor, source: Tensor) -> None:
        """Copies a gradient."""
        host.data.copy_(source.data)

    copy_up = copy_down

    def begin(self) -> None:
        """Does nothing, as the methods below: no copy is under way."""

    def record_down(self) -> None:
        """Returns None."""

    record_up = record_down

    def wait(self, event: Any) -> None:
        """Does nothing."""

    join = wait
    close = begin


def milliseconds(call: Callable[[], Any]) -> float:
    """Returns the CPU time of one call, in all threads."""
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=4, help="how many there are (4)")
    parser.add_argument("--elements", type=int, default=8 << 20, help="of each tensor (8M)")
    parser.add_argument("--rounds", type=int, default=20, help="how often each runs (20)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [["form", "step, ms", "copy, ms", "offloaded step, ms", "ratio"]]
    for name, (dtype, kept) in FORMS.items():
        shape = (options.elements // 1024, 1024)
        params = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(options.tensors)]
        others = [param.detach().clone().requires_grad_() for param in params]
        for param, other in zip(params, others, strict=True):
            param.grad = torch.randn(shape).to(dtype)
            other.grad = param.grad.clone()
        plain, offloaded = AdamW(params, **kept), AdamW(others, **kept)
        OffloadedStates(offloaded, ImmediateTransport(), threads=1)
        targets = [torch.zeros_like(param) for param in params for _ in range(2)]
        sources = [tensor for param in params for tensor in (param.grad, param.detach())]

        def copy(targets: list[Tensor] = targets, sources: list[Any] = sources) -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        calls = (plain.step, copy, offloaded.step)
        times = [[milliseconds(call) for call in calls] for _ in range(options.rounds)]
        step, copied, both = map(min, zip(*times, strict=True))
        assert all(map(torch.equal, params, others))
        figures = (step, copied, both, both / (step + copied))
        rows.append([name, *(f"{figure:.2f}" for figure in figures)])
    print(format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
