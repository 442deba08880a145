"""How many healthy steps a guard of the norm skips: the table of docs/watching.md.

    PYTHONPATH=. python benchmarks/norm_guard_skips.py  # half a minute

Norms are log-normal, which those of gradients often are nearly: their logarithms have a mean of 0
and the deviation of the row. None of them is of a bad batch, so every skip is one too many. The
guard is the one of the package, in the steps of an optimizer with one parameter.
"""

from __future__ import annotations

import torch

from amp_ext.optim import SGD, NormGuard
from amp_ext.program import format_table

WIDTHS = (0.3, 0.5, 0.8)
SIGMA_FACTORS = (4.0, 6.0)
STEPS = 100_000


def share_skipped(width: float, sigma_factor: float, steps: int = STEPS) -> float:
    """Returns the share of steps with healthy norms that a guard skips, once it is warm."""
    generator = torch.Generator().manual_seed(0)
    norms = (width * torch.randn(steps, generator=generator)).exp()
    param = torch.nn.Parameter(torch.zeros(()))
    guard = NormGuard(sigma_factor)
    optimizer = SGD([param], lr=0.0, norm_guard=guard)
    for norm in norms:
        param.grad = norm
        optimizer.step()
    return guard.stats(wait=True).outliers / (steps - guard.options["warmup_steps"])


def make_table(steps: int = STEPS) -> str:
    """Returns the shares in percent."""
    table = [["width", *(f"{factor:g} deviations" for factor in SIGMA_FACTORS)]]
    for width in WIDTHS:
        shares = [share_skipped(width, factor, steps) for factor in SIGMA_FACTORS]
        table.append([f"{width}", *(f"{share:.2%}" for share in shares)])
    return format_table(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(make_table())
