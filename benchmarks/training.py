"""Trains a GPT and a convolutional network with amp_ext, and with torch's nearest equivalents.

    python benchmarks/training.py --device cpu --tiny                               # under a minute
    python benchmarks/training.py --device cuda --seconds 200 --out results/training

A run trains one model for 200 steps with one of eleven configurations (``SIDES``) and one seed.
Runs with the same model and seed have the same initial parameters and the same data. The GPT has
124M parameters and learns a random language: a token follows from the previous one by one of four
rules, or is drawn by Zipf's law. The ResNet has 110 layers and 331 tensors, and learns noisy images
of random patterns.

``training.json`` and ``training.md`` are rewritten after each run; ``training.png`` is drawn at the
end, and again by ``benchmarks/plot.py training.json picture.png``. Times exclude the warm-up steps.
``update`` is the time from the end of the backward pass to the end of ``optimizer.step()`` or
``scaler.update()``, with unscaling, clipping, and copies between parameters and masters. The side
with released gradients updates during the backward pass, so compare its training rate instead.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import (
    add_files,
    buffered,
    digits,
    make_parser,
    markdown_rows,
    new_result,
    notes,
    run_and_store,
    states_of,
    summarize,
)
from offload import make_transport
from torch import Tensor, nn
from torch.nn import Parameter, functional

import amp_ext
from amp_ext.optim.offload import OffloadedStates

MAX_NORM = 1.0
SEEDS = 3


# The models and their data.


@dataclass(frozen=True)
class Sizes:
    """The sizes of both models and their batches, and the length of a run."""

    steps: int = 200
    warm_up: int = 20  # steps in which the learning rate rises; excluded from times
    rows: int = 4  # sequences per batch of the GPT
    context: int = 1024  # tokens per sequence
    tokens: int = 25_088  # size of the vocabulary
    width: int = 768
    layers: int = 12
    heads: int = 12
    images: int = 256  # images per batch of the ResNet
    pixels: int = 32  # height and width of an image
    classes: int = 100
    blocks: int = 18  # residual blocks in each of the three stages of the ResNet


FULL = Sizes()
TINY = Sizes(
    steps=16, warm_up=2, rows=2, context=16, tokens=256, width=32, layers=2, heads=2, images=8,
    pixels=8, classes=10, blocks=1,
)  # fmt: skip


class GPT(nn.Module):
    """Predicts the next token. The head is not tied to the embedding.

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.token = nn.Embedding(sizes.tokens, width)
        self.position = nn.Embedding(sizes.context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, sizes.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(sizes.layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, sizes.tokens, bias=False)
        for weight in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x)).flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions with batch normalization, added to the input."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(before, width, stride), nn.ReLU(), *convolution(width, width, 1)
        )
        narrowing = nn.Conv2d(before, width, 1, stride, bias=False)
        self.shortcut = nn.Identity() if before == width else narrowing

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def convolution(before: int, width: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]


def make_resnet(sizes: Sizes) -> nn.Module:
    """Returns a ResNet with three stages of residual blocks, with 16, 32 and 64 channels.

    Reference:
        He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2.
    """
    widths = [16] * (sizes.blocks + 1) + [32] * sizes.blocks + [64] * sizes.blocks
    blocks = [
        Residual(before, width, 1 if before == width else 2)
        for before, width in itertools.pairwise(widths)
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, sizes.classes)]
    return nn.Sequential(*convolution(3, 16, 1), nn.ReLU(), *blocks, *head)


@functools.cache
def text(sizes: Sizes, seed: int, device: torch.device) -> Tensor:
    """Returns the tokens of all batches, int64 ``[steps, rows, context + 1]``."""
    frequency = 1 / torch.arange(10.0, 10 + sizes.tokens)  # Zipf's law
    limits = (frequency / frequency.sum()).cumsum(0)

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        uniform = torch.rand(shape, generator=generator)
        return torch.searchsorted(limits, uniform).clamp_(max=sizes.tokens - 1)

    # All seeds share the rules of the language, but draw other texts.
    rules = draw((sizes.tokens, 4), torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(seed)
    shape = (sizes.context + 1, sizes.steps * sizes.rows)
    free = draw(shape, drawn)
    choice = torch.randint(5, shape, generator=drawn)  # index of the rule; 4 means no rule
    tokens = [free[0]]
    for position in range(1, sizes.context + 1):
        follower = rules[tokens[-1], choice[position].clamp(max=3)]
        tokens.append(torch.where(choice[position] < 4, follower, free[position]))
    batches = torch.stack(tokens, 1).view(sizes.steps, sizes.rows, sizes.context + 1)
    return batches.to(device)


def token_batches(sizes: Sizes, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields inputs ``[rows, context]`` and flattened targets ``[rows * context]`` of each step."""
    for rows in text(sizes, seed, device):
        yield rows[:, :-1], rows[:, 1:].flatten()


def image_batches(sizes: Sizes, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields images ``[images, 3, pixels, pixels]`` and classes ``[images]`` of each step."""
    generator = torch.Generator(device).manual_seed(0)
    coarse = torch.randn((sizes.classes, 3, 4, 4), generator=generator, device=device)
    patterns = functional.interpolate(coarse, size=sizes.pixels, mode="bilinear")
    generator.manual_seed(seed)
    for _ in range(sizes.steps):
        size = (sizes.images,)
        classes = torch.randint(sizes.classes, size, generator=generator, device=device)
        noise = torch.randn((*size, *patterns.shape[1:]), generator=generator, device=device)
        yield patterns[classes] + 2 * noise, classes


@dataclass(frozen=True)
class Task:
    """A model, its data and the options of AdamW."""

    model: Callable[[Sizes], nn.Module]
    batches: Callable[[Sizes, int, torch.device], Iterator[tuple[Tensor, Tensor]]]
    unit: str  # unit of the training rate: "tokens" or "images", per second
    options: dict[str, Any]


TASKS = {
    "GPT": Task(
        GPT, token_batches, "tokens",
        {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
    ),
    "ResNet": Task(make_resnet, image_batches, "images", {"lr": 2e-3, "weight_decay": 0.05}),
}  # fmt: skip


# The configurations that train the models.


@dataclass(frozen=True)
class Side:
    """A configuration: dtypes, optimizer and scaler that train a model."""

    group: str  # sides with the same group are compared; torch's side is the first of a group
    name: str
    autocast: torch.dtype | None = None  # dtype of autocast (parameters are float32), or None
    dtype: torch.dtype = torch.float32  # dtype of the parameters
    scaled: bool = False  # whether to use a gradient scaler and clip by norm
    ours: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # extra options of our optimizer
    released: bool = False  # whether backward() steps each parameter and frees its gradient
    offloaded: bool = False  # whether masters and moments are in host memory


FP16, BF16 = torch.float16, torch.bfloat16
SCALED, PLAIN, NARROW = "fp16 autocast, scaler, clipping", "bf16 autocast", "bf16 parameters"
SIDES = [
    Side(SCALED, "torch", FP16, scaled=True),
    Side(SCALED, "amp_ext", FP16, scaled=True, ours=True),
    Side(PLAIN, "torch", BF16),
    Side(PLAIN, "amp_ext", BF16, ours=True),
    Side(NARROW, "torch, masters by hand", dtype=BF16),
    Side(NARROW, "amp_ext, float32 masters", dtype=BF16, ours=True),
    Side(
        NARROW, "amp_ext, split, bf16 states", dtype=BF16, ours=True,
        options={"master_weights": "split", "state_dtype": BF16},
    ),
    Side(
        NARROW, "amp_ext, split8, 8bit states", dtype=BF16, ours=True,
        options={"master_weights": "split8", "state_dtype": "8bit"},
    ),
    Side(
        NARROW, "amp_ext, 5 bytes", dtype=BF16, ours=True, released=True,
        options={"master_weights": "split8", "state_dtype": "8bit"},
    ),
    Side(NARROW, "amp_ext, offloaded", dtype=BF16, ours=True, offloaded=True),
    Side(
        NARROW, "amp_ext, offloaded, 5 bytes", dtype=BF16, ours=True, released=True, offloaded=True,
        options={"master_weights": "split8", "state_dtype": "8bit"},
    ),
]  # fmt: skip


class Loop:
    """The optimizer, scaler and masters of a side, and the work after a backward pass."""

    def __init__(self, side: Side, params: list[Parameter], options: dict[str, Any]) -> None:
        self.side, self.params, device = side, params, params[0].device
        scaler = amp_ext.GradScaler if side.ours else torch.amp.GradScaler
        self.scaler = scaler(device.type, enabled=side.scaled)
        self.offload: OffloadedStates | None = None
        self.update = self.step
        if side.ours:
            options = {"max_grad_norm": MAX_NORM if side.scaled else None, **options}
            self.optimizer: Any = amp_ext.optim.AdamW(params, **options, **side.options)
            if side.released:
                amp_ext.optim.release_gradients(self.optimizer)
            if side.offloaded:
                self.offload = OffloadedStates(self.optimizer, make_transport(device))
        elif side.dtype == torch.float32:
            self.optimizer = torch.optim.AdamW(params, **options, fused=True)
        else:
            masters = [Parameter(param.detach().float()) for param in params]
            self.optimizer = torch.optim.AdamW(masters, **options, fused=True)
            self.update = buffered(params, masters, self.step)

    def step(self) -> None:
        """Takes a step, clipped in torch's way if the optimizer is torch's."""
        if not self.side.scaled:
            return self.optimizer.step()
        if not self.side.ours:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def bytes_kept(self) -> int:
        """Returns the bytes of parameters, masters, gradients and states between steps.

        Offloaded states and the host copies of parameters count, too.
        """
        tensors = [*self.params, *(p for g in self.optimizer.param_groups for p in g["params"])]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        if self.offload is not None:
            tensors += [self.offload.host_of(param) for param in self.params]
        tensors += states_of(self.optimizer)
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def now(device: torch.device) -> Any:
    """Returns a CUDA event recorded now or, on a CPU, the time in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Returns the time between two results of :func:`now`."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def train(name: str, side: Side, seed: int, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Trains a model once; returns its measurements and the loss of each step."""
    task, on_gpu = TASKS[name], device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(seed)
    with device:
        model = task.model(sizes).to(side.dtype)
    params = list(model.parameters())
    loop = Loop(side, params, task.options)
    autocast = torch.autocast(device.type, side.autocast, enabled=side.autocast is not None)
    losses, updates, begin = [], [], 0.0
    for step, (inputs, targets) in enumerate(task.batches(sizes, seed, device)):
        if step == sizes.warm_up:
            synchronize()
            begin = time.perf_counter()
        for group in loop.optimizer.param_groups:
            group["lr"] = task.options["lr"] * min(1.0, (step + 1) / sizes.warm_up)
        model.zero_grad()
        if inputs.is_floating_point():
            inputs = inputs.to(side.dtype)
        with autocast:
            loss = functional.cross_entropy(model(inputs).float(), targets)
        loop.scaler.scale(loss).backward()
        start = now(device)
        loop.update()
        updates.append((start, now(device)))
        losses.append(loss.detach())
    synchronize()
    seconds = time.perf_counter() - begin
    steps = sizes.steps - sizes.warm_up
    return {
        "model": name,
        "group": side.group,
        "side": side.name,
        "seed": seed,
        "parameters": sum(param.numel() for param in params),
        "tensors": len(params),
        "unit": task.unit,
        "rate": steps * targets.numel() / seconds,
        "step_ms": 1e3 * seconds / steps,
        "update_ms": statistics.median(milliseconds(*pair) for pair in updates[sizes.warm_up :]),
        "bytes_kept": loop.bytes_kept(),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "losses": torch.stack(losses).tolist(),
    }


# The tables of all runs.


def markdown(result: dict[str, Any]) -> str:
    """Formats a table for each model, in Markdown."""
    rows = sorted(summarize(result["runs"]), key=lambda row: row["model"])
    lines = ["; ".join(result["surroundings"])]
    for model, of_model in itertools.groupby(rows, lambda row: row["model"]):
        first, *others = of_model
        about = f"{first['parameters'] / 1e6:.4g}M parameters in {first['tensors']} tensors"
        table = [[
            "", f"{first['unit']}/s", "÷ torch's", "update, ms", "torch's ÷",
            "kept between steps, MB", "peak, MB", "loss", "minus torch's",
        ]]  # fmt: skip
        for row in (first, *others):
            peak, is_torch = row["peak_bytes"], row["side"].startswith("torch")
            table.append([
                f"{row['group']}: {row['side']}",
                digits(row["rate"]),
                show((row["faster"], None), ".2f"),
                digits(row["update_ms"]),
                show((row["update_faster"], None), ".2f"),
                digits(row["bytes_kept"] / 1e6),
                "" if peak is None else digits(peak / 1e6),
                show((row["loss"], row["spread"]), ".3f"),
                "" if is_torch else show(row["difference"], "+.4f"),
            ])  # fmt: skip
        lines += ["", f"{model}, {about}:", "", *markdown_rows(table)]
    return "\n".join([*lines, "", *notes(result)])


def show(figure: tuple[float | None, float | None], form: str) -> str:
    """Formats a mean and, if it is known, its standard deviation."""
    mean, spread = figure
    if mean is None:
        return ""
    return f"{mean:{form}}" + ("" if spread is None else f" ± {spread:{form.lstrip('+')}}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains each side with the first seed, then with the others; prints and writes the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small models and 16 steps")
    parser.add_argument("--sides", default="", help="a pattern: only the sides with such names")
    add_files(parser, "training")
    options = parser.parse_args(arguments)
    sides = [side for side in SIDES if re.search(options.sides, side.name)]
    chosen = [(name, side) for name in TASKS for side in sides]
    sizes, device = TINY if options.tiny else FULL, torch.device(options.device)
    if options.tiny:
        torch.set_num_threads(1)  # more threads gain nothing with such small tensors
    result = new_result(device, runs=[])

    def run(*of_run: Any) -> None:
        result["runs"].append(train(*of_run, sizes, device))

    runs = (
        (
            f"{name}, {side.group}: {side.name}, seed {seed}",
            functools.partial(run, name, side, seed),
        )
        for seed in range(SEEDS)
        for name, side in chosen
    )
    return run_and_store("training", options, result, runs, markdown)


if __name__ == "__main__":
    sys.exit(main())
