"""The state of torch's random generators, in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """Returns the state of torch's generators; GPUs have none before their first use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets torch's generators, except those of GPUs that are not there.

    Args:
        state: From :func:`random_state`.
    """
    if state["cuda"] and torch.cuda.is_available():
        for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(one, device)
    torch.set_rng_state(state["cpu"])
