"""Runs a command with its output in a file, and prints its progress every half minute.

    python scripts/progress.py build/build.log python setup.py build_ext --inplace

Prints the elapsed time and the last line of the output, or ninja's count: "0:30, compiled 4 of 6".
Prints the complete output if the command fails. Returns the exit code of the command.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

INTERVAL = 30  # seconds between two lines of progress


def how_far(text: str) -> str:
    """Summarizes the progress in one line, from the output so far."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "started"
    counted = re.match(r"\[(\d+)/(\d+)\]", last)
    if counted:
        return f"compiled {counted[1]} of {counted[2]}"
    return last if len(last) <= 80 else f"{last[:77]}..."


def main(log: Path, command: list[str], interval: float = INTERVAL) -> int:
    """Runs the command, prints its progress, and returns its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        passed = 0.0
        while True:
            try:
                code = process.wait(interval)
                break
            except subprocess.TimeoutExpired:
                passed += interval
                text = log.read_text(errors="replace")
                print(f"{int(passed // 60)}:{int(passed % 60):02}, {how_far(text)}", flush=True)
    if code != 0:
        print(log.read_text(errors="replace"), end="")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
