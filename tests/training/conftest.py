"""What holds for all small trainings."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from harness.edge_shapes import threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps matrix products of a few elements away from threads, whose start costs far more.

    Nor does a benchmark's garbage collection look at all that was there before.
    """
    gc.freeze()
    with threads(1):
        yield
    gc.unfreeze()
