"""Shows what was found out as a table, in colour where rich is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from amp_ext.info.causes import CAUSES, UNKNOWN, rebuild_line
from amp_ext.info.facts import ISA_VARIABLE
from amp_ext.program import make_console

YES, NO, ARROW = "✓", "✗", "→"


def show(report: dict[str, Any]) -> None:
    """Prints the facts and, if there are problems, the table of causes and what to type.

    Args:
        report: As ``--json`` prints it.
    """
    _print_table([*_facts(report), *_steps(report["check"])])
    if report["ok"]:
        loads = "It loads; --check takes real steps on each device."
        print(f"\n{YES} {'It works.' if report['check'] else loads}")
        return
    for problem in report["problems"]:
        print(f"\n{NO} {problem['message']}")
    print("\nWhat keeps a compiled module from working:\n")
    seen = {problem["cause"] for problem in report["problems"]}
    _print_table(
        [(ARROW * (cause.key in seen), cause.text, cause.cure) for cause in (*CAUSES, UNKNOWN)],
        headings=("", "cause", "cure"),
    )
    print(f"\nrebuild: {rebuild_line()}\n\nType this:\n")
    for line in dict.fromkeys(problem["cure"] for problem in report["problems"]):
        print(f"    {line}")


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    versions, build, cpu = report["versions"], report["build"], report["cpu"]
    rows = [
        ("amp_ext", f"{versions['amp_ext']} in {report['folder']}"),
        ("torch", f"{versions['torch']}, {_with_cuda(versions['cuda'])}"),
        ("Python", versions["python"]),
        ("library", report["library"] or "none that programs in C++ could link"),
    ]
    if build is None:
        rows.append(("build", "unknown: no _build_info.json lies beside the compiled module"))
    else:
        changes = ", with uncommitted changes" if build["uncommitted_changes"] else ""
        built_for = f"for torch {build['torch']}, {_with_cuda(build['cuda'])}"
        toolkit = f", CUDA toolkit {build['toolkit']}" if build["toolkit"] else ""
        rows += [
            ("build", f"{built_for}, Python {build['python']}"),
            ("compiler", f"{build['compiler'] or 'unknown'}{toolkit}"),
            ("commit", f"{build['commit'] or 'unknown'}{changes}"),
            ("backends", ", ".join([*build["backends"], *build["architectures"]])),
        ]
    variable = "not set" if cpu["variable"] is None else cpu["variable"]
    instructions = f"{cpu['instructions'] or 'unknown'} ({ISA_VARIABLE} {variable})"
    rows.append(("CPU", f"{instructions}, threads: {cpu['threads']}, cores: {cpu['cores']}"))
    for index, gpu in enumerate(report["gpus"]):
        about = f"{gpu['name']}, compute capability {gpu['capability']}"
        rows.append((f"GPU {index}", f"{about}, {_code(gpu['code'], build)}"))
    if not report["gpus"]:
        rows.append(("GPU", "none that torch sees"))
    return rows


def _with_cuda(version: str | None) -> str:
    return f"CUDA {version}" if version else "without CUDA"


def _code(code: str | None, build: dict[str, Any] | None) -> str:
    if build is None:
        return "code for it unknown"
    if code is None:
        return "no code for it"
    return f"{code}, compiled by the driver (PTX)" if code.startswith("compute_") else code


def _steps(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns a row for each device; what went wrong with a dtype gets one of its own."""
    rows = []
    for device in dict.fromkeys(step["device"] for step in steps):
        of_device = [step for step in steps if step["device"] == device]
        marks = [f"{step['dtype']} {NO if step['error'] else YES}" for step in of_device]
        rows.append((f"steps on {device}", ", ".join(marks)))
        rows += [("", f"{step['dtype']}: {step['error']}") for step in of_device if step["error"]]
    return rows


def _print_table(rows: Sequence[tuple[str, ...]], headings: tuple[str, ...] = ()) -> None:
    """Prints rows in columns; the first cell of a row is a label."""
    if importlib.util.find_spec("rich") is None:
        lines = [headings, *rows] if headings else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            print("  ".join(padded).rstrip())
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_header=bool(headings), pad_edge=False)
    for heading in headings or rows[0]:
        table.add_column(heading)
    for label, *cells in rows:
        style = "bold" if label == ARROW else "red" if any(NO in cell for cell in cells) else ""
        table.add_row(Text(label, "bold"), *(Text(cell, style) for cell in cells))
    make_console().print(table)
