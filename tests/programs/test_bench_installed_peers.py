"""The optimizers of other packages, where they are installed, do what the benchmark says.

In the environment of `make bench-peers`: `TEST=1 scripts/bench_peers.sh`.
"""

from __future__ import annotations

import os

import pytest
import torch

from amp_ext.bench import agreement, peers
from amp_ext.bench.work import BESIDE_PEERS, Work

NARROW = BESIDE_PEERS[2]
REQUIRED = os.environ.get("AMP_EXT_REQUIRE_PEERS") == "1"
EACH = [
    pytest.param(side, work, id=f"{side}-{work.name}")
    for side, peer in peers.PEERS.items()
    for work in peer.methods
]
#: Each operation rounds to bf16, and loses the decay; those with bf16 states only.
ROUNDS_IT_AWAY = {("optimi", NARROW)}


@pytest.mark.slow
@pytest.mark.parametrize(("side", "work"), EACH)
def test_a_package_does_what_the_table_says(side, work, monkeypatch):
    _, why = peers.find(side)
    if why is not None and not REQUIRED:
        pytest.skip(why)
    found = agreement.compare(side, work)
    assert found["why"] is None
    how = peers.method(side, work)
    assert found["same"] == (how.same and (side, work) not in ROUNDS_IT_AWAY)
    assert found["deviation"] < 0.1
    states = states_of(side, work)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(how.states, torch.uint8)
    assert dtype in states


def states_of(side: str, work: Work) -> set[torch.dtype]:
    """Returns the dtypes of what an optimizer keeps of a tensor that is large enough for 8 bits."""
    dtype = torch.float32 if peers.method(side, work).by_hand else work.dtype
    param = torch.nn.Parameter(torch.ones(128, 128, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = peers.make_optimizer(side, [param], work)
    optimizer.step()
    kept = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    return {getattr(value, "codes", value).dtype for value in kept if value.numel() > 1}
