"""The optimizers of other packages, where they are installed, do what the benchmark says.

In the environment of `make bench-peers`: `TEST=1 scripts/bench_peers.sh`.
"""

from __future__ import annotations

import os

import pytest
from peers import NARROW, PEERS, compare, find

REQUIRED = os.environ.get("AMP_EXT_REQUIRE_PEERS") == "1"
EACH = [
    pytest.param(side, work, id=f"{side}-{work.name}")
    for side, peer in PEERS.items()
    for work in (*peer.does, *peer.differs)
]
#: Each operation rounds to bf16, and loses the decay; those with bf16 states only.
ROUNDS_IT_AWAY = {("optimi", NARROW)}


@pytest.mark.slow
@pytest.mark.parametrize(("side", "work"), EACH)
def test_a_package_does_what_the_table_says(side, work):
    _, why = find(PEERS[side])
    if why is not None and not REQUIRED:
        pytest.skip(why)
    found = compare(side, work)
    assert found["why"] is None
    does = work in PEERS[side].does
    assert found["same"] == (does and (side, work) not in ROUNDS_IT_AWAY)
    assert found["deviation"] < 0.1
