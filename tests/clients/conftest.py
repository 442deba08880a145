"""What the tests of several clients need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Forgets the state that all accelerators of a process share."""
    yield
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
