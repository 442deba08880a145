"""Shows results as a table for the terminal or in Markdown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from amp_ext.bench.work import SIDES

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]

_BUSY = 0.05  # of the processor
_KEPT = "What each keeps, and its distance from float64"

NOTE = (
    "Figures are amp_ext's; ÷ is torch's time divided by ours, each the least of runs in turns in "
    "one process; ÷ in float32 that of our own step with masters and moments in float32. B stored "
    "is what an element takes between steps, with its gradient; B/elem. what a step cannot avoid "
    "to read and write; GB/s counts no more. "
    "Streaming is measured in turns with each row and can be exceeded, for an in-place loop does "
    "not reach all that memory gives. ✓ and ✗: a target met or missed."
)
NOTE_PEERS = (
    "Times of a step, each the least of runs in turns in one process, and how many times as long "
    "as ours that is; ✗: shorter than ours. Per element, with the share of the streaming bandwidth "
    "that ours reaches by the bytes that it cannot avoid; small models per step. Cold caches: "
    "64 MB are read before each step, uncounted. ≈: not the same work, for it keeps less, or after "
    "50 steps its way is farther off float64 than rounding explains (off: as a share of the way)."
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
    for package, found in result.get("peers", {}).items():
        lines[-1] += f", {package} {found['version']}" if found["why"] is None else ""
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
        "B stored": lambda row: f"{row['bytes_stored']:.4g}" if "bytes_stored" in row else "",
        "B/elem.": lambda row: f"{row['bytes_per_element']:.4g}",
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


def beside_peers(rows: list[Row]) -> dict[str, list[tuple[str, list[str]]]]:
    """Returns, for each list of shapes, the sides with a cell for each kind of work."""
    kinds = _kinds(rows)
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        (described, _), *_ = by_shapes([row])
        sides = groups.setdefault(described + " + scaler" * row["scaler"], {})
        for side in row["sides"]:
            sides.setdefault(side, {})[_kind(row)] = _time(row, side)
    return {title: _cells(sides, kinds) for title, sides in groups.items()}


def methods(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Returns what each side keeps in each kind of work, and how far from float64 it ends."""
    sides: dict[str, dict[str, str]] = {}
    for row in result["methods"]:
        if row["why"] is None:
            deviation = f"{row['deviation']:.1g} off{' ≈' * (not row['same'])}"
            master = "" if row["master"] == "none" else f"; master: {row['master']}"
            kept = f"{row['states']}{master}; {deviation}"
            sides.setdefault(row["side"], {}).setdefault(_kind(row), kept)
    return _cells(sides, _kinds(result["rows"]))


def _kind(row: Row) -> str:
    return str(row["work"]).removesuffix(" + scaler")


def _kinds(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(map(_kind, rows)))


def _cells(sides: dict[str, dict[str, str]], kinds: list[str]) -> list[tuple[str, list[str]]]:
    return [
        (label, [sides[side].get(kind, "") for kind in kinds])
        for side, label in SIDES.items()
        if side in sides
    ]


def _time(row: Row, side: str) -> str:
    figures = row["sides"][side]
    if row["many_small"]:
        time = f"{_digits(1e6 * figures['seconds'])} µs"
    else:
        time = f"{_digits(figures['ns_per_element'])} ns"
    if side == "ours":
        share = figures["share_of_streaming"]
        return time if share is None else f"{time} ({share:.0%})"
    ratio = row["ratios"][side]
    mark = " ≈" if side in row["unequal"] else " ✗" if ratio < 1 else ""
    return f"{time} · {_digits(ratio)}{mark}"


def _digits(value: float) -> str:
    """Returns a positive number with three digits, or all before the point."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def make_table(result: dict[str, Any]) -> Table:
    """Returns the table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = result["rows"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    if "peers" in result:
        for title in ("", *_kinds(rows)):
            table.add_column(title)
        sections = beside_peers(rows) | {_KEPT: methods(result)}
        for title, sides in sections.items():
            table.add_section()
            table.add_row(Text(title, "bold"))
            for label, cells in sides:
                table.add_row(label, *(Text(cell, "red" * ("✗" in cell)) for cell in cells))
        return table
    shown = columns(rows)
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


def note(result: dict[str, Any]) -> str:
    """Returns what the figures mean."""
    return NOTE_PEERS if "peers" in result else NOTE


def _absent(result: dict[str, Any]) -> list[str]:
    """Returns a line for each peer that was not measured, and for each that fails in some work."""
    lines = [
        f"left out: {package}, {found['why']}"
        for package, found in result.get("peers", {}).items()
        if found["why"] is not None
    ]
    return lines + [
        f"left out: {SIDES[row['side']]} in {row['work']}, {row['why']}"
        for row in result.get("methods", ())
        if row["why"] is not None
    ]


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
    lines += _absent(result)
    return lines + [f"left out: {left['row']}, {left['why']}" for left in result["left_out"]]


def markdown(result: dict[str, Any]) -> str:
    """Returns a paragraph and a table in Markdown; beside peers what they do, and who is absent."""
    rows = result["rows"]
    about = "; ".join(heading(result))
    lines = [f"{about}; `{result['surroundings']['command']}`. {note(result)}", ""]
    if "peers" in result:
        kinds = _kinds(rows)
        lines += ["| | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
        sections = beside_peers(rows) | {_KEPT: methods(result)}
        for title, sides in sections.items():
            lines.append(f"| **{title}** |" + " |" * len(kinds))
            lines += [f"| {label} | " + " | ".join(cells) + " |" for label, cells in sides]
        return "\n".join([*lines, "", *(f"* {line}" for line in summary(result))])
    shown = columns(rows)
    lines += ["| " + " | ".join(shown) + " |", "|---|" + "---:|" * (len(shown) - 1)]
    for shapes, indices in by_shapes(rows):
        lines.append(f"| **{shapes}** |" + " |" * (len(shown) - 1))
        lines += ["| " + " | ".join(c[i] for c in shown.values()) + " |" for i in indices]
    return "\n".join(lines)
