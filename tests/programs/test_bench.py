"""The benchmark's tool: its programs do the same work, and its files hold what they promise."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from amp_ext.bench import measure
from amp_ext.bench.steps import make_params, make_program
from amp_ext.bench.work import ROWS, SIDES, ShapeList, Work, choose_rows

CPU = torch.device("cpu")
SQUARE = ShapeList("square", ((128, 128),))
WORKS = [work for _, work in ROWS]
each_work = pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)


@each_work
def test_all_sides_do_the_same_work(work: Work):
    few = ShapeList("few", ((3, 5), (70_000,), (1,)))
    trained = {}
    for side in work.sides():
        program = make_program(side, work, make_params(work, few, CPU))
        before = [param.detach().clone() for param in program.params]
        for _ in range(5):
            program.step()
        assert all((p != b).any() for p, b in zip(program.params, before, strict=True)), side
        trained[side] = [param.detach() for param in program.params]
    # With masters, by a rounding of the parameter at most; without, by one in each operation. Of
    # narrow states, by those of the moments: with codes, by a tenth of the learning rate.
    rounded = work.state_dtype != torch.float32 or not work.masters
    tolerance = 5e-2 if rounded else 1e-6 if work.dtype == torch.float32 else 1e-2
    tolerance = 0.1 if isinstance(work.state_dtype, str) else tolerance
    for side, params in trained.items():
        for param, ours in zip(params, trained["ours"], strict=True):
            limits = {"rtol": tolerance, "atol": tolerance / 100}
            torch.testing.assert_close(param, ours, **limits, msg=f"{side}: {{}}".format)


def test_slow_loops_of_torch_stand_beside_one_row():
    first, *others = (work for _, work in ROWS)
    assert first == Work("AdamW", torch.float32, scaler=True)
    assert first.sides() == ["ours", "fused", "foreach", "default"]
    assert {"foreach", "default"}.isdisjoint(side for work in others for side in work.sides())


def bytes_of(work: Work) -> tuple[float, float]:
    """Returns the bytes of an element that stay, and those that a step must move."""
    program = make_program("ours", work, make_params(work, SQUARE, CPU))
    program.step()
    return measure.bytes_of(work, program)


def test_the_floor_counts_each_operand_once():
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    assert bytes_of(Work("AdamW", fp32)) == (16, 28)
    assert bytes_of(Work("AdamW", fp32, scaler=True, clip=True)) == (16, 32)
    assert bytes_of(Work("AdamW", fp16)) == (16, 28)
    assert bytes_of(Work("AdamW", bf16, clip=True)) == (16, 30)
    assert bytes_of(Work("AdamW", bf16, masters=False, state_dtype=None)) == (8, 14)
    assert bytes_of(Work("AdamW", bf16, masters=False)) == (12, 22)
    assert bytes_of(Work("AdamW", fp32, average=True)) == (20, 40)
    assert bytes_of(Work("SGD", fp32)) == (12, 20)
    assert bytes_of(Work("SGD", fp32, scaler=True)) == (12, 24)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the benchmark on a few small tensors; returns what it stored."""
    main = importlib.import_module("amp_ext.bench.__main__")
    times = measure.run_times

    def chosen(device: str, quick: bool) -> list[tuple[Work, ShapeList]]:
        rows = choose_rows(device, quick)
        return [(work, replace(shapes, sizes=((40, 32),) * 3)) for work, shapes in rows]

    monkeypatch.setattr(main, "choose_rows", chosen)
    monkeypatch.setattr(measure, "run_times", lambda step, seconds: times(step, 1e-4))
    monkeypatch.setattr(measure, "STREAMING_ELEMENTS", {"cpu": 1_000})

    def run(*arguments: str) -> dict:
        stored = tmp_path / "folder" / "results.json"
        assert main.main(["--device=cpu", f"--json={stored}", *arguments]) == 0
        return json.loads(stored.read_text())

    return run


def test_files_hold_what_they_promise(run, capsys):
    result = run("--quick", "--filter=AdamW fp(32|16 . master) . scaler( . clip)?, (4 x 8M|1,000)")
    assert f"torch {torch.__version__}" in result["surroundings"][1]
    assert result["surroundings"][-1].startswith("streaming: ")
    assert len(result["rows"]) == 6
    for row in result["rows"]:
        sides = row["sides"]
        assert sides.keys() <= SIDES.keys()
        assert row["ratios"].keys() == sides.keys() - {"ours"}
        bytes_moved = row["bytes_per_element"] * row["elements"]
        for side, values in sides.items():
            seconds = values["seconds"]
            assert values["gb_per_s"] == pytest.approx(1e-9 * bytes_moved / seconds)
            assert values["ns_per_element"] == pytest.approx(1e9 * seconds / row["elements"])
            assert values["host_us_per_tensor"] == pytest.approx(1e6 * seconds / row["tensors"])
            assert (values["share_of_streaming"] is None) == row["many_small"]
            if side != "ours":
                ratio = seconds / sides["ours"]["seconds"]
                assert row["ratios"][side] == pytest.approx(ratio)
    printed = capsys.readouterr().out
    assert "÷ fused" in printed
    assert "÷ in float32" not in printed


def test_what_takes_less_memory_stands_beside_our_step_in_float32(run, capsys):
    result = run("--filter=AdamW (bf16 . split|fp32) . bf16 states, 4 x")
    rows = {row["work"]: row for row in result["rows"]}
    assert list(rows) == ["AdamW bf16 + split + bf16 states", "AdamW fp32 + bf16 states"]
    for row in rows.values():
        assert list(row["sides"]) == ["ours", "in_float32"]
    assert "÷ in float32" in capsys.readouterr().out


def test_results_are_drawn_and_so_are_those_of_before(run, tmp_path):
    pytest.importorskip("matplotlib")
    import plot

    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    before = [json.loads(stored.read_text()) for stored in folder.glob("*.json")]
    for result in (run("--quick", "--filter=fp16"), *before):
        plot.draw(result, tmp_path / "bars.png")
        assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG\r\n")
