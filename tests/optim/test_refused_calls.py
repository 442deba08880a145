"""Calls that are refused: the exception, its text, and that nothing has changed."""

from __future__ import annotations

import pytest
from harness.refused_calls import REFUSED_CALLS, do


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_bad_call_is_refused(name: str) -> None:
    scenario, kind, text = REFUSED_CALLS[name]
    with pytest.raises(kind) as caught:
        do(scenario)
    assert caught.type is kind
    assert caught.value.args[0] == text
