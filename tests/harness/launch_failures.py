"""Launches that are refused, one at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

_USES = itertools.count()

WORDS = "CUDA error: too many resources requested for launch"


@contextlib.contextmanager
def refusing_launch(number: int) -> Iterator[None]:
    """Lets the emulator refuse the launch of this number from here on, from 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_EMULATOR_REFUSED_LAUNCH", f"{number} for use {next(_USES)}")
        yield


def launches_of(call: Callable[[], Any]) -> int:
    """Returns how many launches a call makes in the emulator, which refuses each in turn."""
    for number in itertools.count():
        try:
            with refusing_launch(number):
                call()
        except torch.AcceleratorError:
            continue
        return number
