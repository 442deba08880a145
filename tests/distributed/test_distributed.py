"""Tests of training over several ranks: all of them decide alike, and as one process would."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from harness import (
    rank_checks_dtensors,
    rank_checks_models,
    rank_checks_release,
    rank_checks_watching,
    ranks,
)
from harness.rows import rows

import amp_ext
from amp_ext.scaler.sharded import ShardedGradScaler

pytestmark = ranks.needs_gloo

# A start of ranks takes seconds, so each does several checks; a failure names its own.
CHECKS = {
    "dtensors": [
        rank_checks_dtensors.dtensors_step_with_the_bits_of_whole_tensors,
        rank_checks_dtensors.lower_parts_are_loaded_into_other_placements,
        rank_checks_dtensors.norms_of_sharded_gradients_are_those_of_the_whole,
        rank_checks_dtensors.a_write_to_a_sharded_parameter_reaches_its_master,
        rank_checks_dtensors.a_gradient_that_is_still_to_be_summed_is_summed_first,
        rank_checks_models.parameters_in_no_known_layout_are_refused,
    ],
    "narrow": [
        rank_checks_dtensors.narrow_dtensors_step_with_the_bits_of_whole_tensors,
        rank_checks_dtensors.parts_of_columns_have_no_groups,
    ],
    "fully_shard": [
        rank_checks_models.fully_sharded_models_train_as_in_one_process,
        rank_checks_models.fully_sharded_models_train_with_clipping_apart,
        rank_checks_watching.averages_of_shards_are_those_of_the_whole,
        rank_checks_watching.averages_reach_parameters_that_are_gathered_and_models_that_are_whole,
    ],
    "ddp-zero-fsdp1": [
        rank_checks_models.ddp_trains_as_in_one_process_and_keeps_its_gradients,
        rank_checks_models.zero_trains_as_in_one_process,
        rank_checks_models.fsdp1_trains_as_in_one_process,
    ],
    "process_group": [
        rank_checks_watching.a_guard_judges_the_norm_of_all_ranks,
        rank_checks_watching.a_guard_of_sharded_parameters_needs_no_group,
        rank_checks_watching.a_guard_over_ranks_needs_no_common_scale_and_no_hook_divides_them,
        rank_checks_models.a_process_group_makes_ranks_skip_together,
        rank_checks_models.ranks_with_different_scales_skip_together,
        rank_checks_models.a_sharded_scaler_is_that_of_torch_and_ours,
    ],
    "released": [
        rank_checks_release.sharded_parameters_are_stepped_in_backward_and_offloaded_with_the_same_bits,
        rank_checks_release.replicas_and_scaled_shards_are_refused,
    ],
    "dead-rank": [rank_checks_models.a_dead_rank_is_an_error_on_the_others],
}


@pytest.mark.parametrize("checks", rows(CHECKS))
def test_two_ranks_agree(checks: list[ranks.Check], tmp_path: Path) -> None:
    ranks.run_ranks(checks, tmp_path)


def test_four_ranks_agree_over_two_mesh_dimensions(tmp_path: Path) -> None:
    checks = [
        rank_checks_models.a_mesh_of_two_dimensions_is_reduced_over_both,
        rank_checks_dtensors.a_mesh_of_two_dimensions_is_dithered_as_one,
    ]
    ranks.run_ranks(checks, tmp_path, ranks=4)


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
