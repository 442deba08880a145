"""Draws two figures: `python docs/figures.py` writes gains.png and scale.png beside itself.

The bars of the README's gains.png come from a result of the benchmark and from amp_ext.memory; for
the scaler's scale.png a small network trains for a moment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import amp_ext
from amp_ext.memory import training_memory

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "2026-11-27-nvidia-h200.json"
SHAPES = "600 × 100k"
# A work of the benchmark, one of its sides, and how the bar is called.
TIMES = [
    ("AdamW fp32 + scaler", "default", "torch, AdamW without an option"),
    ("AdamW fp32 + scaler", "fused", "torch, AdamW(fused=True)"),
    ("AdamW fp32 + scaler", "ours", "amp_ext"),
    ("AdamW fp16 + master + scaler", "by_hand", "torch, fp16 by hand with float32 copies"),
    ("AdamW fp16 + master + scaler", "ours", "amp_ext, fp16 parameters"),
]
# A configuration of amp_ext.memory, and how its bar is called.
FORMS = {
    "16-bit + masters, fp32 states": "float32 masters and moments, as by hand",
    "16-bit + split masters, fp32 states": 'master_weights="split"',
    "16-bit + split masters, bf16 states": "split masters, bfloat16 moments",
    "16-bit + split8 masters, 8bit-bf16 states": 'split8 masters, "8bit-bf16" moments',
    "16-bit + split8 masters, 8bit states": 'split8 masters, "8bit" moments',
}
TORCH, OURS = "#e0995e", "#1f5f8b"

UPDATES = 400
GROWTH_INTERVAL = 40  # 2,000 by default: a picture of that would be long
BAD_UPDATE = 250  # whose batch holds an inf, which no scale can cure


def train() -> tuple[list[float], list[int]]:
    """Trains a small network in fp16 from a scale that is too large.

    Returns the scale of each update, and the positions of the updates whose step was skipped.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).half()
    optimizer = amp_ext.optim.AdamW(model.named_parameters(), lr=3e-3)
    scaler = amp_ext.GradScaler("cpu", init_scale=2.0**20, growth_interval=GROWTH_INTERVAL)
    scales, skips = [], []
    for update in range(UPDATES):
        x = torch.randn(64, 8, dtype=torch.float16)
        y = x.sin().sum(dim=1, keepdim=True)
        if update == BAD_UPDATE:
            x[0, 0] = torch.inf
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y.float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scales.append(scaler.get_scale())
        scaler.update()
        if scaler.last_step_skipped(wait=True):
            skips.append(update)
    return scales, skips


def draw(scales: list[float], skips: list[int], path: Path) -> None:
    """Draws the loss scale over the updates, and a cross where a step was skipped."""
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    axes.step(range(len(scales)), scales, where="post", color="tab:blue")
    axes.plot(skips, [scales[i] for i in skips], "x", color="tab:red", label="skipped step")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="update", ylabel="loss scale")
    axes.axvline(BAD_UPDATE, color="gray", linewidth=0.8, linestyle=":")
    axes.annotate("inf in the data", (BAD_UPDATE, max(scales)), fontsize=9, color="gray")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_gains(path: Path) -> None:
    """Draws the time of a step beside torch's, and the bytes of each parameter."""
    rows = json.loads(RESULTS.read_text())["rows"]
    works = {row["work"]: row for row in rows if row["shapes"] == SHAPES}
    figure, (times, sizes) = plt.subplots(1, 2, figsize=(12, 3.1), layout="constrained")
    seconds = [works[work]["sides"][side]["seconds"] for work, side, _ in TIMES]
    colours = [OURS if side == "ours" else TORCH for _, side, _ in TIMES]
    bars = times.barh([name for *_, name in TIMES], [1e3 * each for each in seconds], color=colours)
    times.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    times.set_title(
        "scaler.step and update, 600 tensors of 100,000, H200: ms", fontsize=10, loc="left"
    )

    usages = {each.configuration.name: each.bytes for each in training_memory(10**9)}
    left = [0.0] * len(FORMS)
    for part, colour in zip(
        ("parameters", "gradients", "masters", "states"),
        ("#9aa5ad", "#c9d0d5", "#1f5f8b", "#7fb2d6"),
        strict=True,
    ):
        widths = [usages[name][part] / 10**9 for name in FORMS]
        sizes.barh(list(FORMS.values()), widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        sizes.text(total + 0.2, place, f"{total:.3g}", va="center", fontsize=9)
    sizes.set_title("AdamW, 16-bit parameters: bytes of each", fontsize=10, loc="left")
    sizes.legend(frameon=False, fontsize=8, ncols=4, loc="upper right", bbox_to_anchor=(1, 0))
    for axes in (times, sizes):
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0, labelsize=9)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.margins(x=0.1)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_gains(folder / "gains.png")
    draw(*train(), folder / "scale.png")
