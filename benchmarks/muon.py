"""Times a step of amp_ext's Muon beside torch.optim.Muon with a fused AdamW.

    python benchmarks/muon.py                     # some minutes on two cores
    python benchmarks/muon.py --device cuda --dtype bfloat16

Each row steps the same parameters with the same gradients: matrices by Muon, and vectors by AdamW.
All sides run in turns, and the least time of each counts. ``products`` is the share of our time
that the matrix products of the iteration take alone. ``operators`` are the calls of torch's
operators in a step, ours beside torch's: on a GPU, each is a launch or more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import digits, in_turns, make_parser, seconds_of
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext
from amp_ext.bench import describe
from amp_ext.text_table import format_table

# Rows: the shapes of matrices, and how many there are of each.
ROWS: Mapping[str, list[tuple[int, int, int]]] = {
    "48 of 64 x 64": [(48, 64, 64)],
    "24 of 256 x 1024": [(24, 256, 1024)],
    "GPT of 124M": [(12, 2304, 768), (12, 768, 768), (12, 3072, 768), (12, 768, 3072)],
}
NS_STEPS = 5


def params_of(
    row: str, device: torch.device, dtype: torch.dtype
) -> tuple[list[Parameter], list[Parameter]]:
    """Returns matrices and vectors with gradients."""
    torch.manual_seed(0)
    shapes = [shape for count, *shape in ROWS[row] for _ in range(count)]
    made = []
    for sizes in (shapes, [shape[:1] for shape in shapes]):
        made.append([Parameter(torch.randn(size, device=device, dtype=dtype)) for size in sizes])
        for param in made[-1]:
            param.grad = torch.randn_like(param)
    return made[0], made[1]


class Operators(TorchDispatchMode):
    """Counts the operators that run, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operators_of(step: Callable[[], object]) -> int:
    """Returns how many operators a step calls."""
    with Operators() as operators:
        step()
    return operators.count


def step_of_torch(matrices: list[Parameter], vectors: list[Parameter]) -> Callable[[], object]:
    """Returns a step of torch's two optimizers."""
    muon = torch.optim.Muon(matrices, lr=1e-3)
    adamw = torch.optim.AdamW(vectors, lr=1e-4, fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def our_step(matrices: list[Parameter], vectors: list[Parameter]) -> Callable[[], object]:
    """Returns a step of our optimizer."""
    groups: list[dict[str, Any]] = [{"params": matrices}]
    groups.append({"params": vectors, "algorithm": "adamw", "lr": 1e-4})
    return amp_ext.optim.Muon(groups, lr=1e-3).step


def products(matrices: list[Parameter]) -> Callable[[], object]:
    """Returns a function that computes the matrix products of a step."""
    by_shape: dict[tuple[int, int], int] = {}
    for param in matrices:
        shape = min(param.shape), max(param.shape)
        by_shape[shape] = by_shape.get(shape, 0) + 1
    batches: list[Tensor] = []
    for (rows, columns), count in by_shape.items():
        for _ in range(-(-count // 6) if rows * columns > 2**18 else 1):
            size = min(count, 6) if rows * columns > 2**18 else count
            batch = torch.randn(size, rows, columns, device=matrices[0].device)
            batches.append(batch.bfloat16() / (rows * columns) ** 0.5)

    def run() -> None:
        for batch in batches:
            x = batch
            for _ in range(NS_STEPS):
                gram = torch.bmm(x, x.mT)
                polynomial = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
                x = torch.baddbmm(x, polynomial, x, beta=3.4445)

    return run


def main() -> int:
    """Times all rows and prints a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    print(describe(device), flush=True)
    table = [
        ["milliseconds a step", "torch", "amp_ext", "products", "amp_ext / torch", "operators"]
    ]
    for row in ROWS:
        both = [params_of(row, device, getattr(torch, options.dtype)) for _ in range(2)]
        steps = {
            "torch": step_of_torch(*both[0]),
            "amp_ext": our_step(*both[1]),
            "products": products(both[0][0]),
        }
        for step in steps.values():
            step()  # creates the states
        timed = {side: seconds_of(step, device) for side, step in steps.items()}
        least = in_turns(timed, options.rounds)
        cells = [digits(1000 * seconds) for seconds in least.values()]
        counts = " / ".join(str(operators_of(steps[side])) for side in ("amp_ext", "torch"))
        table.append([row, *cells, f"{least['amp_ext'] / least['torch']:.2f}", counts])
        print(format_table(table[:1] + table[-1:]), flush=True)
    print(format_table(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
