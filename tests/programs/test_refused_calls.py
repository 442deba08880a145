"""What Python and C++ refuse alike, in the same words: the rows of ``refused_calls``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from refused_calls import REFUSED_CALLS, comparable, do, whole


@pytest.fixture(scope="module")
def errors(run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the text of C++ for each row."""
    file = tmp_path_factory.mktemp("refused") / "rows.pt"
    torch.save([whole(deed) for deed, _, _ in REFUSED_CALLS.values()], file)
    return dict(zip(REFUSED_CALLS, run("refuse", str(file)).splitlines(), strict=True))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_bad_call_is_refused_by_python(name: str) -> None:
    deed, kind, text = REFUSED_CALLS[name]
    with pytest.raises(kind) as caught:
        do(deed)
    assert caught.type is kind
    assert caught.value.args[0] == text


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_bad_call_gets_the_same_words_in_cpp(errors: dict[str, str], name: str) -> None:
    assert comparable(errors[name]) == comparable(REFUSED_CALLS[name][2])
