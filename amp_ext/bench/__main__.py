"""The command line of the benchmark.

python -m amp_ext.bench --quick                              # what has a target, in a minute
python -m amp_ext.bench --json results/ --plot results/      # everything, with files
python -m amp_ext.bench --peers                              # beside other packages' AdamW
python -m amp_ext.bench --load results/some.json --markdown  # shows what was measured before
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amp_ext.bench import agreement, plot, report, surroundings
from amp_ext.bench.measure import Effort, beside, choose_rows, matches, measure
from amp_ext.program import check_folder, check_output, make_console, parse_json, run_program

_PRINTED = Path("-")  # of --markdown without a file


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or loads, prints a table, and writes the files that are asked for.

    Args:
        arguments: Those of the command line, or None for the process's own.

    Returns:
        The exit code: a missed target is no error.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.device and not _is_here(options.device):
        got = repr(str(options.device))
        parser.error(f"argument --device: must be cpu or a GPU that torch sees, got {got}")
    if options.peers and options.device and options.device.type != "cpu":
        parser.error("argument --peers: these are optimizers for the CPU: --device=cpu")
    for module, needed in (("rich", True), ("matplotlib", options.plot is not None)):
        if needed and importlib.util.find_spec(module) is None:
            parser.error(f"{module} is missing: pip install rich matplotlib")
    outputs = {"--json": options.json, "--plot": options.plot}
    if options.markdown != _PRINTED:
        outputs["--markdown"] = options.markdown
    for option, path in outputs.items():
        if path is not None and _is_folder(path):
            check_folder(parser, option, path)
        elif path is not None:
            check_output(parser, option, path)
    if options.plot and not _is_folder(options.plot):
        plot.check_format(parser, "--plot", options.plot)
    console = make_console()
    if options.load:
        result = _load(options, parser)
    else:
        result = _measure(options, parser, given)
    if options.markdown == _PRINTED:
        print(report.markdown(result))
    else:
        console.print("\n".join(report.heading(result)), style="bold")
        console.print(report.make_table(result))
        console.print(report.note(result), style="dim")
        console.print("\n".join(report.summary(result)), soft_wrap=True)
    if options.json:
        path = _file(options.json, result, ".json")
        path.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"Written: {path}", soft_wrap=True)
    if options.markdown and options.markdown != _PRINTED:
        path = _file(options.markdown, result, ".md")
        path.write_text(report.markdown(result) + "\n")
        console.print(f"Written: {path}", soft_wrap=True)
    if options.plot:
        path = _file(options.plot, result, ".png")
        plot.draw(result, path)
        console.print(f"Written: {path}", soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m amp_ext.bench",
        description="Times steps of scaler and optimizer, ours beside torch's, in turns.",
        epilog="--json, --plot and --markdown take a file, or a folder in which it is named after "
        "date and hardware.",
    )
    parser.add_argument("--quick", action="store_true", help="only what has a target; a minute")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="beside DeepSpeed, bitsandbytes, torchao and optimi, where they are installed",
    )
    parser.add_argument("--device", type=_device, help="cpu or cuda (a GPU if any)")
    parser.add_argument(
        "--filter", type=_pattern, default="", help="regular expression on 'work, shapes'"
    )
    parser.add_argument("--list", action="store_true", help="shows the names of the rows")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    parser.add_argument(
        "--markdown",
        type=Path,
        nargs="?",
        const=_PRINTED,
        help="prints the table for a README, or writes it",
    )
    parser.add_argument("--load", type=Path, help="shows these figures instead of measuring")
    parser.add_argument("--rounds", type=_count, default=6, help="turns of each side (6)")
    parser.add_argument("--seconds", type=_positive, help="least time of a turn (0.15; quick 0.05)")
    parser.add_argument(
        "--shrink", type=_count, default=1, help="divides the sizes, for a trial (1)"
    )
    return parser


def _measure(
    options: argparse.Namespace, parser: argparse.ArgumentParser, given: list[str]
) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    on_gpu = torch.cuda.is_available() and not options.peers
    device = options.device or torch.device("cuda" if on_gpu else "cpu")
    effort = Effort(
        rounds=options.rounds,
        seconds=options.seconds or (0.05 if options.quick else 0.15),
        quick=options.quick,
        shrink=options.shrink,
        pattern=options.filter,
        peers=options.peers,
    )
    rows = choose_rows(device, effort)
    if options.list:
        print("\n".join(row.name for row in rows))
        parser.exit()
    if not rows:
        parser.error(f"--filter {options.filter!r} matches no row; --list shows them")
    about = surroundings.describe(device, given)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        works = dict.fromkeys(row.work for row in rows) if options.peers else {}
        task = progress.add_task("", total=len(works) + len(rows))
        done = -1

        def show(name: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=name, completed=done)

        compared = agreement.compare_all(works, show) if options.peers else {}
        if compared:
            rows = beside(rows, compared["methods"])
        with surroundings.OthersOnTheCpu() as others:
            result = measure(device, rows, effort, show)
    return {"surroundings": about, "cpu_used_by_others": others.share, **compared, **result}


def _file(path: Path, result: dict[str, Any], suffix: str) -> Path:
    """Returns the file that was named, or one in the folder that was."""
    if _is_folder(path):
        stem = surroundings.file_stem(result["surroundings"])
        return path / f"{stem}{'-peers' if 'peers' in result else ''}{suffix}"
    return path


def _is_folder(path: Path) -> bool:
    return path.suffix == "" or path.is_dir()


def _load(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Reads the figures that an earlier run stored, and chooses among their rows."""
    try:
        text = options.load.read_text(encoding="utf-8")
        result = parse_json(text, str(options.load))
    except (OSError, ValueError) as error:
        parser.error(f"--load: {error}")
    try:
        result["rows"] = [
            row for row in result["rows"] if matches(options.filter, row["work"], row["shapes"])
        ]
        report.markdown(result), report.summary(result)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        parser.error(f"--load: {options.load} must be a file that --json wrote")
    return result


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).partition("\n")[0]) from error


def _is_here(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    return device.type == "cpu"


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(run_program(main))
