"""What users can name is listed, so that a change of it is a change of the list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "surface.py"


@pytest.mark.slow
def test_the_list_of_what_users_can_name_is_right() -> None:
    command = [sys.executable, SCRIPT, "--check", "--python"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
