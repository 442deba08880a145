"""The documentation is true: its examples run, and what it quotes is there."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import itertools
import json
import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import BESIDE_PEERS

import amp_ext
from amp_ext.bench import LOW_MEMORY, ShapeList, Work, bytes_of, make_params, make_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A block that can't run everywhere has a comment before it: <!-- not run: needs a GPU -->
# Before the heading of a page it holds for all blocks of the page.
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
FENCE = re.compile(r"^(?P<fence>```+)(?P<language>\S*)[^`\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int  # number of its first line of code
    language: str
    code: str
    before: str  # the text since the block before it
    runs: bool = False  # whether it is Python that runs everywhere


def blocks_of(page: Path) -> list[Block]:
    text, blocks, end = page.read_text(), [], 0
    page_runs = NOT_RUN.match(text) is None
    while opening := FENCE.search(text, end):
        start = opening.end() + 1
        closing = re.compile(rf"^{opening['fence']}[ \t]*$", re.MULTILINE).search(text, start)
        assert closing is not None, f"{page.name}: a block is not closed"
        line = text.count("\n", 0, start) + 1
        code, before = text[start : closing.start()], text[end : opening.start()]
        runs = opening["language"] == "python" and page_runs and NOT_RUN.search(before) is None
        blocks.append(Block(line, opening["language"], code, before, runs))
        end = closing.end()
    return blocks


def run(code: str, page: Path, line: int, namespace: dict[str, Any]) -> str:
    """Runs the code of a page and returns what it prints; errors show the page's own lines."""
    tree = ast.increment_lineno(ast.parse(code), line - 1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(page), "exec"), namespace)
    return printed.getvalue()


def on_the_cpu(code: str) -> str:
    return code.replace(".cuda()", "").replace('"cuda"', '"cpu"')


def in_a_loop(fragment: str) -> str:
    """Makes a whole of what the README shows of a loop, where ``...`` is the backward pass."""
    backward = "loss = loss_function(model(x), y); scaler.scale(loss).backward()"
    lines = [backward if line == "..." else line for line in fragment.splitlines()]
    return on_the_cpu("\n".join(["for x, y in data[:1]:", *(f"    {line}" for line in lines)]))


def what_the_readme_takes_for_granted() -> dict[str, Any]:
    return {
        "torch": torch,
        "amp_ext": amp_ext,
        "Model": lambda: torch.nn.Linear(4, 2),
        "model": torch.nn.Linear(4, 2),
        "scaler": amp_ext.GradScaler("cpu"),
        "loss_function": torch.nn.functional.mse_loss,
        "data": [(torch.randn(8, 4), torch.randn(8, 2))] * 3,
    }


DOCS = [page for page in PAGES if page.name != "README.md"]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_examples_run_and_print_what_the_page_says(page, tmp_path, monkeypatch):
    """A block ``text`` right after a block ``python`` is what that one prints."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": f"example_{page.stem}"}
    for block, following in itertools.pairwise([*blocks_of(page), Block(0, "", "", "")]):
        if block.runs:
            printed = run(block.code, page, block.line, namespace)
            if following.language == "text" and not following.before.strip():
                assert printed.strip() == following.code.strip(), f"{page.name}:{block.line}"


def test_examples_of_the_readme_run():
    page = ROOT / "README.md"
    namespace = what_the_readme_takes_for_granted()
    for block in blocks_of(page):
        if block.runs:
            run(in_a_loop(block.code), page, block.line - 1, namespace)
    assert namespace["optimizer"].state


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
@pytest.mark.parametrize("side", ["-", "+"], ids=["before", "after"])
def test_the_loop_of_the_first_pages_trains_before_and_after_the_change(side, name):
    page = ROOT / name
    (block,) = [block for block in blocks_of(page) if block.language == "diff"]
    lines = [line[1:] for line in block.code.splitlines() if line[0] in (" ", side)]
    namespace = what_the_readme_takes_for_granted()
    run(on_the_cpu("\n".join(lines)), page, block.line, namespace)
    assert isinstance(namespace["scaler"], amp_ext.GradScaler) == (side == "+")
    assert namespace["optimizer"].state


COMMANDS = [
    pytest.param(line.strip(), id=f"{page.stem}-{line.strip()}")
    for page in PAGES
    for line in page.read_text().splitlines()
    if line.strip().startswith("python -m amp_ext.")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_options_that_exist(command, monkeypatch):
    words = shlex.split(command, comments=True)[2:]
    name, arguments = words[0], words[1:]

    def parse_and_stop(parser, arguments):
        raise InterruptedError(parser.parse_intermixed_args(arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(InterruptedError):
        importlib.import_module(f"{name}.__main__").main(arguments)


def test_files_that_pages_name_are_there():
    folders, suffixes = "tests|examples|scripts|docs|csrc|amp_ext", "py|sh|md|png|h"
    path = re.compile(rf"\b(?:{folders})/[\w/]+\.(?:{suffixes})\b")
    named = {found for page in PAGES for found in path.findall(page.read_text())}
    assert len(named) > 10
    roots = (ROOT, ROOT / "csrc" / "include")  # programs include <amp_ext/ops.h>
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert sorted(missing) == []


def messages_in_the_sources() -> str:
    """Returns all texts in the sources, each with its parts joined and ``…`` for what is put in."""
    texts = []
    torchs = Path(torch.__file__).parent
    files = [*(ROOT / "amp_ext").rglob("*.py"), ROOT / "setup.py"]
    for file in [*files, torchs / "amp" / "grad_scaler.py", torchs / "optim" / "optimizer.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for file in (ROOT / "csrc").rglob("*"):
        if file.suffix in (".h", ".cpp", ".cuh", ".cu"):
            joined = re.sub(r'"\s*\n\s*"', "", file.read_text())
            texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return "\n".join(" ".join(text.split()) for text in texts)


def test_messages_that_pages_explain_are_in_the_sources():
    sources = messages_in_the_sources()
    page = (ROOT / "docs" / "errors.md").read_text()
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 100
    missing = [
        (message, fragment)
        for message in messages
        for fragment in message.split("…")
        if len(fragment.strip(" :,.")) > 3 and fragment.strip() not in sources
    ]
    assert missing == []


WORKS = dict.fromkeys([*LOW_MEMORY, *(work.name for work in BESIDE_PEERS)])


@pytest.mark.parametrize("name", WORKS)
def test_the_table_of_less_memory_has_the_bytes_of_the_benchmark(name):
    def cell(option: Any) -> str:
        return f"`{json.dumps(option) if isinstance(option, str) else option}`"

    work = Work(name)
    params = make_params(work, ShapeList("square", ((128, 128),)), torch.device("cpu"))
    program = make_program("ours", work, params)
    program.step()
    stored, moved = bytes_of(work, program)
    is_fp32 = work.dtype == torch.float32
    beginnings = [
        "fp32" if is_fp32 else "16-bit",
        "no masters" if is_fp32 else cell(work.masters),
        cell(work.state_dtype),
        f"{stored:.4g} ",
        f"{moved:.4g} ",
    ]
    text = (ROOT / "docs" / "low_memory.md").read_text()
    rows = [line.split("| ")[1:] for line in text.splitlines() if line.startswith("| ")]
    assert any(all(map(str.startswith, cells, beginnings)) for cells in rows if len(cells) > 5), (
        beginnings
    )


def test_the_table_of_healthy_steps_that_are_skipped_is_of_the_guard():
    script = importlib.import_module("norm_guard_skips")
    text = (ROOT / "docs" / "watching.md").read_text()
    for width in script.WIDTHS:
        (row,) = re.findall(rf"^\| {width} \| (.+) % \| (.+) % \|$", text, re.MULTILINE)
        few, fewer = map(float, row)
        assert few > 4 * fewer > 0
    share = script.share_skipped(0.8, 4.0, steps=10_000)
    assert 100 * share == pytest.approx(few, rel=0.2)


@pytest.fixture
def figures(monkeypatch) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return runpy.run_path(str(ROOT / "docs" / "figures.py"))


def test_the_gains_are_those_of_the_readme(figures, tmp_path):
    figures["draw_gains"](tmp_path / "gains.png")
    for file in (tmp_path / "gains.png", ROOT / "docs" / "gains.png"):
        assert 10_000 < file.stat().st_size < 100_000
    rows = json.loads(figures["RESULTS"].read_text())["rows"]
    ratios = {row["work"]: row["ratios"] for row in rows if row["shapes"] == figures["SHAPES"]}
    text = (ROOT / "README.md").read_text()
    assert f"**{ratios['AdamW fp32 + scaler']['fused']:.1f} times as fast**" in text


def test_the_figure_shows_skips_and_growth(figures, tmp_path):
    scales, skips = figures["train"]()
    assert {0, figures["BAD_UPDATE"]} <= set(skips)
    assert any(b > a for a, b in itertools.pairwise(scales))
    figures["draw"](scales, skips, tmp_path / "scale.png")
    for file in (tmp_path / "scale.png", ROOT / "docs" / "scale.png"):
        assert 10_000 < file.stat().st_size < 100_000


# Private parts of torch.


def test_the_private_parts_of_torch_are_where_the_table_says():
    script = runpy.run_path(str(ROOT / "scripts" / "private_parts.py"))
    rows = script["rows"]()
    assert len(rows) > 10
    for names, file, test in rows:
        ours = set(re.findall(r"\w+", (ROOT / file).read_text()))
        assert names <= ours, file
        assert (ROOT / test).is_file(), test
    assert list(script["missing"](rows)) == []


# Tables that are made from the classes.

TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))


def test_every_table_is_in_the_page_once_as_the_classes_are():
    page, *others = (path.read_text() for path in TABLES["PAGES"])
    assert sorted(re.findall(r"^<!-- table: (\w+) -->$", page, re.MULTILINE)) == sorted(
        TABLES["TABLES"]
    )
    without = "\n".join(line for line in page.splitlines() if not line.startswith("| `"))
    assert TABLES["with_tables"](f"{without}\n") == page, "python docs/tables.py writes the tables"
    for other in others:
        assert TABLES["with_tables"](other) == other, "python docs/tables.py writes the names"
        assert TABLES["with_tables"](other.replace("fused Adam, ", "fused ", 1)) == other
