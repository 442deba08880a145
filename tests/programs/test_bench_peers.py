"""The benchmark beside other packages: who is missing, fails or does something else is named."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib")

import peers
from peers import BESIDE_PEERS, PEERS

from amp_ext.bench import measure

each_work = pytest.mark.parametrize("work", BESIDE_PEERS, ids=lambda work: work.name)


@pytest.fixture(autouse=True)
def nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the packages that are installed, and makes all that is timed short."""
    for peer in PEERS.values():
        monkeypatch.setitem(sys.modules, peer.module.partition(".")[0], None)
    times, cold_times = peers.run_times, peers.cold_times
    monkeypatch.setattr(peers, "run_times", lambda step, seconds: times(step, 1e-4))
    monkeypatch.setattr(
        peers, "cold_times", lambda step, sweep, seconds: cold_times(step, sweep, 1e-4)
    )
    monkeypatch.setattr(peers, "SWEEP_ELEMENTS", 800)
    monkeypatch.setattr(measure, "STREAMING_ELEMENTS", {"cpu": 1_000})


class TorchBehindAName(torch.optim.AdamW):
    """Does what it is asked for, and takes the options of any package."""

    def __init__(self, params, *, fp32_optimizer_states=True, kahan_sum=False, **options):
        super().__init__(params, fused=True, **options)


Optimizer = Callable[..., torch.optim.Optimizer]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Optimizer], None]:
    """Puts a package in place that has the given class or function as its optimizer."""
    names = {"DeepSpeed": "DeepSpeedCPUAdam", "optimi": "AdamW"}

    def put(side: str, optimizer: Optimizer) -> None:
        path = PEERS[side].module.split(".")
        for end in range(1, len(path) + 1):
            module = ModuleType(".".join(path[:end]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, names[side], optimizer)
        monkeypatch.setattr(peers.importlib.metadata, "version", lambda distribution: "1.2.3")

    return put


def test_what_is_installed_is_measured_beside_ours(install, tmp_path, capsys):
    install("DeepSpeed", TorchBehindAName)
    rows = "AdamW (fp32|bf16 . master)( . scaler)?, 3 layers"
    assert peers.main([f"--out={tmp_path}", f"--filter={rows}"]) == 0
    result = json.loads((tmp_path / "peers.json").read_text())
    assert [(row["work"], row["shapes"]) for row in result["rows"]] == [
        ("AdamW fp32", "3 layers of 128"),
        ("AdamW bf16 + master", "3 layers of 128"),
        ("AdamW fp32 + scaler", "3 layers of 128"),
        ("AdamW bf16 + master + scaler", "3 layers of 128"),
        ("AdamW fp32", "3 layers of 128, cold caches"),
        ("AdamW bf16 + master", "3 layers of 128, cold caches"),
    ]
    for row in result["rows"]:
        seconds = {side: figures["seconds"] for side, figures in row["sides"].items()}
        ratio = seconds["DeepSpeed"] / seconds["ours"]
        assert row["ratios"]["DeepSpeed"] == pytest.approx(ratio)
        assert row["unequal"] == []
    assert "deepspeed 1.2.3" in result["surroundings"]
    table = (tmp_path / "peers.md").read_text()
    assert table == capsys.readouterr().out
    assert re.search(r"\| DeepSpeed \| \S+e-07 off \| 0.00\d off \|", table)
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG\r\n")


# Who does AdamW, and who doesn't.


@pytest.mark.parametrize("scaler", [False, True], ids=["alone", "scaler"])
@each_work
def test_ours_and_torch_with_whole_arithmetic_do_what_float64_does(work, scaler):
    sides = [side for side in peers.sides_of(work) if side not in ("foreach", "default")]
    for side in sides:
        found = peers.compare(side, replace(work, scaler=scaler))
        assert found["same"], found
