"""What holds for all small trainings."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps matrix products of a few elements away from threads, whose start costs far more.

    Nor does a benchmark's garbage collection look at all that was there before.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
