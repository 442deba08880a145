"""What each rank checks of gradients that are released, and of states in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amp_ext
from amp_ext.optim import AdamW, WeightAverage, offload_states, release_gradients
from amp_ext.sharding import local_tensor
from harness.optimizer_cases import EACH_CLASS, bits_of, ours
from harness.reference import same_bits
from harness.transports import DelayedTransport


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))


def _sharded(dtype: torch.dtype) -> Any:
    model = _network().to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _local_bits(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    return [
        {name: getattr(part, "_local_tensor", part) for name, part in state.items()}
        for state in bits_of(optimizer)
    ]


def sharded_parameters_are_stepped_in_backward_with_the_same_bits(rank: int) -> None:
    for row in EACH_CLASS:
        name, options = row.values
        for dtype, kept in (
            (torch.float32, {}),
            (torch.bfloat16, {}),
            (torch.bfloat16, {"master_weights": "split8", "state_dtype": torch.bfloat16}),
        ):
            results = []
            for is_released in (False, True):
                model = _sharded(dtype)
                optimizer = ours(name)(model.parameters(), **options, **kept)
                release = release_gradients(optimizer) if is_released else None
                for step in range(4):
                    torch.manual_seed(10 * step + rank)
                    for _ in range(2):  # two micro-batches, of which the last one steps
                        loss = model(torch.randn(4, 8, dtype=dtype)).float().square().mean()
                        if release is not None and _ == 0:
                            with release.paused():
                                loss.backward()
                        else:
                            loss.backward()
                    assert all((p.grad is None) is is_released for p in model.parameters())
                    optimizer.step()
                    optimizer.zero_grad()
                results.append(_local_bits(optimizer))
            for left, right in zip(*results, strict=True):
                assert left.keys() == right.keys()
                for key in left:
                    assert same_bits(left[key], right[key]), (name, dtype, key)


def replicas_and_scaled_shards_are_refused(rank: int) -> None:
    model = DistributedDataParallel(_network())
    optimizer = AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="DistributedDataParallel would reduce it too late"):
        release_gradients(optimizer)
    release_gradients(AdamW(_network().parameters()), replicated=False)
    sharded = AdamW(_sharded(torch.float32).parameters())
    with pytest.raises(RuntimeError, match="its ranks must skip together"):
        release_gradients(sharded, amp_ext.GradScaler("cpu"))
    sharded.track_grad_norms = True
    with pytest.raises(RuntimeError, match=r"Set optimizer\.track_grad_norms = False"):
        release_gradients(sharded)
    scaler = amp_ext.GradScaler("cpu", process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="a scaler that has a process_group"):
        release_gradients(AdamW(_network().parameters()), scaler, replicated=False)


def sharded_states_are_offloaded_with_the_same_bits(rank: int) -> None:
    for row in EACH_CLASS:
        name, options = row.values
        for dtype, kept in (
            (torch.float32, {"max_grad_norm": 0.1}),
            (torch.bfloat16, {}),
            (torch.bfloat16, {"master_weights": "split8", "state_dtype": "8bit"}),
        ):
            _compare_offloaded(rank, name, options | kept, dtype, is_released=False)
            if "max_grad_norm" not in kept:
                _compare_offloaded(rank, name, options | kept, dtype, is_released=True)


def _compare_offloaded(
    rank: int, name: str, options: dict[str, Any], dtype: torch.dtype, is_released: bool
) -> None:
    results, averages = [], []
    for is_offloaded in (False, True):
        model = _sharded(dtype)
        optimizer = ours(name)(model.parameters(), **options)
        average = WeightAverage(optimizer, decay=0.5)
        if is_offloaded:
            offload_states(optimizer, transport=DelayedTransport())
        if is_released:
            release_gradients(optimizer)
        scaler = amp_ext.GradScaler("cpu", 64.0, enabled=dtype is torch.float32)
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(4, 8, dtype=dtype)
            if rank == 1 and step == 3 and scaler.is_enabled():
                x[0, 0] = float("inf")
            scaler.scale(model(x).float().square().mean()).backward()
            assert all((p.grad is None) is is_released for p in model.parameters())
            scaler.step(optimizer)
            scaler.update()
            if scaler.is_enabled():
                with pytest.raises(RuntimeError, match="still carries the loss scale"):
                    optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
        results.append(_local_bits(optimizer))
        averages.append([local_tensor(each) for each in average.averages])
        if is_offloaded:
            optimizer.offload.remove()
    for left, right in zip(*results, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            assert same_bits(left[key], right[key]), (name, dtype, key)
    assert all(map(same_bits, *averages))
