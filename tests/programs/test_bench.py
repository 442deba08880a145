"""The benchmark's tool: its programs do the same work, and its files hold what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from amp_ext.bench import measure, report, shapes, surroundings
from amp_ext.bench.__main__ import main
from amp_ext.bench.steps import make_ours, make_program
from amp_ext.bench.work import (
    AS_TORCH,
    BESIDE_PEERS,
    EIGHT_BIT,
    EIGHT_BIT_FIRST,
    EVERY,
    FLOAT32,
    LOW_MEMORY,
    SIDES,
    Work,
    is_quick,
    target_ratios,
)

CPU = torch.device("cpu")
TINY = ["--device=cpu", "--shrink=20000", "--rounds=1", "--seconds=1e-4"]


@pytest.mark.parametrize("work", EVERY, ids=lambda work: work.name)
def test_all_sides_do_the_same_work(work: Work):
    few = shapes.ShapeList("few", ((3, 5), (70_000,), (1,)))
    trained = {}
    for side in work.sides("cpu"):
        program = make_program(side, work, few, CPU)
        before = [param.detach().clone() for param in program.params]
        for _ in range(5):
            program.step()
        assert all((p != b).any() for p, b in zip(program.params, before, strict=True)), side
        trained[side] = [param.detach() for param in program.params]
    # With masters, by a rounding of the parameter at most; without, by one in each operation. Of
    # narrow states, by those of the moments: with codes, by a tenth of the learning rate.
    rounded = work.states != FLOAT32 or not work.masters
    tolerance = 5e-2 if rounded else 1e-6 if work.dtype == torch.float32 else 1e-2
    tolerance = 0.1 if work.states in (EIGHT_BIT_FIRST, EIGHT_BIT) else tolerance
    for side, params in trained.items():
        for param, ours in zip(params, trained["ours"], strict=True):
            limits = {"rtol": tolerance, "atol": tolerance / 100}
            torch.testing.assert_close(param, ours, **limits, msg=f"{side}: {{}}".format)


def test_the_floor_counts_each_operand_once():
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    assert Work("AdamW", fp32).bytes_per_element == 28
    assert Work("AdamW", fp32, scaler=True, clip=True).bytes_per_element == 32
    assert Work("AdamW", fp16).bytes_per_element == 28
    assert Work("AdamW", bf16, clip=True).bytes_per_element == 30
    assert Work("AdamW", bf16, masters=False, states=AS_TORCH).bytes_per_element == 14
    assert Work("AdamW", bf16, masters=False).bytes_per_element == 22
    assert Work("SGD", fp32).bytes_per_element == 20
    assert Work("Lion", fp16).bytes_per_element == 20
    assert Work("SGD", fp32, scaler=True).bytes_per_element == 24


def test_less_is_moved_where_less_is_kept():
    moved = {work.name: (work.bytes_stored, work.bytes_per_element) for work in LOW_MEMORY}
    moved |= {work.name: (work.bytes_stored, work.bytes_per_element) for work in BESIDE_PEERS}
    assert moved["AdamW bf16 + master"] == (16, 28)
    assert moved["AdamW bf16 + split"] == (14, 26)
    assert moved["AdamW bf16 + split + bf16 states"] == (10, 18)
    assert moved["AdamW bf16 + split8 + bf16 states"] == (9, 16)
    assert moved["AdamW bf16 + bf16 states"] == (8, 14)
    assert moved["AdamW bf16 + split + 8bit-bf16 states"] == (9, 16)
    assert moved["AdamW bf16 + split8 + 8bit states"] == (7.03125, 12.0625)
    assert moved["SGD bf16 + momentum + split + 8bit states"] == (7.03125, 12.0625)
    assert moved["AdamW fp32"] == (16, 28)
    assert moved["AdamW fp32 + bf16 states"] == (12, 20)
    assert moved["SGD bf16 + momentum + split + bf16 states"] == (8, 14)


@pytest.mark.parametrize("work", EVERY, ids=lambda work: work.name)
def test_what_is_stored_is_what_the_optimizer_keeps(work: Work):
    square = shapes.ShapeList("square", ((128, 128),))
    (param,) = make_program("ours", work, square, CPU).params
    optimizer = make_ours(work, [param])
    optimizer.init_state()
    kept = [param, param.grad, *optimizer.state[param].values()]
    elements = sum(tensor.nbytes for tensor in kept if tensor.dim() > 0)
    assert elements == work.bytes_stored * param.numel()


def test_models_have_the_published_number_of_parameters():
    models = [shapes.resnet50(), shapes.gpt2(), shapes.llama3_8b(), shapes.llama3_8b(2)]
    assert [(len(model.sizes), model.elements) for model in models] == [
        (161, 25_557_032),
        (148, 124_439_808),
        (291, 8_030_261_248),
        (18, 436_224_000),
    ]
    few = shapes.uniform(300, 100_000)
    assert (len(few.sizes), few.elements) == (300, 30_000_000)


def test_quick_on_a_cpu_takes_every_row_with_a_target():
    lists = shapes.for_device("cpu", 10**9)
    quick = [(w.name, s.name) for s in lists for w in EVERY if is_quick(w, s, "cpu")]
    assert len(quick) == 13
    targets = [t for s in lists for w in EVERY for t in target_ratios(w, s, "cpu").items()]
    assert sorted(targets) == sorted(
        [("fused", r) for r in (1.2, 1.4, 1.8, 1.9, 1.5, 1.7, 30, 45)]
        + [(side, 5) for side in ("default", "foreach") for _ in range(2)]
        + [("by_hand", r) for r in (4.2, 2, 4.5, 2.4, 40)]
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a few rows were measured, and drawn."""
    folder = tmp_path_factory.mktemp("results")
    chosen = "AdamW fp(32|16 . master) . scaler( . clip)?, (4 x 8M|1,000 x 64)"
    command = [*TINY, f"--filter={chosen}", f"--json={folder}", f"--plot={folder / 'bars.png'}"]
    assert main(command) == 0
    return folder


def load(folder: Path) -> tuple[Path, dict]:
    (stored,) = folder.glob("*.json")
    return stored, json.loads(stored.read_text())


def test_files_hold_what_they_promise(measured):
    stored, result = load(measured)
    about = result["surroundings"]
    assert stored.name.startswith(about["date"][:10])
    assert {"cpu", "cores", "threads", "memory_gib", "gpu", "driver"} <= about["hardware"].keys()
    versions = {"torch", "cuda", "python", "amp_ext", "instructions"}
    assert about["versions"].keys() == versions
    assert {"commit", "date", "command", "load_average"} <= about.keys()
    assert about["command"].startswith("python -m amp_ext.bench --device=cpu")
    assert result["streaming"]["gb_per_s"] > 0
    assert result["left_out"] == []
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
            assert values["launches"] is None
            if side != "ours":
                ratio = seconds / sides["ours"]["seconds"]
                assert row["ratios"][side] == pytest.approx(ratio)
    assert (measured / "bars.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_figures_that_were_stored_are_shown_and_chosen_again(measured, capsys):
    stored, result = load(measured)
    assert main([f"--load={stored}", "--filter=scaler, 4 x"]) == 0
    assert "AdamW fp32 + scaler" in capsys.readouterr().out
    assert main([f"--load={stored}", "--markdown", "--filter=fp32 [+] scaler.*, 4 x 8M"]) == 0
    about, empty, heading, line, shape, *rows = capsys.readouterr().out.splitlines()
    assert result["surroundings"]["command"] in about
    assert empty == ""
    title = "| scaler.step + update | B stored | B/elem. | ns/elem. | GB/s | of stream |"
    assert heading.startswith(title)
    assert line.count("|") == heading.count("|") == shape.count("|")
    names = ["AdamW fp32 + scaler", "AdamW fp32 + scaler + clip"]
    assert [row.split("|")[1].strip() for row in rows] == names


def test_an_optimizer_that_torch_lacks_stands_alone(tmp_path, capsys):
    command = [*TINY, "--filter=Lion fp(32|16 . master) . scaler, 4 x", f"--json={tmp_path}"]
    assert main([*command, "--markdown", f"--plot={tmp_path / 'bars.png'}"]) == 0
    _, result = load(tmp_path)
    assert [row["work"] for row in result["rows"]] == [
        "Lion fp32 + scaler",
        "Lion fp16 + master + scaler",
    ]
    assert result["left_out"] == []
    for row in result["rows"]:
        assert list(row["sides"]) == ["ours"]
        assert row["ratios"] == {}
        assert row["sides"]["ours"]["share_of_streaming"] > 0
    assert "÷" not in capsys.readouterr().out.partition("| scaler")[2]


def test_what_takes_less_memory_stands_beside_our_step_in_float32(tmp_path, capsys):
    command = [*TINY, "--filter=AdamW (bf16 . split|fp32) . bf16 states, 4 x", f"--json={tmp_path}"]
    assert main([*command, "--markdown", f"--plot={tmp_path / 'bars.png'}"]) == 0
    _, result = load(tmp_path)
    rows = {row["work"]: row for row in result["rows"]}
    assert list(rows) == ["AdamW bf16 + split + bf16 states", "AdamW fp32 + bf16 states"]
    assert [row["masters"] for row in rows.values()] == ["split", False]
    for row in rows.values():
        assert list(row["sides"]) == ["ours", "in_float32"]
        assert row["states"] == "bf16 states"
        assert row["target_ratios"] == {}
    assert "| AdamW bf16 + split + bf16 states | 10 | 18 |" in capsys.readouterr().out


@pytest.mark.parametrize("work", LOW_MEMORY, ids=lambda work: work.name)
def test_the_side_in_float32_keeps_all_in_float32(work: Work):
    before = work.in_float32
    assert before in EVERY
    assert not before.is_low
    assert before.bytes_stored > work.bytes_stored


@pytest.mark.parametrize(("optimizer", "kept"), [("AdamW", 0), ("Lion", 1)])
def test_a_side_alone_is_measured_only_where_no_other_is_wanted(optimizer, kept, monkeypatch):
    """With memory for one side, and for none."""
    row = measure.Row(Work(optimizer, torch.float32), shapes.uniform(1, 1_000_000))
    sides = row.work.sides("cpu")
    for room, count in ((30_000_000, kept), (1_000_000, 0)):
        monkeypatch.setattr(measure, "free_memory", lambda device, room=room: room)
        assert len(measure.sides_that_fit(row, sides, CPU)) == count


def test_targets_are_marked_as_met_or_missed():
    def row(ratio: float, share: float) -> dict:
        figures = {"ns_per_element": 1.0, "gb_per_s": 1.0, "share_of_streaming": share}
        sides = {"ours": figures | {"launches": 3}, "fused": figures | {"launches": 7}}
        return {
            **{"work": "AdamW fp32", "shapes": "4 × 8M", "tensors": 4, "elements": 4},
            **{"bytes_per_element": 28, "many_small": False, "sides": sides},
            **{"ratios": {"fused": ratio}, "target_ratios": {"fused": 1.2}, "target_share": 0.9},
        }

    rows = [row(1.2, 0.9), row(1.19, 0.89)]
    cells = report.columns(rows)
    assert cells["÷ fused"] == ["1.20 ✓ ≥1.2", "1.19 ✗ ≥1.2"]
    assert cells["of stream"] == ["90.0% ✓", "89.0% ✗"]
    assert cells["launches"] == ["3 / 7", "3 / 7"]
    assert "÷ foreach" not in cells
    result = {"rows": rows, "left_out": [], "cpu_used_by_others": 0.5}
    lines = report.summary(result)
    assert lines[0] == "Targets met: 2 of 4"
    assert [line.partition(":")[0] for line in lines[1:3]] == ["missed", "missed"]
    assert "Other programs took 50%" in lines[3]
    assert report.summary(result | {"cpu_used_by_others": 0.05}) == lines[:3]


def test_the_compilers_that_it_starts_are_not_other_programs():
    before = surroundings._cpu_seconds()
    if before is None:
        pytest.skip("the system does not tell")
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert surroundings._cpu_seconds()[1] - before[1] > 0.25


def test_rows_are_listed_without_measuring(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--device=cpu", "--quick", "--list"])
    assert "AdamW fp16 + master + scaler, 300 x 100k" in capsys.readouterr().out.splitlines()
