"""The benchmark beside other packages' optimizers, which do what it says where they are installed.

In the environment of `make bench-peers`: `make bench-peers TEST=1`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys

import pytest

pytest.importorskip("matplotlib")

import common
import peers
from peers import BESIDE_PEERS, LOW_MEMORY, NARROW, PEERS, compare, find

from amp_ext.bench import measure
from amp_ext.bench.steps import parse_work

each_work = pytest.mark.parametrize(
    "work", [*BESIDE_PEERS, *LOW_MEMORY], ids=lambda work: work.name
)


@pytest.fixture
def nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the packages that are installed, and makes all that is timed short."""
    for peer in PEERS.values():
        monkeypatch.setitem(sys.modules, peer.module.partition(".")[0], None)
    times = peers.run_times
    monkeypatch.setattr(peers, "run_times", lambda step, seconds: times(step, 1e-4))
    monkeypatch.setattr(measure, "STREAMING_ELEMENTS", {"cpu": 1_000})


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


@pytest.mark.usefixtures("nobody_there")
def test_a_row_that_fails_leaves_the_others_and_none_begins_too_late(tmp_path, monkeypatch):
    measure_row, times = peers.measure_row, itertools.count(0, 10)

    def failing(work, *rest):
        if work == peers.FP32:
            raise RuntimeError("out of memory")
        return measure_row(work, *rest)

    monkeypatch.setattr(peers, "measure_row", failing)
    monkeypatch.setattr(common.time, "monotonic", lambda: next(times))
    # The rows begin at 10, 30, 50 and so on, and last for 10.
    rows = "AdamW (fp32|bf16 . (master|16.*)), 3 layers of 128$"
    assert peers.main([f"--out={tmp_path}", f"--filter={rows}", "--seconds=45"]) == 1
    result = json.loads((tmp_path / "peers.json").read_text())
    assert [row["work"] for row in result["rows"]] == ["AdamW bf16 + 16-bit states"]
    assert result["failed"] == ["AdamW fp32, 3 layers of 128: RuntimeError: out of memory"]
    assert "AdamW bf16 + master, 3 layers of 128: not begun" in (tmp_path / "peers.md").read_text()


# Who does AdamW, and who doesn't.

REQUIRED = os.environ.get("AMP_EXT_REQUIRE_PEERS") == "1"
EACH = [
    pytest.param(side, work, id=f"{side}-{work.name}")
    for side, peer in PEERS.items()
    if "cpu" in peer.devices
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


@each_work
def test_ours_and_torch_do_it_on_a_gpu_too(work, gpu):
    for side in peers.sides_of(work, gpu):
        if side != "foreach":
            assert compare(side, work, gpu)["same"]


@pytest.mark.parametrize("scaler", [False, True], ids=["alone", "scaler"])
@each_work
def test_ours_and_torch_with_whole_arithmetic_do_what_float64_does(work, scaler):
    sides = [side for side in peers.sides_of(work) if side not in ("foreach", "default")]
    for side in sides:
        found = compare(side, parse_work(work.name + " + scaler" * scaler))
        assert found["same"], found
