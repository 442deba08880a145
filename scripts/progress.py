"""Runs a command with its output in a file, and prints its progress every half minute.

    python scripts/progress.py build/build.log python setup.py build_ext --inplace

Prints the elapsed time and the last line of the output, which begins with ninja's count: "[4/6]".
Prints the complete output if the command fails. Returns the exit code of the command.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

INTERVAL = 30  # seconds between two lines of progress


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
                lines = ["started", *log.read_text(errors="replace").splitlines()]
                last = next(line.strip() for line in reversed(lines) if line.strip())
                print(f"{int(passed // 60)}:{int(passed % 60):02}, {last:.80}", flush=True)
    if code != 0:
        print(log.read_text(errors="replace"), end="")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
