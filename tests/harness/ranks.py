"""Starts ranks for the tests of distributed training, and what each of them checks there."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

import amp_ext
from amp_ext.sharding import local_tensor
from harness import HANGS
from harness.reference import same_bits

Check = Callable[[int], None]
BAD_RANK, BAD_STEP, STEPS = 1, 2, 4
IMPORTED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.optim"]

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)

# Start and end.


def run_ranks(checks: list[Check], folder: Path, ranks: int = 2) -> None:
    """Runs checks one after the other on fresh ranks.

    Raises:
        AssertionError: With the traceback of the rank that failed first, or if one hangs.
    """
    # A process that has done nothing but imports forks each rank, which is up at once.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    processes = [
        context.Process(target=_rank, args=(rank, ranks, checks, folder), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline, running = time.monotonic() + HANGS, list(processes)
    late: list[int] = []
    while running:
        sentinels = [process.sentinel for process in running]
        if not connection.wait(sentinels, max(0.0, deadline - time.monotonic())):
            late = [processes.index(process) for process in running]
        running = [process for process in running if process.is_alive()]
        has_failed = any(process.exitcode for process in processes if process not in running)
        if late or has_failed:  # the others may wait for it
            for process in running:
                process.kill()
                process.join()
            break
    exits = [process.exitcode for process in processes]  # of a rank killed by a signal: -signal
    messages = [file.read_text() for file in sorted(folder.glob("failure_*"))]
    assert not late, f"ranks {late} have not ended after {HANGS} s\n" + "\n".join(messages)
    assert exits == [0] * ranks, f"ranks ended with {exits}\n" + "\n".join(messages)


def _rank(rank: int, ranks: int, checks: list[Check], folder: Path) -> None:
    crashes = (folder / f"failure_{rank}_crash").open("w")
    faulthandler.enable(crashes)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=HANGS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    for check in checks:
        torch.manual_seed(0)
        try:
            check(rank)
        except BaseException:
            where = f"{check.__name__} on rank {rank}:\n{traceback.format_exc()}"
            (folder / f"failure_{rank}").write_text(where)
            os._exit(1)  # the others see at once that it is gone
    dist.barrier()
    dist.destroy_process_group()


# What all checks use.


@contextlib.contextmanager
def collectives() -> Iterator[list[int]]:
    """Collects the sizes of all all-reduces that are asked for by name."""
    sizes: list[int] = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = original


def assert_agreed(*values: Any) -> None:
    """Asserts that every rank has just the same values."""
    values = tuple(value.tolist() if isinstance(value, Tensor) else value for value in values)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, repr(values))
    assert everywhere == everywhere[:1] * len(everywhere)


def whole(tensor: Tensor) -> Tensor:
    """Returns the tensor of which ranks have parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Compares tensors as wholes."""
    for one, other in zip(actual, expected, strict=True):
        assert same_bits(whole(one.detach()), whole(other.detach()))


class Model(torch.nn.Module):
    """Its rows do not divide by two, and one parameter has a single one: ranks get none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 3)
        self.gain = Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) * self.gain


class WideModel(Model):
    """Besides, it has parameters with groups of 32 elements, one of which is a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(
            torch.nn.Linear(5, 32), torch.nn.Linear(32, 129), torch.nn.Linear(129, 7)
        )
        self.row = Parameter(torch.randn(1, 4096))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.row.mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns the samples of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


def scaled_backward(
    model: Any, scaler: Any, step: int, rank: int | None = None, spoils_shard: bool = False
) -> None:
    """Runs the backward pass over one rank's samples, or all. At one step something is bad.

    It is a sample of one rank, which reaches every gradient that is reduced; or an element of the
    gradients that one rank has, which reaches no other rank.
    """
    x, y = batch(step)
    if step == BAD_STEP and not spoils_shard:
        x[-1] = torch.inf
    if rank is not None:
        half = len(x) // dist.get_world_size()
        x, y = x[rank * half :][:half], y[rank * half :][:half]
    scaler.scale((model(x) - y).square().mean()).backward()
    if step == BAD_STEP and spoils_shard and rank == BAD_RANK:
        grads = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        next(grad for grad in grads if grad.numel()).view(-1)[0] = torch.inf


def small_scaler(**options: Any) -> amp_ext.GradScaler:
    return amp_ext.GradScaler("cpu", init_scale=2.0**8, **options)


Clip = Callable[[Any, Any], Tensor]


def norms_of_training(
    model: Any, optimizer: Any, scaler: Any, clip: Clip | None, *where: Any
) -> Iterator[Tensor | None]:
    """Takes steps and gives the norm of each, before the scaler is updated."""
    for step in range(STEPS):
        optimizer.zero_grad()
        scaled_backward(model, scaler, step, *where)
        norm = None
        if clip is not None:
            scaler.unscale_(optimizer)
            norm = clip(model, optimizer)
        scaler.step(optimizer)
        yield norm if clip is not None else getattr(optimizer, "grad_norm", None)
        scaler.update()


def assert_trains_as_alone(
    rank: int,
    wrap: Callable[[Model], Any],
    make: Callable[[Any], Any],
    scaler: Any = None,
    clip: Clip | None = None,
    like: Callable[[Any], Any] | None = None,
    clips_apart: float | None = None,
    params: Callable[[Any], list[Tensor]] | None = None,
    spoils_shard: bool = False,
) -> Any:
    """Trains over all ranks; what comes out must be what one process makes of all samples."""

    def clip_alone(model: Any, optimizer: Any) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), clips_apart)

    torch.manual_seed(0)
    alone, torch_clip = Model(), None if clips_apart is None else clip_alone
    usual = (like or make)(alone.parameters())
    trained = norms_of_training(alone, usual, small_scaler(), torch_clip)
    norms = [None if norm is None else norm.clone() for norm in trained]
    torch.manual_seed(0)
    model, scaler = wrap(Model()), scaler or small_scaler()
    optimizer = make(model.parameters())
    steps = norms_of_training(model, optimizer, scaler, clip, rank, spoils_shard)
    for step, norm in enumerate(steps):
        found = [v.item() for v in scaler._found_inf_per_device(optimizer).values()]
        assert found == [float(step == BAD_STEP)]
        if norms[step] is None:
            assert norm is None
        elif step != BAD_STEP:
            torch.testing.assert_close(whole(norm), norms[step])
        assert_agreed(found, None if norm is None else whole(norm), scaler.get_scale())
    assert scaler.last_step_skipped(optimizer) is False
    assert scaler.get_scale() == 2.0**7
    got = params(model) if params is not None else [whole(p) for p in model.parameters()]
    for actual, wanted in zip(got, alone.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted)
    return optimizer


def fully_sharded(module: Any) -> Any:
    """Shards on the CPU, where gloo is; FSDP alone would take a GPU that torch was built for."""
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def clip_apart(model: Any, optimizer: Any) -> Tensor:
    return amp_ext.clip_grad_norm_(model.parameters(), 0.1)
