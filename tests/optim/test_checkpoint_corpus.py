"""Files of earlier versions load with the bits of then."""

from __future__ import annotations

from pathlib import Path

import checkpoint_corpus as corpus
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("corpus")
    corpus.unpack(found)
    return found


def test_every_row_is_there() -> None:
    assert {*corpus.ROWS, *corpus.ROWS_OF_TORCH} <= corpus.results().keys()
    for row, found in corpus.results().items():
        assert found.keys() - {corpus.FLOAT32} == {*corpus.targets_of(row)}


@pytest.mark.parametrize("group", corpus.GROUPS)
def test_files_load_with_the_bits_of_before(group: str, folder: Path) -> None:
    loaded = 0
    for row, target, wanted in corpus.loads(group):
        is_its_own = target == corpus.targets_of(row)[0]
        # Those of C++ have the same numbers: one load shows that they are read.
        for path in corpus.files_of(folder, row, "python", "torch", *["cpp"] * is_its_own):
            loaded += 1
            result, in_float32 = corpus.results_in_python(corpus.plan_of(row, target, path))
            assert result == wanted, f"{path} into {target}"
            if is_its_own:
                assert in_float32 == corpus.results()[row][corpus.FLOAT32], path
    assert loaded > 0
