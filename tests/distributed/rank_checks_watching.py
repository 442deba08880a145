"""What ranks check of guards and averages."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from harness.edge_shapes import BF16
from harness.guard_rules import GuardRules, norms_of_a_run
from harness.optimizer_cases import ours, take_step
from harness.ranks import (
    assert_agreed,
    assert_same_bits,
    fully_sharded,
    small_scaler,
    whole,
)
from rank_checks_dtensors import SHAPES, give_exact_grads, layouts, sharded
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

import amp_ext


def a_guard_judges_the_norm_of_all_ranks(rank: int) -> None:
    """Of parameters that each rank has for itself, also of a rank without a gradient."""
    for scaler in (None, small_scaler(process_group=dist.group.WORLD)):
        guard = amp_ext.optim.NormGuard(process_group=dist.group.WORLD)
        param, rules, outliers = Parameter(torch.zeros(1)), GuardRules(), 0
        optimizer = ours("SGD")([param], lr=1.0, norm_guard=guard, max_grad_norm=1e9)
        norms = norms_of_a_run(500)
        for step, norm in enumerate(norms):
            if norm is None or not math.isfinite(norm):
                continue
            one_sided = step % 7 == 0
            share = 1.0 if one_sided else 0.5**0.5
            param.grad = torch.full_like(param, norm * share)
            if one_sided and rank != step % 2:
                param.grad = None
            elif scaler is not None:
                param.grad = scaler.scale(param.grad)
            if scaler is not None:
                scaler.scale(torch.zeros(()))
            take_step(optimizer, scaler)
            seen = optimizer.grad_norm.item()
            assert seen == pytest.approx(norm, rel=1e-6)
            assert_agreed(seen) if step % 100 == 0 else None
            taken = rules.takes(seen)
            outliers += not taken
            assert guard.last_step_skipped() != taken, step
        assert outliers > len(norms) // 100
        assert guard.stats().mean == rules.mean
        assert guard.stats().outliers == outliers


def a_guard_of_sharded_parameters_needs_no_group(rank: int) -> None:
    for layout in layouts():
        params = sharded([torch.zeros(shape) for shape in SHAPES], layout)
        wholes = [whole(param.detach()) for param in params]
        guard = amp_ext.optim.NormGuard(warmup_steps=2)
        optimizer = ours("SGD")(params, lr=1.0, norm_guard=guard)
        scaler = small_scaler()
        for step, size in enumerate([1.0, 1.0, 1.5, 1.0]):
            scaled = step % 2 == 1
            scale = scaler.scale(torch.ones(())) if scaled else torch.ones(())
            give_exact_grads(params, wholes, False, 0)
            for param in params:
                param.grad.mul_(size * scale)
            take_step(optimizer, scaler if scaled else None)
            assert guard.last_step_skipped() == (size != 1.0)
            assert_agreed(guard.stats().last_norm)
        assert guard.stats().outliers == 1


def a_guard_over_ranks_needs_no_common_scale_and_no_hook_divides_them(rank: int) -> None:
    """Of ranks that scale apart, one of which has no gradient, with a hook before the step."""
    world = dist.group.WORLD
    for hooked in (False, True):
        param = Parameter(torch.zeros(2))
        guard = amp_ext.optim.NormGuard(process_group=world, max_norm=8.0)
        optimizer = ours("SGD")([param], lr=1.0, norm_guard=guard)
        if hooked:
            optimizer.register_step_pre_hook(lambda *_: None)
        scaler = amp_ext.GradScaler("cpu", init_scale=2.0 ** (rank + 3))
        for step in range(4):
            share = 0.0 if step == 3 and rank == 1 else 2.0
            param.grad = scaler.scale(torch.full((2,), share))
            scaler.step(optimizer)
            scaler.update()
            expected = 16.0**0.5 if step < 3 else 8.0**0.5
            assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-6)
    sharded_one = Parameter(distribute_tensor(torch.ones(2), layouts()[0][0][0], [Shard(0)]))
    optimizer = ours("SGD")([sharded_one], norm_guard=amp_ext.optim.NormGuard(process_group=world))
    sharded_one.grad = torch.ones_like(sharded_one)
    with pytest.raises(RuntimeError, match="has a process_group, but the norm of sharded"):
        optimizer.step()
    guard = amp_ext.optim.NormGuard(process_group=world, max_norm=1.0)
    params = [] if rank else [Parameter(torch.zeros(1))]
    optimizer = ours("SGD")([{"params": params}], lr=1.0, norm_guard=guard)
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    assert guard.last_step_skipped()
    assert guard.stats().norms == 1
    assert copy.copy(guard).process_group is world
    loaded = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(guard))))
    optimizer = ours("SGD")([Parameter(torch.zeros(1))], lr=1.0, norm_guard=loaded)
    with pytest.raises(RuntimeError, match="was unpickled without its process_group"):
        optimizer.step()
    optimizer.norm_guard = amp_ext.optim.NormGuard()
    scaler = small_scaler(process_group=world)
    scaler.scale(torch.zeros(()))
    message = "norm_guard of the optimizer has no process_group, so ranks could"
    with pytest.raises(RuntimeError, match=message):
        scaler.step(optimizer)


def averages_of_shards_are_those_of_the_whole(rank: int) -> None:
    """Dithered ones too, and they are swapped and saved as shards."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 10).to(BF16)
    alone = copy.deepcopy(model)
    fully_sharded(model)
    optimizers = [amp_ext.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    sharded_average, average = (
        amp_ext.optim.WeightAverage(each, 0.9, dtype=BF16) for each in optimizers
    )
    for step in range(4):
        give_exact_grads([*model.parameters()], [*alone.parameters()], False, step)
        for optimizer in optimizers:
            optimizer.step()
    assert sharded_average.n_averaged == 4
    before = [param.detach().clone() for param in model.parameters()]
    with sharded_average.swap():
        assert_same_bits(model.parameters(), average.averages)
    assert_same_bits(model.parameters(), before)
    saved = copy.deepcopy(sharded_average.state_dict())
    sharded_average.restart()
    sharded_average.load_state_dict(saved)
    assert_same_bits(sharded_average.averages, average.averages)
    masters = [optimizers[0].state[param]["master_param"] for param in model.parameters()]
    begun = amp_ext.optim.WeightAverage(optimizers[0])
    assert_same_bits(begun.averages, masters)
    written = [whole(master).clone() for master in masters]
    with begun.swap():
        pass
    optimizers[0].param_groups[0]["lr"] = 0.0
    optimizers[0].step()
    assert_same_bits(masters, written)


def averages_reach_parameters_that_are_gathered_and_models_that_are_whole(rank: int) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    whole_one, model, x = copy.deepcopy(alone), copy.deepcopy(alone), torch.randn(8, 5)
    fully_sharded(model[0])
    fully_sharded(model)
    runs, averages = [], []
    for each in (alone, model):
        optimizer = amp_ext.optim.SGD(each.parameters(), lr=0.5)
        averages.append(amp_ext.optim.WeightAverage(optimizer, 0.5, model=each))
        losses: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                losses.append(each(x).square().mean().item())  # gathered from now on
                with averages[-1].swap():
                    losses.append(each(x).square().mean().item())
        runs.append(losses)
    torch.testing.assert_close(runs[1], runs[0])
    with torch.no_grad():
        model(x)
    averages[1].copy_to(whole_one)  # also of a model that has gathered its parameters
    assert_same_bits(whole_one.parameters(), averages[1].averages)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"copy_to: 0.weight of model must be .*, None, got "):
        averages[0].copy_to(model)
    assert_same_bits(model.parameters(), before)
    whole_file, file = (average.averaged_state_dict() for average in averages)
    for average, wrong, text in (
        (averages[1], whole_file, r"\(\[7, 5\]\), \(Shard.*, got .*None"),
        (averages[0], file, r"\(\[7, 5\]\), None, got .*Shard"),
    ):
        text = rf"^WeightAverage.load_state_dict: averages\[0\] must be .* torch.Size{text}"
        with pytest.raises(ValueError, match=text):
            average.load_state_dict(wrong)
    averages[1].load_state_dict(copy.deepcopy(file))
    flat = FullyShardedDataParallel(torch.nn.Linear(5, 3), device_id=torch.device("cpu"))
    average = amp_ext.optim.WeightAverage(amp_ext.optim.SGD(flat.parameters(), lr=0.5), model=flat)
    with pytest.raises(RuntimeError, match="swap: FullyShardedDataParallel has flattened"):
        average.swap().__enter__()
    with pytest.raises(KeyError, match=r"averaged_state_dict: state_dict.. of model must have"):
        average.averaged_state_dict()
