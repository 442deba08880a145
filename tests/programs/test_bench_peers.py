"""The benchmark beside other packages: who is missing, fails or does something else is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from amp_ext.bench import agreement, measure, peers, plot, report, shapes
from amp_ext.bench.__main__ import main
from amp_ext.bench.work import (
    BESIDE_PEERS,
    BFLOAT16,
    EIGHT_BIT,
    EIGHT_BIT_FIRST,
    FLOAT32,
    LOW_MEMORY,
    SIDES,
)

CPU = torch.device("cpu")
FP32, WIDE, NARROW, MASTER = BESIDE_PEERS
TINY = ["--peers", "--shrink=20000", "--rounds=1", "--seconds=1e-4"]
ONE_ROW = "--filter=AdamW fp32, 3 layers of 128 .1"

each_work = pytest.mark.parametrize("work", BESIDE_PEERS, ids=lambda work: work.name)


@pytest.fixture(autouse=True)
def nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the packages that are installed."""
    for peer in peers.PEERS.values():
        monkeypatch.setitem(sys.modules, peer.module.partition(".")[0], None)


class TorchBehindAName(torch.optim.AdamW):
    """Does what it is asked for, and takes the options of any package."""

    def __init__(self, params, *, fp32_optimizer_states=True, kahan_sum=False, **options):
        super().__init__(params, fused=True, **options)


Optimizer = Callable[..., torch.optim.Optimizer]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Optimizer], None]:
    """Puts a package in place that has the given class or function as its optimizer."""
    names = {"deepspeed": "DeepSpeedCPUAdam", "optimi": "AdamW"}

    def put(side: str, optimizer: Optimizer) -> None:
        path = peers.PEERS[side].module.split(".")
        for end in range(1, len(path) + 1):
            module = ModuleType(".".join(path[:end]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, names[side], optimizer)

    return put


def run(folder: Path, *arguments: str) -> dict:
    assert main([*TINY, f"--json={folder / 'x.json'}", *arguments]) == 0
    return json.loads((folder / "x.json").read_text())


def test_who_is_not_installed_is_named_with_what_to_type(tmp_path, capsys):
    result = run(tmp_path, ONE_ROW)
    printed = capsys.readouterr().out.replace("\n", " ")
    for package in ("deepspeed", "bitsandbytes", "torchao", "torch-optimi"):
        why = f"not installed: pip install {package}"
        assert result["peers"][package]["why"] == why
        assert f"left out: {package}, {why}" in printed
        assert f"* left out: {package}, {why}" in report.markdown(result)
    (row,) = result["rows"]
    assert list(row["sides"]) == ["ours", "fused", "foreach", "default"]


def test_what_is_installed_is_measured_beside_ours_and_is_not_to_be_faster(
    install, tmp_path, capsys
):
    install("deepspeed", TorchBehindAName)
    folder = tmp_path / "results"
    outputs = [f"--{name}={folder}" for name in ("markdown", "plot")]
    result = run(tmp_path, "--filter=AdamW (fp32|bf16 . master)( . scaler)?, 3 layers", *outputs)
    assert [(row["work"], row["cold"]) for row in result["rows"]] == [
        ("AdamW fp32", False),
        ("AdamW bf16 + master", False),
        ("AdamW fp32 + scaler", False),
        ("AdamW bf16 + master + scaler", False),
        ("AdamW fp32", True),
        ("AdamW bf16 + master", True),
    ]
    for row in result["rows"]:
        seconds = {side: figures["seconds"] for side, figures in row["sides"].items()}
        ratio = seconds["deepspeed"] / seconds["ours"]
        assert row["ratios"]["deepspeed"] == pytest.approx(ratio)
        assert row["target_ratios"]["deepspeed"] == 1.0
        assert row["unequal"] == []
    assert result["peers"]["deepspeed"]["why"] is None
    (table,) = folder.glob("*-peers.md")
    kept = "| DeepSpeed | fp32; 1e-06 off | fp32; master: fp32, copied by a loop; 0.003 off |"
    assert kept in table.read_text()
    (picture,) = folder.glob("*-peers.png")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "DeepSpeed" in capsys.readouterr().out
    assert main([f"--load={tmp_path / 'x.json'}", "--filter=fp32, 3 layers of 128 .1"]) == 0
    shown = capsys.readouterr().out
    assert "fp32; 1e-06 off" in shown
    assert "master" not in shown


def without_decay(params, **options):
    return TorchBehindAName(params, **{**options, "weight_decay": 0.0})


def test_who_does_something_else_is_not_compared_as_equal(install, tmp_path):
    install("deepspeed", without_decay)
    install("optimi", TorchBehindAName)
    result = run(tmp_path, ONE_ROW)
    same = {row["side"]: row["same"] for row in result["methods"]}
    everybody_else = dict.fromkeys(["ours", "fused", "foreach", "default", "optimi"], True)
    assert same == everybody_else | {"deepspeed": False}
    (row,) = result["rows"]
    assert row["unequal"] == ["deepspeed"]
    assert row["target_ratios"].keys() == everybody_else.keys() - {"ours"}
    table = report.markdown(result)
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


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        pytest.param(
            that_fails,
            "RuntimeError: the op failed to build, from OSError: no ninja",
            id="does-not-build",
        ),
        pytest.param(
            NotANumber, "ValueError: its parameters become inf or NaN", id="makes-no-numbers"
        ),
    ],
)
def test_who_fails_is_named_with_the_reason(optimizer, why, install, tmp_path, capsys):
    install("optimi", optimizer)
    result = run(tmp_path, ONE_ROW)
    assert "optimi" not in result["rows"][0]["sides"]
    assert f"left out: optimi in AdamW fp32, {why}" in capsys.readouterr().out


class ForTwoTensorsOnly(TorchBehindAName):
    def step(self):
        if len(self.param_groups[0]["params"]) > 3:
            raise MemoryError
        return super().step()


def test_who_fails_on_some_tensors_is_named_there(install, tmp_path, capsys):
    install("optimi", ForTwoTensorsOnly)
    result = run(tmp_path, ONE_ROW)
    assert "optimi" not in result["rows"][0]["sides"]
    assert result["left_out"] == [
        {"row": "AdamW fp32, 3 layers of 128 (1/20000)", "why": "optimi: MemoryError"}
    ]
    assert "3 layers of 128 (1/20000), optimi: MemoryError" in capsys.readouterr().out


def test_who_cannot_be_imported_is_named_with_the_reason(install):
    install("deepspeed", TorchBehindAName)
    del sys.modules["deepspeed.ops.adam"]  # a release that has it elsewhere
    _, why = peers.find("deepspeed")
    assert why == "ModuleNotFoundError: No module named 'deepspeed.ops.adam'"


def test_our_own_error_is_no_reason_to_leave_us_out(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(agreement, "deviation", fail)
    with pytest.raises(RuntimeError, match="ours"):
        agreement.compare("ours", FP32)
    monkeypatch.setattr(measure, "make_program", fail)
    row = measure.Row(FP32, shapes.small_model(1, 2))
    with pytest.raises(RuntimeError, match="ours"):
        measure.make_steps(row, ["ours"], CPU)


def test_what_a_package_prints_stays_out_of_the_table(install, tmp_path, capsys):
    def that_talks(params, **options):
        print("Loading extension module cpu_adam")
        return TorchBehindAName(params, **options)

    install("deepspeed", that_talks)
    run(tmp_path, ONE_ROW, "--markdown")
    printed = capsys.readouterr()
    assert "cpu_adam" not in printed.out
    assert "cpu_adam" in printed.err


def test_small_models_stand_with_and_without_scaler_and_with_cold_caches():
    rows = measure.choose_rows(CPU, measure.Effort(peers=True))
    assert {row.work.plain for row in rows} == set(BESIDE_PEERS)
    assert len({row.name for row in rows}) == len(rows) == 4 * (2 + 2 * 3)
    for tensors, name in ((6, "3 layers of 128"), (20, "10 layers of 256")):
        small = [row for row in rows if row.shapes.name.startswith(name)]
        assert {len(row.shapes.sizes) for row in small} == {tensors}
        for work in BESIDE_PEERS:
            kinds = [(r.work.scaler, r.shapes.cold) for r in small if r.work.plain == work]
            assert sorted(kinds) == [(False, False), (False, True), (True, False)]
    quick = measure.choose_rows(CPU, measure.Effort(peers=True, quick=True))
    assert {row.shapes.name for row in quick} == {"4 × 8M", "3 layers of 128"}


def test_a_sweep_before_each_step_is_not_counted(monkeypatch):
    now, calls = 0.0, []

    def takes(name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            nonlocal now
            now += seconds
            calls.append(name)

        return work

    monkeypatch.setattr(measure.timeit, "default_timer", lambda: now)
    times = measure.cold_times(takes("step", 0.25), takes("sweep", 1.0), 4.0)
    assert times == [0.25] * 4
    assert calls == ["sweep", "step"] * 4
    assert measure.cold_times(takes("step", 0.25), takes("sweep", 1.0), 0.5) == [0.25]


def test_cold_rows_are_swept_and_others_are_not(install, monkeypatch, tmp_path):
    sweeps = []
    cold_times = measure.cold_times

    def noted(step, sweep, seconds):
        sweeps.append(sweep().item())
        return cold_times(step, sweep, seconds)

    monkeypatch.setattr(measure, "cold_times", noted)
    run(tmp_path, ONE_ROW)
    assert sweeps == []
    run(tmp_path, "--filter=AdamW fp32, 3 layers of 128, cold")
    assert sweeps == [16_000_000 // 20_000] * 4  # sides


def test_peers_are_for_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr("amp_ext.bench.__main__._is_here", lambda device: True)
    with pytest.raises(SystemExit, match="2"):
        main(["--peers", "--device=cuda"])
    assert "argument --peers: these are optimizers for the CPU" in capsys.readouterr().err


def test_files_from_before_are_shown_as_they_were(capsys):
    folder = Path(__file__).resolve().parents[2] / "benchmarks/results"
    for stored in folder.glob("*.json"):
        assert main([f"--load={stored}", "--markdown"]) == 0
        assert json.loads(stored.read_text())["surroundings"]["command"] in capsys.readouterr().out


def test_every_side_has_a_colour():
    assert plot._COLOURS.keys() == SIDES.keys()


# Who does AdamW, and who doesn't.


@pytest.mark.parametrize("scaler", [False, True], ids=["alone", "scaler"])
@each_work
def test_ours_and_torch_with_whole_arithmetic_do_what_float64_does(work, scaler):
    with_scaler = replace(work, scaler=scaler)
    sides = [side for side in with_scaler.sides("cpu") if side not in ("foreach", "default")]
    for side in sides:
        found = agreement.compare(side, with_scaler)
        assert found["same"], found


# How far the way may be off by what states are stored in: 1.5 times what was measured.
OF_STATES = {
    FLOAT32: agreement.TOLERANCES[MASTER],
    BFLOAT16: 0.0065,
    EIGHT_BIT_FIRST: 0.045,
    EIGHT_BIT: 0.045,
}


@pytest.mark.parametrize(
    "work",
    [work for work in LOW_MEMORY if work.optimizer == "AdamW"],
    ids=lambda work: work.name,
)
def test_what_takes_less_memory_goes_where_float64_goes(work):
    without_masters = agreement.TOLERANCES[WIDE] if not work.masters else 0.0
    assert agreement.deviation("ours", work) <= OF_STATES[work.states] + without_masters


def test_a_weight_decay_that_is_rounded_away_is_not_the_same():
    """Each operation of these two rounds to bf16, and 1 - lr * weight_decay is 1 there."""
    for side in ("foreach", "default"):
        assert not agreement.compare(side, NARROW)["same"]
        assert agreement.compare(side, FP32)["same"]


CHANGED = {
    "no-decay": {"weight_decay": 0.0},
    "a-tenth-of-the-decay": {"weight_decay": 0.01},
    "rate": {"lr": 1.1e-2},
    "momentum": {"betas": (0.95, 0.999)},
}


@pytest.mark.parametrize("options", CHANGED.values(), ids=CHANGED)
@each_work
def test_other_options_are_seen(work, options, monkeypatch):
    agreement._reference(work.dtype)  # with the true ones
    monkeypatch.setattr("amp_ext.bench.steps.OPTIONS", {**peers.OPTIONS, **options})
    assert agreement.deviation("ours", work) > 1.5 * agreement.TOLERANCES[work]
