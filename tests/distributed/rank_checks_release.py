"""What each rank checks of gradients that are released, and of states in host memory."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.optimizer_cases import EACH_CLASS, bits_of, ours
from harness.ranks import fully_sharded
from harness.reference import same_bits
from harness.transports import DelayedTransport
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.nn.parallel import DistributedDataParallel

import amp_ext
from amp_ext.optim import AdamW, WeightAverage, offload_states, release_gradients
from amp_ext.sharding import local_tensor


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))


def _sharded(dtype: torch.dtype) -> Any:
    model = _network().to(dtype)
    fully_sharded(model[2])
    return fully_sharded(model)


def _train(
    rank: int,
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    is_released: bool = False,
    is_offloaded: bool = False,
    scaled: bool = False,
) -> list[torch.Tensor]:
    """Returns all numbers of this rank after some steps, those of an average included.

    Each step has two micro-batches, of which the last one steps.
    """
    model = _sharded(dtype)
    optimizer = ours(name)(model.parameters(), **options)
    average = WeightAverage(optimizer, decay=0.5)
    if is_offloaded:
        offload_states(optimizer, transport=DelayedTransport())
    release = release_gradients(optimizer) if is_released else None
    scaler = amp_ext.GradScaler("cpu", 64.0, enabled=scaled)
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        for is_last in (False, True):
            x = torch.randn(4, 8, dtype=dtype)
            if scaled and rank == 1 and step == 3:
                x[0, 0] = float("inf")
            pauses = release is not None and not is_last
            with release.paused() if pauses else contextlib.nullcontext():
                scaler.scale(model(x).float().square().mean()).backward()
        assert all((p.grad is None) is is_released for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        if scaled:
            with pytest.raises(RuntimeError, match="still carries the loss scale"):
                optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
            for is_full in (False, True):
                kind = of_torch.StateDictOptions(full_state_dict=is_full)
                file = of_torch.get_optimizer_state_dict(model, optimizer, options=kind)
                of_torch.set_optimizer_state_dict(model, optimizer, file, options=kind)
    found = [tensor for state in bits_of(optimizer) for _, tensor in sorted(state.items())]
    if is_offloaded:
        optimizer.offload.remove()
    return [local_tensor(tensor) for tensor in (*found, *average.averages)]


def sharded_parameters_are_stepped_in_backward_and_offloaded_with_the_same_bits(rank: int) -> None:
    for row in EACH_CLASS:
        name, options = row.values
        for dtype, kept in (
            (torch.float32, {"max_grad_norm": 0.1}),
            (torch.float32, {}),
            (torch.bfloat16, {}),
            (torch.bfloat16, {"master_weights": "split8", "state_dtype": torch.bfloat16}),
            (torch.bfloat16, {"master_weights": "split8", "state_dtype": "8bit"}),
        ):
            train = partial(_train, rank, name, options | kept, dtype)
            is_clipped = "max_grad_norm" in kept  # which no release can do
            expected = train(scaled=is_clipped)
            ways = [(False, True)] if is_clipped else [(True, False), (False, True), (True, True)]
            for is_released, is_offloaded in ways:
                found = train(is_released, is_offloaded, is_clipped)
                assert all(map(same_bits, found, expected)), (name, dtype, kept)
                assert len(found) == len(expected)


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
