"""The state of torch's random generators, in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_ext.training.checkpoint_file import check_dict

__all__ = ["check_random_state", "random_state", "set_random_state"]


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


def check_random_state(operation: str, state: Any) -> None:
    """Raises KeyError or ValueError if a state is none of :func:`random_state`."""
    check_dict(f"{operation}: random", state)
    missing = [name for name in ("cpu", "cuda") if name not in state]
    if missing:
        raise KeyError(f"{operation}: random must have {missing}, got {list(state)}")
    if not isinstance(state["cuda"], (list, tuple)):
        raise ValueError(
            f"{operation}: random['cuda'] must be a list, got {type(state['cuda']).__name__}"
        )
    for one in (state["cpu"], *state["cuda"]):
        if not isinstance(one, Tensor) or one.dtype != torch.uint8:
            raise ValueError(f"{operation}: random must have tensors of torch.uint8, got {one!r}")
