"""The tables that pages include are made from the classes, and say what these do."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
TABLES = runpy.run_path(str(DOCS / "tables.py"))


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_every_table_is_included_once_and_nothing_else_is(tmp_path):
    TABLES["write"](tmp_path)
    pages = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    included = re.findall(r"^```\{include\} _generated/(\S+)$", pages, re.MULTILINE)
    assert sorted(included) == sorted(path.name for path in tmp_path.iterdir())


def test_every_optimizer_is_there_with_what_it_keeps():
    rows = rows_of(TABLES["states"]())
    shown = {row[0].strip("`").partition("(")[0] for row in rows}
    assert shown == {kind.__name__ for kind in TABLES["optimizers"]()} >= {"Adam", "AdamW", "SGD"}
    assert rows[0] == ["`SGD(params)`", "nothing", "0", "4", "0"]
    assert ["`SGD(params, momentum=0.9)`", "`momentum_buffer`", "4", "8", "2"] in rows
    assert ["`Adam(params)`", "`step`, `exp_avg`, `exp_avg_sq`", "8", "12", "4"] in rows


def test_options_are_there_with_what_each_class_makes_of_them():
    rows = rows_of(TABLES["options"](of_torch=True))
    assert ["`nesterov`", "`SGD`", "`False`", "Looks ahead along the momentum"] in rows
    rates = [inspect.signature(kind).parameters["lr"].default for kind in TABLES["optimizers"]()]
    shown = [row[:3] for row in rows]
    assert ["`lr`", "all", ", ".join(f"`{rate}`" for rate in rates)] in shown
    assert ["`betas`", "`Adam`, `AdamW`", "`(0.9, 0.999)`"] in shown
    assert ["`betas`", "`Lion`", "`(0.9, 0.99)`"] in shown
    assert [row[1] for row in rows if row[0] == "`decoupled_weight_decay`"] == ["`Adam`"]
    own = {row[0].strip("`"): row[1:] for row in rows_of(TABLES["options"](of_torch=False))}
    assert own["master_weights"][:2] == ["all", "`True`"]
    owners, defaults = (cell.split(", ") for cell in own["decoupled_weight_decay"][:2])
    assert {("`SGD`", "`False`"), ("`Lion`", "`True`")} <= set(zip(owners, defaults, strict=True))
    assert own["state_dtype"][1] == "`torch.float32`"
    assert own.keys().isdisjoint({"lr", "betas", "amsgrad", "maximize", "fused"})
    assert all(len(row[2]) > 20 for row in own.values())
