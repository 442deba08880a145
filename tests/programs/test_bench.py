"""The benchmark's tool: its programs do the same work, and its files hold what they promise."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from amp_ext import bench
from amp_ext.bench import LOW_MEMORY, ROWS, ShapeList, Work, make_params, make_program

CPU = torch.device("cpu")
SQUARE = ShapeList("square", ((128, 128),))


@pytest.mark.parametrize(("name", "sides"), (ROWS | LOW_MEMORY).items(), ids=str)
def test_all_sides_do_the_same_work(name: str, sides: list[str]):
    work, few = Work(name), ShapeList("few", ((3, 5), (70_000,), (1,)))
    trained = {}
    for side in ["ours", *sides]:
        program = make_program(side, work, make_params(work, few, CPU))
        before = [param.detach().clone() for param in program.params]
        for _ in range(5):
            program.step()
        assert all((p != b).any() for p, b in zip(program.params, before, strict=True)), side
        trained[side] = [param.detach() for param in program.params]
    # With masters, by a rounding of the parameter at most; without, by one in each operation. Of
    # narrow states, by those of the moments: with codes, by a tenth of the learning rate.
    is_fp32 = work.dtype == torch.float32
    rounded = work.state_dtype != torch.float32 or not (work.masters or is_fp32)
    tolerance = 5e-2 if rounded else 1e-6 if is_fp32 else 1e-2
    tolerance = 0.1 if isinstance(work.state_dtype, str) else tolerance
    for side, params in trained.items():
        for param, ours in zip(params, trained["ours"], strict=True):
            limits = {"rtol": tolerance, "atol": tolerance / 100}
            torch.testing.assert_close(param, ours, **limits, msg=f"{side}: {{}}".format)


BYTES = {
    "AdamW fp32": (16, 28),
    "AdamW fp32 + scaler + clip": (16, 32),
    "AdamW fp16 + master": (16, 28),
    "AdamW bf16 + master + clip": (16, 30),
    "AdamW bf16 + 16-bit states": (8, 14),
    "AdamW bf16": (12, 22),
    "AdamW fp32 + average": (20, 40),
    "SGD fp32": (12, 20),
    "SGD fp32 + scaler": (12, 24),
}


@pytest.mark.parametrize("name", BYTES)
def test_the_floor_counts_each_operand_once(name):
    work = Work(name)
    program = make_program("ours", work, make_params(work, SQUARE, CPU))
    program.step()
    assert bench.bytes_of(work, program) == BYTES[name]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the benchmark on a few small tensors; returns what it stored."""
    main = importlib.import_module("amp_ext.bench.__main__")
    choose_rows, times = bench.choose_rows, bench.run_times

    def chosen(device: str, quick: bool) -> dict[str, tuple[Work, ShapeList, list[str]]]:
        return {
            name: (work, shapes._replace(sizes=((40, 32),) * 3), sides)
            for name, (work, shapes, sides) in choose_rows(device, quick).items()
        }

    monkeypatch.setattr(bench, "choose_rows", chosen)
    monkeypatch.setattr(bench, "run_times", lambda step: times(step, 1e-4))
    monkeypatch.setattr(bench, "STREAMING_ELEMENTS", {"cpu": 1_000})

    def run(*arguments: str) -> dict:
        stored = tmp_path / "folder" / "results.json"
        main.main(["--device=cpu", f"--json={stored}", *arguments])
        return json.loads(stored.read_text())

    return run


def test_files_hold_what_they_promise(run, capsys):
    result = run("--quick", "--filter=AdamW fp(32|16 . master) . scaler( . clip)?, (4 x 8M|1,000)")
    assert f"torch {torch.__version__}" in result["surroundings"][1]
    assert len(result["rows"]) == 6
    for row in result["rows"]:
        sides = row["sides"]
        assert row["ratios"].keys() == sides.keys() - {"ours"}
        bytes_moved = row["bytes_per_element"] * row["elements"]
        for side, values in sides.items():
            seconds = values["seconds"]
            share = values["share_of_streaming"]
            assert (share is None) == row["many_small"]
            if share is not None:
                assert share * row["streaming_gb_per_s"] == pytest.approx(
                    1e-9 * bytes_moved / seconds
                )
            if side != "ours":
                ratio = seconds / sides["ours"]["seconds"]
                assert row["ratios"][side] == pytest.approx(ratio)
    printed = capsys.readouterr().out
    assert "÷ fused" in printed
    assert "÷ in float32" not in printed


def test_results_are_drawn_and_so_are_those_of_before(run, tmp_path):
    pytest.importorskip("matplotlib")
    import plot

    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    before = [json.loads(stored.read_text()) for stored in folder.glob("*.json")]
    for result in (run("--quick", "--filter=fp16"), *before):
        plot.draw(result, tmp_path / "bars.png")
        assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG\r\n")
