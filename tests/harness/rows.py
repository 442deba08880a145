"""Rows of parametrized tests as a table, one line each."""

from __future__ import annotations

from typing import Any

import pytest


def rows(cases: dict[str, Any]) -> list[Any]:
    """Returns ``pytest.param`` rows: by its id the value of each, or a tuple of values."""
    return [
        pytest.param(*(values if isinstance(values, tuple) else (values,)), id=name)
        for name, values in cases.items()
    ]
