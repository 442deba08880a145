"""Sums up what gpu_check.sh found: a table on the terminal and report.json in the same folder.

Exit code 1 if a step failed.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REASONS = {
    0: "passed",
    124: "out of time",
    125: "not started",
    126: "no such program",
    127: "no such program",
    137: "out of time",
}


def output(*command: str) -> str:
    """Returns what a command prints, or nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def surroundings() -> dict[str, Any]:
    """Returns hardware, versions, commit and date."""
    query = "--query-gpu=name,driver_version,memory.total"
    found: dict[str, Any] = {
        "hardware": output("nvidia-smi", query, "--format=csv,noheader").splitlines(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "nvcc": next(iter(re.findall(r"release .*", output("nvcc", "--version"))), None),
        "commit": os.environ.get("COMMIT") or None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "scripts/gpu_check.sh",
    }
    try:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        if torch.cuda.is_available():
            found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
            found["hardware"] = found["hardware"] or [torch.cuda.get_device_name()]
    except ImportError as error:
        found["torch"] = f"does not import: {error}"
    info = Path(__file__).resolve().parent.parent / "amp_ext" / "_build_info.json"
    if info.exists():
        found["build"] = json.loads(info.read_text())
    return found


def last_words(log: Path) -> str:
    """Returns the line that says most: the last one, without a sanitizer's or pytest's frame."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    words = [re.sub(r"^=+\s*|\s*=+$", "", line).strip() for line in lines]
    return next((line for line in reversed(words) if line), "")


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Returns the steps in the order in which they ran."""
    steps = []
    for line in (folder / "steps.tsv").read_text().splitlines():
        name, code, seconds, limit, command = line.split("\t")
        steps.append(
            {
                "step": name,
                "result": REASONS.get(int(code), f"failed ({code})"),
                "seconds": int(seconds),
                "limit": int(limit),
                "says": last_words(folder / f"{name}.log"),
                "command": command,
            }
        )
    return steps


def show(report: dict[str, Any]) -> None:
    """Prints the steps, each with the last line of its log."""
    where = report["surroundings"]
    print(
        f"\n{', '.join(where['hardware']) or 'no GPU'}; torch {where['torch']}, "
        f"Python {where['python']}, commit {where['commit']}, {where['date']}"
    )
    for step in report["steps"]:
        seconds = f"{step['seconds']} of {step['limit']} s"
        print(f"{step['step']:<20} {step['result']:<16} {seconds:>14}  {step['says']}")


def main() -> int:
    """Writes report.json, prints it as a table and returns the exit code."""
    folder = Path(sys.argv[1])
    report = {"surroundings": surroundings(), "steps": read_steps(folder)}
    benchmark = folder / "benchmark.json"
    if benchmark.exists():
        report["benchmark"] = json.loads(benchmark.read_text())
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    failed = [step["step"] for step in report["steps"] if step["result"] != "passed"]
    seconds = sum(step["seconds"] for step in report["steps"])
    passed = len(report["steps"]) - len(failed)
    names = f": {', '.join(failed)}" if failed else ""
    print(f"{folder}: {passed} steps passed, {len(failed)} failed in {seconds} s{names}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
