"""Launches that are refused, one at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

_USES = itertools.count()

WORDS = "CUDA error: too many resources requested for launch"


@contextlib.contextmanager
def refusing_launch(number: int) -> Iterator[None]:
    """Lets the emulator refuse the launch of this number from here on, from 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_EMULATOR_REFUSED_LAUNCH", f"{number} for use {next(_USES)}")
        yield
