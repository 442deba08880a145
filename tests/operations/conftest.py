"""A GPU, for tests of what no other row has."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def gpu() -> torch.device:
    """The GPU; a missing one is a skip, and a failure under ``AMP_EXT_REQUIRE_CUDA=1``."""
    if not torch.cuda.is_available():
        if os.environ.get("AMP_EXT_REQUIRE_CUDA") == "1":
            pytest.fail("AMP_EXT_REQUIRE_CUDA=1, but no CUDA device")
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
