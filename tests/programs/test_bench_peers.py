"""The benchmark beside other packages: who is missing, fails or does something else is named."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib")

import peers
import plot
from peers import BESIDE_PEERS, FP32, MASTER, NARROW, PEERS, WIDE

from amp_ext.bench import measure
from amp_ext.bench.work import LOW_MEMORY, SIDES, ShapeList

ONE_ROW = "--filter=AdamW fp32, 3 layers of 128$"

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


def run(folder: Path, *arguments: str) -> dict:
    assert peers.main([f"--out={folder}", *arguments]) == 0
    return json.loads((folder / "peers.json").read_text())


def test_who_is_not_installed_is_named(tmp_path, capsys):
    result = run(tmp_path, ONE_ROW)
    printed = capsys.readouterr().out
    for side in PEERS:
        assert f"* left out: {side}: ModuleNotFoundError: " in printed
    (row,) = result["rows"]
    assert list(row["sides"]) == ["ours", "fused", "foreach", "default"]


def test_what_is_installed_is_measured_beside_ours(install, tmp_path, capsys):
    install("DeepSpeed", TorchBehindAName)
    result = run(tmp_path, "--filter=AdamW (fp32|bf16 . master)( . scaler)?, 3 layers")
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


def without_decay(params, **options):
    return TorchBehindAName(params, **{**options, "weight_decay": 0.0})


def test_who_does_something_else_is_not_compared_as_equal(install, tmp_path):
    install("DeepSpeed", without_decay)
    install("optimi", TorchBehindAName)
    result = run(tmp_path, ONE_ROW)
    same = {row["side"]: row["same"] for row in result["methods"]}
    everybody_else = dict.fromkeys(["ours", "fused", "foreach", "default", "optimi"], True)
    assert same == everybody_else | {"DeepSpeed": False}
    (row,) = result["rows"]
    assert row["unequal"] == ["DeepSpeed"]
    table = peers.markdown(result)
    (time, kept) = [line for line in table.splitlines() if line.startswith("| DeepSpeed |")]
    assert time.endswith(" ≈ |")
    assert kept.endswith(" off ≈ |")


def that_fails(params, **options):
    raise RuntimeError("the op failed to build\nat length") from OSError("no ninja")


class NotANumber(TorchBehindAName):
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.fill_(torch.nan)


class ForTwoTensorsOnly(TorchBehindAName):
    def step(self):
        if len(self.param_groups[0]["params"]) > 3:
            raise MemoryError
        return super().step()


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        pytest.param(
            that_fails,
            "optimi in AdamW fp32: RuntimeError: the op failed to build, from OSError: no ninja",
            id="does-not-build",
        ),
        pytest.param(
            NotANumber,
            "optimi in AdamW fp32: ValueError: its parameters become inf or NaN",
            id="makes-no-numbers",
        ),
        pytest.param(
            ForTwoTensorsOnly,
            "optimi in AdamW fp32, 3 layers of 128: MemoryError",
            id="fails-on-some-tensors",
        ),
    ],
)
def test_who_fails_is_named_with_the_reason(optimizer, why, install, tmp_path, capsys):
    install("optimi", optimizer)
    result = run(tmp_path, ONE_ROW)
    assert "optimi" not in result["rows"][0]["sides"]
    assert f"* left out: {why}\n" in capsys.readouterr().out


def test_our_own_error_is_no_reason_to_leave_us_out(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(peers, "deviation", fail)
    with pytest.raises(RuntimeError, match="ours"):
        peers.compare("ours", FP32)


def test_what_a_package_prints_stays_out_of_the_table(install, tmp_path, capsys):
    def that_talks(params, **options):
        print("Loading extension module cpu_adam")
        return TorchBehindAName(params, **options)

    install("DeepSpeed", that_talks)
    run(tmp_path, ONE_ROW)
    printed = capsys.readouterr()
    assert "cpu_adam" not in printed.out
    assert "cpu_adam" in printed.err


def test_small_models_stand_with_and_without_scaler_and_with_cold_caches():
    rows = peers.choose_rows(quick=False)
    assert len(rows) == 4 * (2 + 2 * 3)
    for tensors, name in ((6, "3 layers of 128"), (20, "10 layers of 256")):
        small = [row for row in rows if row[1].name.startswith(name)]
        assert {len(shapes.sizes) for _, shapes, _ in small} == {tensors}
        for work in BESIDE_PEERS:
            kinds = [(r[0].scaler, r[2]) for r in small if replace(r[0], scaler=False) == work]
            assert sorted(kinds) == [(False, False), (False, True), (True, False)]
    quick = peers.choose_rows(quick=True)
    assert {shapes.name for _, shapes, _ in quick} == {"4 × 8M", "3 layers of 128"}


def test_a_sweep_before_each_step_is_not_counted(monkeypatch):
    monkeypatch.undo()  # the short one
    now, calls = 0.0, []

    def takes(name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            nonlocal now
            now += seconds
            calls.append(name)

        return work

    monkeypatch.setattr(peers.timeit, "default_timer", lambda: now)
    times = peers.cold_times(takes("step", 0.25), takes("sweep", 1.0), 4.0)
    assert times == [0.25] * 4
    assert calls == ["sweep", "step"] * 4
    assert peers.cold_times(takes("step", 0.25), takes("sweep", 1.0), 0.5) == [0.25]


def test_cold_rows_are_swept_and_others_are_not(monkeypatch, tmp_path):
    sweeps = []
    cold_times = peers.cold_times

    def noted(step, sweep, seconds):
        sweeps.append(sweep().item())
        return cold_times(step, sweep, seconds)

    monkeypatch.setattr(peers, "cold_times", noted)
    run(tmp_path, ONE_ROW)
    assert sweeps == []
    run(tmp_path, "--filter=AdamW fp32, 3 layers of 128, cold")
    assert set(sweeps) == {800}


def test_every_side_has_a_colour():
    assert plot.COLOURS.keys() == {*SIDES, "buffered", *PEERS}


# Who does AdamW, and who doesn't.


@pytest.mark.parametrize("scaler", [False, True], ids=["alone", "scaler"])
@each_work
def test_ours_and_torch_with_whole_arithmetic_do_what_float64_does(work, scaler):
    sides = [side for side in peers.sides_of(work) if side not in ("foreach", "default")]
    for side in sides:
        found = peers.compare(side, replace(work, scaler=scaler))
        assert found["same"], found


def test_loops_around_masters_end_where_each_other_does():
    few = ShapeList("few", ((3, 5), (70_000,)))
    ends = []
    for side in peers.sides_of(MASTER)[1:]:
        program = peers.program_of(side, MASTER, peers.make_params(MASTER, few, peers.CPU))
        for _ in range(3):
            program.step()
        ends.append(program.params)
    for by_hand, buffered in zip(*ends, strict=True):
        assert torch.equal(by_hand, buffered)


# How far the way may be off by what states are stored in: 1.5 times what was measured.
OF_STATES = {
    torch.float32: peers.TOLERANCES[MASTER],
    torch.bfloat16: 0.0065,
    "8bit-bf16": 0.045,
    "8bit": 0.045,
}


@pytest.mark.parametrize(
    "work",
    [work for work in LOW_MEMORY if work.state_dtype is not None],
    ids=lambda work: work.name,
)
def test_what_takes_less_memory_goes_where_float64_goes(work):
    without_masters = peers.TOLERANCES[WIDE] if not work.masters else 0.0
    assert peers.deviation("ours", work) <= OF_STATES[work.state_dtype] + without_masters


def test_a_weight_decay_that_is_rounded_away_is_not_the_same():
    """Each operation of these two rounds to bf16, and 1 - lr * weight_decay is 1 there."""
    for side in ("foreach", "default"):
        assert not peers.compare(side, NARROW)["same"]
        assert peers.compare(side, FP32)["same"]


CHANGED = {
    "no-decay": {"weight_decay": 0.0},
    "a-tenth-of-the-decay": {"weight_decay": 0.01},
    "rate": {"lr": 1.1e-2},
    "momentum": {"betas": (0.95, 0.999)},
}


@pytest.mark.parametrize("options", CHANGED.values(), ids=CHANGED)
@each_work
def test_other_options_are_seen(work, options, monkeypatch):
    peers.reference(work.dtype)  # with the true ones
    changed = {"AdamW": {**peers.ADAMW, **options}}
    monkeypatch.setattr("amp_ext.bench.steps.OPTIONS", changed)
    assert peers.deviation("ours", work) > 1.5 * peers.TOLERANCES[work]
