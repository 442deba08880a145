"""Draws the figure of scaler.md: `python docs/figures.py` trains for a moment, writes scale.png."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import amp_ext

UPDATES = 400
GROWTH_INTERVAL = 40  # 2,000 by default: a picture of that would be long
BAD_UPDATE = 250  # whose batch holds an inf, which no scale can cure


def train() -> amp_ext.ScalerHistory:
    """Trains a small network in fp16 from a scale that is too large; returns what happened."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).half()
    optimizer = amp_ext.optim.AdamW(model.named_parameters(), lr=3e-3)
    scaler = amp_ext.GradScaler("cpu", init_scale=2.0**20, growth_interval=GROWTH_INTERVAL)
    for update in range(1, UPDATES + 1):
        x = torch.randn(64, 8, dtype=torch.float16)
        y = x.sin().sum(dim=1, keepdim=True)
        if update == BAD_UPDATE:
            x[0, 0] = torch.inf
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y.float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.history(wait=True)


def draw(history: amp_ext.ScalerHistory, path: Path) -> None:
    """Draws the loss scale over the updates, and a cross where a step was skipped."""
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    axes.step(history.updates, history.scales, where="post", color="tab:blue")
    skips = [i for i, skipped in enumerate(history.skipped) if skipped]
    axes.plot(
        [history.updates[i] for i in skips],
        [history.scales[i] for i in skips],
        "x",
        color="tab:red",
        label="skipped step",
    )
    axes.set_yscale("log", base=2)
    axes.set(xlabel="update", ylabel="loss scale")
    axes.axvline(BAD_UPDATE, color="gray", linewidth=0.8, linestyle=":")
    axes.annotate("inf in the data", (BAD_UPDATE, max(history.scales)), fontsize=9, color="gray")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    default = Path(__file__).with_name("scale.png")
    draw(train(), Path(sys.argv[1]) if len(sys.argv) > 1 else default)
