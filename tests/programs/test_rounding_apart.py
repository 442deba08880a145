"""The figure of runs that rounding alone drives apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.edge_shapes import threads

pytest.importorskip("matplotlib")

from rounding_apart import RUNS, distances, draw, trained


def test_our_run_is_as_far_from_torchs_as_torchs_from_itself(tmp_path: Path) -> None:
    """The runs are those of the figure, but shorter: differences are still of rounding alone."""
    with threads(1):
        steps = 101
        make_reference, is_moved, _ = RUNS["torch, weights moved by one unit in the last place"]
        assert is_moved
        reference = trained(make_reference, steps=steps)
        runs = {name: trained(make, moved, steps) for name, (make, moved, _) in RUNS.items()}
    last = {name: distances(run, reference)[-1] for name, run in runs.items()}
    control = last["torch, weights moved by one unit in the last place"]
    assert 0.0 < control < 1e-5
    assert 0.0 < last["amp_ext"] < 10.0 * control
    draw(reference, runs, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
