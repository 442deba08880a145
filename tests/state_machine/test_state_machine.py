"""A short run of the state machine, and whether its differences are those of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from state_machine.differences import MODELLED
from state_machine.machine import Machine

DIFFERENCES = Path(__file__).resolve().parents[2] / "docs" / "differences.md"

short = settings(
    max_examples=400,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    report_multiple_bugs=False,
)


@pytest.mark.slow
def test_any_program_gets_from_torch_and_from_us_the_same_within_rounding():
    run_state_machine_as_test(Machine, settings=short)


def test_what_differs_on_purpose_is_on_the_page():
    cases = re.findall(r"^\| ([^|]+?) \|", DIFFERENCES.read_text(), re.MULTILINE)
    assert MODELLED - set(cases) == set()
