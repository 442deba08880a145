"""The program that takes steps of unusual size and number, made small, and what it notices."""

from __future__ import annotations

import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "stress.py"
STRESS = runpy.run_path(str(SCRIPT))
pytestmark = pytest.mark.slow


def test_each_part_passes_when_it_is_small():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--small"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    parts = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert parts == list(STRESS["PARTS"])


def test_what_grows_with_each_step_is_noticed():
    kept, memory = [], bytearray()
    growths = {
        "memory": lambda number: memory.extend(b"1" * 1_000_000),  # in one object
        "Python objects": lambda number: kept.append([number]),
        "file handles": lambda number: kept.append(SCRIPT.open()),
        "threads": lambda number: kept.append(start_waiting()),
    }
    over = threading.Event()

    def start_waiting() -> threading.Thread:
        thread = threading.Thread(target=over.wait)
        thread.start()
        return thread

    try:
        for what, step in growths.items():
            with pytest.raises(AssertionError, match=f"^{what}"):
                STRESS["stay_flat"](step, 150)
    finally:
        over.set()
        for file in kept:
            getattr(file, "close", int)()
