"""Tests of training over several ranks: all of them decide alike, and as one process would."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import rank_checks_dtensors
import rank_checks_models
import rank_checks_release
import rank_checks_watching
import torch
from harness import ranks
from harness.rows import rows

import amp_ext
from amp_ext.scaler.sharded import ShardedGradScaler

pytestmark = [ranks.needs_gloo, pytest.mark.slow]

MODULES = (rank_checks_dtensors, rank_checks_models, rank_checks_release, rank_checks_watching)
OF_FOUR_RANKS = [
    rank_checks_models.a_mesh_of_two_dimensions_is_reduced_over_both,
    rank_checks_dtensors.a_mesh_of_two_dimensions_is_dithered_as_one,
]
# After this one, a rank is gone.
LAST = rank_checks_models.a_dead_rank_is_an_error_on_the_others


def checks_of(module: ModuleType) -> list[ranks.Check]:
    """Returns the checks of two ranks in a module: its functions of the rank alone."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return [
        each
        for _, each in functions
        if each.__module__ == module.__name__
        and [*inspect.signature(each).parameters] == ["rank"]
        and each not in (*OF_FOUR_RANKS, LAST)
    ]


# A start of ranks takes seconds, so each does several checks; a failure names its own.
CHECKS = {
    f"{module.__name__}-{part}": checks_of(module)[part::2] for module in MODULES for part in (0, 1)
}


@pytest.mark.parametrize("checks", rows({**CHECKS, "dead-rank": [LAST]}))
def test_two_ranks_agree(checks: list[ranks.Check], tmp_path: Path) -> None:
    ranks.run_ranks(checks, tmp_path)


def test_four_ranks_agree_over_two_mesh_dimensions(tmp_path: Path) -> None:
    ranks.run_ranks(OF_FOUR_RANKS, tmp_path, ranks=4)


@pytest.mark.parametrize("group", rows({"a-name": "world", "not-a-member": -100}))
@pytest.mark.parametrize("kind", [amp_ext.GradScaler, ShardedGradScaler])
def test_what_is_no_process_group_is_refused(kind: type[amp_ext.GradScaler], group: object) -> None:
    message = "process_group must be None or a torch.distributed.ProcessGroup that this process is"
    with pytest.raises(TypeError, match=f"{message} a member of, got {group!r}"):
        kind("cpu", process_group=group)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_sharded_scaler_without_a_process_group_says_so(unscales: bool) -> None:
    scaler = ShardedGradScaler("cpu")
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = amp_ext.optim.SGD([param])
    scaler.scale(param.sum()).backward()
    with pytest.raises(RuntimeError, match="there is no default process group"):
        (scaler.unscale_ if unscales else scaler.step)(optimizer)


def test_a_sharded_scaler_survives_a_pickle() -> None:
    scaler = ShardedGradScaler("cpu", 2.0**8, hysteresis=3)
    twin = pickle.loads(pickle.dumps(scaler))
    assert type(twin) is ShardedGradScaler
    assert twin.state_dict() == scaler.state_dict()
