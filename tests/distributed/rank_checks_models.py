"""What ranks check of models that are spread over them, and of the scalers of these."""

from __future__ import annotations

import itertools
import os
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.optimizer_cases import EACH_CLASS, ours, theirs
from harness.ranks import (
    BAD_RANK,
    BAD_STEP,
    STEPS,
    Model,
    assert_agreed,
    assert_trains_as_alone,
    clip_apart,
    collectives,
    fully_sharded,
    norms_of_training,
    small_scaler,
)
from harness.reference import same_bits
from rank_checks_dtensors import assert_same_as_whole, give_exact_grads, sharded
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import amp_ext
from amp_ext.scaler.sharded import ShardedGradScaler

CLIPPING = {"lr": 0.05, "max_grad_norm": 0.1}


def fully_sharded_models_train_as_in_one_process(rank: int) -> None:
    def wrap(model: Model) -> Any:
        fully_sharded(model.first)
        return fully_sharded(model)

    for row in EACH_CLASS:
        name, options = row.values
        for extra in ({}, {"max_grad_norm": 0.1}):
            make = partial(ours(name), **options, **extra)
            optimizer = assert_trains_as_alone(rank, wrap, make, spoils_shard=bool(extra))
            sizes = [param.to_local().numel() for param in optimizer.param_groups[0]["params"]]
            assert (0 in sizes) == (rank == 1)  # uneven, and nothing of one of them


def fully_sharded_models_train_with_clipping_apart(rank: int) -> None:
    train = partial(assert_trains_as_alone, rank, fully_sharded)
    for package in (ours, theirs):
        make = partial(package("AdamW"), lr=0.05)
        train(make, clip=clip_apart, clips_apart=0.1, spoils_shard=package is theirs)
    train(make, spoils_shard=True)

    def only_unscale(model: Any, optimizer: Any) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    clips, plain = partial(ours("AdamW"), **CLIPPING), partial(ours("AdamW"), lr=0.05)
    train(clips, clip=only_unscale, like=plain, clips_apart=0.1)


def parameters_in_no_known_layout_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    whole_grad = Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    whole_grad.grad = torch.ones(4)
    where = "param of group 0, param 0"
    for param, kind, message in (
        (Parameter(partial), ValueError, f"{where} must be sharded or replicated, got ("),
        (whole_grad, TypeError, f"{where} must have a DTensor as its gradient, got Tensor"),
    ):
        with pytest.raises(kind, match=re.escape(f"AdamW: {message}")):
            ours("AdamW")([param]).step()
        scaler = small_scaler()
        scaler.scale(torch.zeros(()))
        with pytest.raises(kind, match=re.escape(f"GradScaler: {message}")):
            scaler.step(theirs("SGD")([param]))


def a_mesh_of_two_dimensions_is_reduced_over_both(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rows, columns = mesh["data"], mesh["tensor"]
    layouts = [
        ([(mesh, [Shard(0), Shard(1)]), (mesh, [Shard(0), Replicate()]), (rows, [Shard(0)])], 2),
        ([(mesh, [Replicate(), Shard(0)]), None, (columns, [Shard(0)])], 1),
        ([(rows, [Shard(0)]), (columns, [Shard(0)]), None], 2),
        ([(mesh, [Replicate(), Replicate()]), None, (columns, [Replicate()])], 0),
    ]
    for layout, reductions in layouts:
        options = {"lr": 0.05, "max_grad_norm": 2.0}
        assert_same_as_whole(layout, "AdamW", options, reductions=reductions)


# Other ways to spread a model.


def ddp_trains_as_in_one_process_and_keeps_its_gradients(rank: int) -> None:
    def clip(model: Any, optimizer: Any) -> Tensor:
        grads = [param.grad for param in model.parameters()]
        places = [grad.data_ptr() for grad in grads]
        norm = clip_apart(model, optimizer)
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        assert [grad.data_ptr() for grad in grads] == places
        return norm

    for in_buckets in (False, True):
        wrap = partial(DistributedDataParallel, gradient_as_bucket_view=in_buckets)
        train = partial(assert_trains_as_alone, rank, wrap)
        with collectives() as sizes:
            train(partial(ours("AdamW"), lr=0.05), clip=clip, clips_apart=0.1)
            train(partial(ours("AdamW"), **CLIPPING))
        assert sizes == []


def ddp_steps_muon_alike_on_all_ranks(rank: int) -> None:
    torch.manual_seed(0)
    model, scaler = DistributedDataParallel(Model()), small_scaler()
    before = model.module.first.weight.detach().clone()
    groups = amp_ext.optim.param_groups_for_muon(model, lr=0.02, adamw={"lr": 0.05})
    optimizer = amp_ext.optim.Muon(groups, max_grad_norm=0.1)
    for _ in norms_of_training(model, optimizer, scaler, None, rank):
        assert_agreed(*(param.double().sum().item() for param in model.parameters()))
    assert scaler.get_scale() == 2.0**7  # one step was skipped
    assert not torch.equal(model.module.first.weight, before)


def fsdp1_trains_as_in_one_process(rank: int) -> None:
    def params(model: Any) -> list[Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return [param.detach().clone() for param in model.module.parameters()]

    on_cpu = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    for use_orig_params, package in ((False, ours), (True, ours), (True, theirs)):
        wrap = partial(on_cpu, use_orig_params=use_orig_params)
        make, scaler = partial(package("AdamW"), lr=0.05), ShardedGradScaler("cpu", 2.0**8)
        assert_trains_as_alone(rank, wrap, make, scaler, params=params, spoils_shard=True)


def zero_trains_as_in_one_process(rank: int) -> None:
    make = partial(ZeroRedundancyOptimizer, optimizer_class=ours("AdamW"), lr=0.05)
    like = partial(ours("AdamW"), lr=0.05)
    optimizer = assert_trains_as_alone(rank, DistributedDataParallel, make, like=like)
    assert isinstance(optimizer.optim, amp_ext.optim.AdamW)
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.optim.state


# The scaler's own group.


def a_process_group_makes_ranks_skip_together(rank: int) -> None:
    """Also those that have no gradient, as all but one in some steps."""
    kinds = [partial(small_scaler, process_group=g) for g in (dist.group.WORLD, dist.new_group())]
    kinds.append(partial(ShardedGradScaler, "cpu", 2.0**8))
    makes = (ours("AdamW"), theirs("AdamW"), partial(theirs("AdamW"), fused=True))
    for kind, make, unscales in itertools.product(kinds, makes, (False, True)):
        param = Parameter(torch.ones(3))
        optimizer, scaler = make([param]), kind()
        for step in range(STEPS):
            before = param.detach().clone()
            lacks_some = step == STEPS - 1 or (step == BAD_STEP and not unscales)
            param.grad = torch.full((3,), float(2 + rank))
            if step == BAD_STEP and rank == BAD_RANK:
                param.grad[1] = torch.nan
            if lacks_some and rank != BAD_RANK:
                param.grad = None
            scaler.scale(torch.zeros(()))
            with collectives() as sizes:
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                flags = scaler._found_inf_per_device(optimizer)
                scaler.update()
            assert sizes == [3]
            assert [flag.item() for flag in flags.values()] == [float(step == BAD_STEP)]
            stays = step == BAD_STEP or param.grad is None
            assert same_bits(param.detach(), before) == stays
            assert scaler.last_step_skipped(optimizer) is (step == BAD_STEP)
            assert_agreed(scaler.get_scale())
        assert scaler.get_scale() == 2.0**7
    assert_agreed(small_scaler().get_scale())


def ranks_with_different_scales_skip_together(rank: int) -> None:
    ranges = {"init_scale": 2.0 ** (8 + rank), "growth_interval": 1}
    for kind in (partial(amp_ext.GradScaler, process_group=dist.group.WORLD), ShardedGradScaler):
        for make in (ours("SGD"), theirs("SGD"), partial(theirs("SGD"), fused=True)):
            for unscales, has_grad in ((False, True), (True, True), (False, rank == BAD_RANK)):
                param = Parameter(torch.ones(3))
                optimizer, scaler = make([param], lr=1.0), kind("cpu", **ranges)
                scaler.scale(torch.zeros(()))
                for wanted in (1.0, 1.0, 0.0):
                    if wanted == 0.0:  # load on all ranks
                        state = [scaler.state_dict()]
                        dist.broadcast_object_list(state, 0)
                        scaler.load_state_dict(state[0])
                    param.grad = torch.full((3,), scaler.get_scale()) if has_grad else None
                    if unscales:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    assert param.tolist() == [wanted if has_grad else 1.0] * 3
                    scaler.update()
                    assert scaler.last_step_skipped(optimizer) is (wanted == 1.0)
                    assert scaler.stats().last_nonfinite is None
                assert_agreed(scaler.get_scale())


def a_sharded_scaler_is_that_of_torch_and_ours(rank: int) -> None:
    scaler = ShardedGradScaler("cpu", 2.0**8, 0.25, 4.0, 3, hysteresis=2)
    assert isinstance(scaler, TorchShardedGradScaler)
    assert isinstance(scaler, amp_ext.GradScaler)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.25, 4.0)
    assert scaler.get_growth_interval() == 3
    param = Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = theirs("SGD")([param], lr=1.0)
    loss = torch.zeros((), dtype=torch.float16)
    assert scaler.scale(loss).dtype == torch.float16
    param.grad = torch.full((3,), 2.0**8, dtype=torch.float16)
    scaler.unscale_(optimizer)  # float16, which the plain scaler refuses
    assert param.grad.tolist() == [1.0] * 3
    disabled = ShardedGradScaler("cpu", enabled=False)
    with collectives() as sizes:
        disabled.step(optimizer)
        disabled.update()
    assert sizes == []


# Failures.


def a_dead_rank_is_an_error_on_the_others(rank: int) -> None:
    (param,) = sharded([torch.ones(4)], [(init_device_mesh("cpu", (2,)), [Shard(0)])])
    give_exact_grads([param], [Parameter(torch.ones(4))], False, 0)
    optimizer, scaler = ours("SGD")([param]), small_scaler()
    scaler.scale(torch.zeros(()))
    dist.barrier()
    if rank == BAD_RANK:
        os._exit(0)
    message = "amp_ext: the all-reduce over ranks [0, 1] failed. Check that all of these"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        scaler.step(optimizer)
    os._exit(0)
