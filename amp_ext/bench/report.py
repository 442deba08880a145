"""Shows results as a table for the terminal or in Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from amp_ext.bench.work import SIDES

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]

_BUSY = 0.05  # of the processor

NOTE = (
    "Figures are amp_ext's; ÷ is torch's time divided by ours, each the least of runs in turns in "
    "one process. B/elem. is what a step cannot avoid to read and write; GB/s counts no more. "
    "Streaming is measured in turns with each row and can be exceeded, for an in-place loop does "
    "not reach all that memory gives. ✓ and ✗: a target met or missed."
)


def heading(result: dict[str, Any]) -> list[str]:
    """Returns lines about hardware, versions and the streaming bandwidth."""
    about = result["surroundings"]
    hardware, versions = about["hardware"], about["versions"]
    cpu = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads"
    lines = [f"{cpu}, {hardware['memory_gib']} GiB, load average {about['load_average']:.1f}"]
    if hardware["gpu"]:
        gpu = f"{hardware['gpu']}, {hardware['gpu_memory_gib']} GiB"
        lines.insert(0, f"{gpu}, driver {hardware['driver']}, CUDA {versions['cuda']}")
    commit, dirty, _ = (about["commit"] or "unknown").partition("-dirty")
    commit = f"{commit[:12]}{' with changes' if dirty else ''}"
    lines.append(
        f"torch {versions['torch']}, Python {versions['python']}, amp_ext {versions['amp_ext']} "
        f"({versions['instructions']}), commit {commit}, {about['date'][:10]}"
    )
    streaming = result["streaming"]
    if streaming["gb_per_s"]:
        lines.append(f"streaming, {streaming['what']}: {streaming['gb_per_s']:.1f} GB/s at best")
    return lines


def _mark(value: float, target: float | None, form: str, limit: str) -> str:
    if target is None:
        return form.format(value)
    return f"{form.format(value)} {'✓' if value >= target else '✗'} {limit.format(target)}".rstrip()


def _share(row: Row) -> str:
    share = row["sides"]["ours"]["share_of_streaming"]
    return "" if share is None else _mark(share, row["target_share"], "{:.1%}", "")


def _ratio(side: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        ratio = row["ratios"].get(side)
        if ratio is None:
            return ""
        return _mark(ratio, row["target_ratios"].get(side), "{:.2f}", "≥{:g}")

    return show


def _host(row: Row) -> str:
    return f"{row['sides']['ours']['host_us_per_tensor']:.3f}" if row["many_small"] else ""


def _launches(row: Row) -> str:
    counts = [figures["launches"] for figures in row["sides"].values()]
    return " / ".join(map(str, counts)) if counts[0] is not None else ""


def columns(rows: list[Row]) -> dict[str, list[str]]:
    """Returns the headings with the cells of all rows; empty columns are left out."""
    shown: dict[str, Callable[[Row], str]] = {
        "scaler.step + update": lambda row: row["work"],
        "B/elem.": lambda row: str(row["bytes_per_element"]),
        "ns/elem.": lambda row: f"{row['sides']['ours']['ns_per_element']:.3g}",
        "GB/s": lambda row: f"{row['sides']['ours']['gb_per_s']:.3g}",
        "of stream": _share,
        **{f"÷ {SIDES[side].removeprefix('torch ')}": _ratio(side) for side in list(SIDES)[1:]},
        "host µs/tensor": _host,
        "launches": _launches,
    }
    cells = {title: [show(row) for row in rows] for title, show in shown.items()}
    return {title: texts for title, texts in cells.items() if any(texts)}


def by_shapes(rows: list[Row]) -> Iterator[tuple[str, list[int]]]:
    """Yields the description of each list of shapes and the indices of its rows."""
    for shapes, indices in itertools.groupby(range(len(rows)), lambda i: str(rows[i]["shapes"])):
        chosen = list(indices)
        tensors, elements = rows[chosen[0]]["tensors"], rows[chosen[0]]["elements"]
        of = "" if "×" in shapes else f"{tensors:,} tensors, "  # the name says so
        yield f"{shapes}: {of}{elements / 1e6:.3g}M elements", chosen


def make_table(result: dict[str, Any]) -> Table:
    """Returns the table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = result["rows"]
    shown = columns(rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in shown:
        left = title.startswith("scaler")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for shapes, indices in by_shapes(rows):
        table.add_section()
        table.add_row(Text(shapes, "bold"))
        for index in indices:
            texts = [cells[index] for cells in shown.values()]
            table.add_row(*(Text(t, "green" * ("✓" in t) or "red" * ("✗" in t)) for t in texts))
    return table


def summary(result: dict[str, Any]) -> list[str]:
    """Returns lines that count the targets and name what was missed or left out."""
    outcomes = []
    for row in result["rows"]:
        name = f"{row['work']}, {row['shapes']}"
        for side, target in row["target_ratios"].items():
            if side in row["ratios"]:
                ratio = row["ratios"][side]
                text = f"{name}: {ratio:.2f} of {target:g} times {SIDES[side]}"
                outcomes.append((ratio >= target, text))
        share = row["sides"]["ours"]["share_of_streaming"]
        if row["target_share"] is not None and share is not None:
            text = f"{name}: {share:.1%} of streaming, {row['target_share']:.0%} wanted"
            outcomes.append((share >= row["target_share"], text))
    lines = [f"Targets met: {sum(met for met, _ in outcomes)} of {len(outcomes)}"] * bool(outcomes)
    lines += [f"missed: {text}" for met, text in outcomes if not met]
    others = result["cpu_used_by_others"]
    if others is not None and others > _BUSY:
        lines.append(f"Other programs took {others:.0%} of the processor: these figures are rough.")
    return lines + [f"left out: {left['row']}, {left['why']}" for left in result["left_out"]]


def markdown(result: dict[str, Any]) -> str:
    """Returns a paragraph and a table in Markdown."""
    rows = result["rows"]
    shown = columns(rows)
    about = "; ".join(heading(result))
    lines = [f"{about}; `{result['surroundings']['command']}`. {NOTE}", ""]
    lines += ["| " + " | ".join(shown) + " |", "|---|" + "---:|" * (len(shown) - 1)]
    for shapes, indices in by_shapes(rows):
        lines.append(f"| **{shapes}** |" + " |" * (len(shown) - 1))
        lines += ["| " + " | ".join(c[i] for c in shown.values()) + " |" for i in indices]
    return "\n".join(lines)
