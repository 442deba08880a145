"""The benchmark beside other packages' optimizers, which do what it says where they are installed.

In the environment of `make bench-peers`: `make bench-peers TEST=1`.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

pytest.importorskip("matplotlib")

import peers
import torch
from peers import BESIDE_PEERS, LOW_MEMORY, PEERS, find

from amp_ext import bench
from amp_ext.bench import ShapeList, make_params


@pytest.fixture
def nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the packages that are installed, and makes all that is timed short."""
    for peer in PEERS.values():
        monkeypatch.setitem(sys.modules, peer.module.partition(".")[0], None)
    times = bench.run_times
    monkeypatch.setattr(bench, "run_times", lambda step: times(step, 1e-4))
    monkeypatch.setattr(bench, "STREAMING_ELEMENTS", {"cpu": 1_000})


@pytest.mark.usefixtures("nobody_there")
def test_ours_is_measured_where_no_other_package_is(tmp_path, capsys):
    rows = "AdamW (fp32|bf16 . master)( . scaler)?, 3 layers"
    assert peers.main([f"--out={tmp_path}", f"--filter={rows}"]) == 0
    result = json.loads((tmp_path / "peers.json").read_text())
    assert [(row["work"], row["shapes"]) for row in result["rows"]] == [
        ("AdamW fp32", "3 layers of 128"),
        ("AdamW bf16 + master", "3 layers of 128"),
        ("AdamW fp32 + scaler", "3 layers of 128"),
        ("AdamW bf16 + master + scaler", "3 layers of 128"),
    ]
    assert (tmp_path / "peers.md").read_text() == capsys.readouterr().out
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG\r\n")


# Who does AdamW, and who doesn't.

REQUIRED = os.environ.get("AMP_EXT_REQUIRE_PEERS") == "1"
EACH = [
    pytest.param(side, work, id=f"{side}-{work.name}")
    for work in (*BESIDE_PEERS, *LOW_MEMORY)
    for side in peers.sides_of(work)
    if side != "ours"
] + [
    pytest.param(side, work, id=f"{side}-{work.name}")
    for side, peer in PEERS.items()
    if "cpu" in peer.devices
    for work in (*peer.does, *peer.differs)
]


def large_params(work):
    shapes = ShapeList("agreement", ((128, 128), (128,), (1_003,)))
    params = make_params(work, shapes, peers.CPU)
    for param in params:
        param.data *= 10.0
    return params


@pytest.mark.slow
@pytest.mark.parametrize(("side", "work"), EACH)
def test_a_side_does_what_ours_does_unless_it_is_marked(side, work):
    if side in PEERS and (why := find(PEERS[side])[1]) and not REQUIRED:
        pytest.skip(why)
    ends = []
    for each in ("ours", side):
        params = large_params(work)
        program = peers.program_of(each, work, params)
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            for param in params:
                grad = 1e-2 * torch.randn(param.shape, generator=generator)
                param.grad.copy_(grad.to(work.dtype))  # some optimizers write to gradients
            program.step()
        ends.append([param.detach().double() for param in params])
    starts = [param.detach().double() for param in large_params(work)]
    rows = zip(*ends, starts, strict=True)
    apart = max(((a - b).norm() / (a - start).norm()).item() for a, b, start in rows)
    limit = {peers.FP32: 1e-4, peers.MASTER: 0.005}.get(work, 0.07)
    assert apart < (0.1 if peers.differs(side, work) else limit)
