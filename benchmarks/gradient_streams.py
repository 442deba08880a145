"""Generates sequences of gradients that reveal how low-precision states change an optimizer.

A stream holds the gradients of one parameter in all steps: float32 of shape [steps, rows, columns],
rounded to bfloat16 precision.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 2000
SHAPE = (64, 64)
CHARACTERS = 48  # length of the text that the model learns


def scales(decades: float, generator: torch.Generator) -> Tensor:
    """Draws gradient magnitudes around 1e-3, log-uniform over ``decades`` powers of ten."""
    return 10 ** (decades * (torch.rand(SHAPE, generator=generator) - 0.5) - 3)


def noise(decades: float, steps: int, generator: torch.Generator) -> Tensor:
    """Generates gradients of mean 0, whose magnitudes are spread over ``decades``."""
    return torch.randn(steps, *SHAPE, generator=generator) * scales(decades, generator)


def falling(decades: float, factor: float, steps: int, generator: torch.Generator) -> Tensor:
    """Generates gradients that are multiplied by ``factor`` halfway.

    They shrink at the end of a warm-up, and become zero in a layer that is no longer used.
    """
    gradients = noise(decades, steps, generator)
    gradients[steps // 2 :] *= factor
    return gradients


def leaning(steps: int, generator: torch.Generator) -> Tensor:
    """Generates gradients whose mean is as large as their noise, as happens far from a minimum."""
    sizes = scales(0.5, generator)
    side = torch.randn(SHAPE, generator=generator).sign()
    return (torch.randn(steps, *SHAPE, generator=generator) + side) * sizes


def sparse(period: int, steps: int, generator: torch.Generator) -> Tensor:
    """Generates gradients like an embedding's: each row is nonzero once per ``period`` steps."""
    turn = torch.arange(SHAPE[0]) * period // SHAPE[0]
    is_seen = torch.arange(steps).view(-1, 1) % period == turn
    return noise(0.5, steps, generator) * is_seen.unsqueeze(-1)


def text(generator: torch.Generator, length: int = 20000) -> Tensor:
    """Draws characters from a Markov chain with Zipf-like frequencies, so that some are rare."""
    frequency = 1 / torch.arange(1, CHARACTERS + 1) ** 2
    affinity = torch.randn(CHARACTERS, CHARACTERS, generator=generator).mul(1.5).exp()
    following = (affinity * frequency).cumsum(dim=1)
    following = (following / following[:, -1:]).tolist()
    written, position = [0], torch.rand(length, generator=generator).tolist()
    for each in position[1:]:
        written.append(bisect.bisect_left(following[written[-1]], each, hi=CHARACTERS - 1))
    return torch.tensor(written)


def of_model(steps: int, generator: torch.Generator) -> Tensor:
    """Records the gradients of a small network that learns to predict a character from two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Embedding(CHARACTERS, 32),
            nn.Flatten(),
            nn.Linear(64, 32, bias=False),
            nn.GELU(),
            nn.Linear(32, CHARACTERS, bias=False),
        )
    characters = text(generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    gradients = []
    for _ in range(steps):
        start = torch.randint(len(characters) - 2, (64,), generator=generator)
        context = torch.stack([characters[start], characters[start + 1]], dim=1)
        optimizer.zero_grad()
        F.cross_entropy(model(context), characters[start + 2]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
        schedule.step()
    return torch.stack(gradients).view(steps, -1, 32)


STREAMS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "two decades": functools.partial(falling, 2.0, 0.1),
    "half a decade": functools.partial(falling, 0.5, 0.1),
    "ending": functools.partial(falling, 0.5, 0.0),
    "leaning": leaning,
    "sparse": functools.partial(sparse, 51),
    "rare": functools.partial(sparse, 501),
    "model": of_model,
}


@functools.cache
def gradients(name: str, steps: int = STEPS, seed: int = 0) -> Tensor:
    """Returns the stream with this name. The tensor is cached, so don't write to it."""
    generator = torch.Generator().manual_seed(seed)
    return STREAMS[name](steps, generator).bfloat16().float()
