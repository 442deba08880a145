"""Saves and restores the states of torch's random generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """Returns the states of the CPU generator and, once CUDA is initialized, of all GPUs."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores torch's generators; skips the states of GPUs that this machine lacks.

    Args:
        state: The result of :func:`random_state`.
    """
    if state["cuda"] and torch.cuda.is_available():
        for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(one, device)
    torch.set_rng_state(state["cpu"])
