"""What Python refuses, in these words: the rows of ``refused_calls``."""

from __future__ import annotations

import pytest
from harness.deeds import do
from harness.refused_calls import REFUSED_CALLS


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_bad_call_is_refused(name: str) -> None:
    deed, kind, text = REFUSED_CALLS[name]
    with pytest.raises(kind) as caught:
        do(deed)
    assert caught.type is kind
    assert caught.value.args[0] == text
