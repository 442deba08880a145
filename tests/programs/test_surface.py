"""What users can name is listed, so that a change of it is a change of the list."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.slow
def test_the_list_of_what_users_can_name_is_right(run_module) -> None:
    done = run_module("surface", "--check", "--python", folder=SCRIPTS)
    assert done.returncode == 0, done.stdout + done.stderr
