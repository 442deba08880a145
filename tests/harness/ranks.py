"""Starts ranks for the tests of distributed training, and what each of them checks there."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import math
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import amp_ext
from amp_ext.scaler.sharded import ShardedGradScaler
from amp_ext.sharding import global_offset, local_tensor
from harness import HANGS
from harness.edge_shapes import BF16, F16, F32, F64
from harness.guard_rules import GuardRules, norms_of_a_run
from harness.optimizer_cases import EACH_CLASS, FEW_OPTIMIZERS, optimizers_named, ours, theirs
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


def take_step(optimizer: Any, scaler: Any) -> None:
    """Takes a step, by a scaler and with its update if there is one."""
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


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


# DTensors.


def layouts() -> list[list[tuple[Any, Any]]]:
    """Returns the meshes and placements of some parameters; None for a parameter that is whole."""
    line = init_device_mesh("cpu", (2,))
    wide = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts"))
    tall = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
    return [
        [(line, [Shard(0)])] * 4,
        [(line, [Shard(0)]), (line, [Replicate()]), (line, [Shard(1)]), None],
        [(wide, [Replicate(), Shard(0)]), (tall, [Replicate(), Shard(0)])] * 2,
        [(wide, [Shard(0), Shard(0)]), None, (line, [Shard(0)]), (tall, [Shard(1), Replicate()])],
    ]


SHAPES = [(5, 3), (1, 4), (6, 7), (3, 2)]
# With groups of 32 elements, but for the third; 2 ranks and 4 have uneven parts, and empty ones.
GROUPED_SHAPES = [(129, 32), (1, 4096), (6, 7), (3, 5, 1024)]


def sharded(values: list[Tensor], layout: list[Any]) -> list[Parameter]:
    return [
        Parameter(value if place is None else distribute_tensor(value, *place))
        for value, place in zip(values, layout, strict=True)
    ]


def give_exact_grads(params: list[Any], twins: list[Any], overflow: bool, step: int) -> None:
    """Gives both sides the same small integers: their squares sum up exactly in any order."""
    generator = torch.Generator().manual_seed(step)
    for index, (param, twin) in enumerate(zip(params, twins, strict=True)):
        grad = torch.randint(-8, 9, twin.shape, generator=generator).to(twin.dtype)
        if overflow and index == 0:
            grad[-1] = torch.inf  # the last row: in the shard of the last rank
        twin.grad = grad.clone()
        param.grad = grad
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)


def assert_same_as_whole(
    layout: list[Any],
    name: str,
    options: dict[str, Any],
    dtype=F32,
    scaled=True,
    reductions=None,
    shapes=SHAPES,
) -> None:
    """Steps sharded and whole parameters of the same values and compares all bits.

    A scaled step takes so many reductions, if that is known.
    """
    values = [torch.randn(shape).to(dtype) for shape in shapes[: len(layout)]]
    params, twins = sharded(values, layout), [Parameter(value.clone()) for value in values]
    both = [ours(name)(side, **options) for side in (params, twins)]
    scalers = [small_scaler() for _ in both]
    for step in range(STEPS):
        overflow = scaled and step == BAD_STEP
        give_exact_grads(params, twins, overflow, step)
        for optimizer, scaler in zip(both, scalers, strict=True):
            with collectives() as sizes:
                if scaled:
                    scaler.scale(torch.zeros(()))
                    scaler.step(optimizer)
                    scaler.update()
                    assert scaler.last_step_skipped(optimizer) is overflow
                else:
                    optimizer.step()
            if reductions is not None:
                assert len(sizes) == (reductions if optimizer is both[0] else 0)
        norms = [optimizer.grad_norm for optimizer in both]
        if norms[0] is not None and not overflow:
            assert same_bits(*norms)
        assert_agreed(norms[0], scalers[0].get_scale())
    for param, twin in zip(params, twins, strict=True):
        assert same_bits(whole(param.detach()), twin.detach())
        state = both[0].state[param]
        for key, value in both[1].state[twin].items():
            assert key == "step" or type(state[key]) is type(param.data)
            assert same_bits(whole(state[key]), value), key


def dtensors_step_with_the_bits_of_whole_tensors(rank: int) -> None:
    for number, layout in enumerate(layouts()):
        for place, row in enumerate(FEW_OPTIMIZERS):
            name, options = row.values
            clips = (number + place) % 2 == 1
            more = (options | {"max_grad_norm": 3.0}, BF16) if clips else (options,)
            assert_same_as_whole(layout, name, *more)
        # Without a scaler the norm is that of all ranks too.
        assert_same_as_whole(layout, "SGD", {"lr": 0.1, "max_grad_norm": 2.0}, scaled=False)


def over_rows() -> list[list[tuple[Any, Any]]]:
    """Returns layouts in which each part is a stretch of its tensor."""
    line, _, mixed, _ = layouts()
    wide = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts"))
    both = (wide, [Shard(0), Shard(0)])
    return [line, [line[0], mixed[1], both, None], [both, line[0], (wide, [Replicate(), Shard(0)])]]


NARROW: list[tuple[torch.dtype, dict[str, Any]]] = [
    (F32, {"state_dtype": BF16}),
    (BF16, {"state_dtype": BF16, "master_weights": False}),
    (BF16, {"state_dtype": None, "master_weights": False, "rounding": "dither"}),
    (BF16, {"master_weights": "split"}),
    (F16, {"master_weights": "split"}),
    (BF16, {"state_dtype": BF16, "master_weights": "split8"}),
]


CODED: list[tuple[torch.dtype, dict[str, Any]]] = [
    (F32, {"state_dtype": "8bit-bf16"}),
    (F32, {"state_dtype": "8bit"}),
    (BF16, {"state_dtype": "8bit", "master_weights": "split"}),
    (F16, {"state_dtype": "8bit-bf16", "master_weights": "split8"}),
    (BF16, {"state_dtype": "8bit", "master_weights": False}),
]


def narrow_dtensors_step_with_the_bits_of_whole_tensors(rank: int) -> None:
    dithered = [(*each, SHAPES) for each in itertools.product(over_rows(), FEW_OPTIMIZERS, NARROW)]
    kinds = optimizers_named("adamw", "lion", "dampening")
    coded = [(*each, GROUPED_SHAPES) for each in itertools.product(over_rows(), kinds, CODED)]
    for layout, row, (dtype, own), shapes in (*dithered[::5], *coded[::2]):
        name, options = row.values
        if name == "SGD":
            options = options | {"momentum": 0.99}  # is dithered, too
        assert_same_as_whole(layout, name, options | own, dtype, shapes=shapes)


def parts_of_columns_have_no_groups(rank: int) -> None:
    """Whose parts could cut them; moments in bfloat16 take the place of codes."""
    line = init_device_mesh("cpu", (2,))
    values = torch.randn(64, 96)
    for state_dtype in ("8bit-bf16", "8bit"):
        for name in ("AdamW", "Lion"):
            columns, rows, alone = (
                Parameter(value)
                for value in (
                    distribute_tensor(values, line, [Shard(1)]),
                    distribute_tensor(values, line, [Shard(0)]),
                    values.clone(),
                )
            )
            both = [ours(name)([param], state_dtype=state_dtype) for param in (columns, rows)]
            exact = ours(name)([alone])
            for step in range(STEPS):
                for param in (columns, rows):
                    give_exact_grads([param], [alone], False, step)
                for optimizer in (*both, exact):
                    optimizer.step()
            keys = [optimizer.state[p].keys() for optimizer in both for p in optimizer.state]
            moment = "exp_avg" if name == "Lion" else "exp_avg_sq"
            assert both[0].state[columns][moment].dtype == BF16
            assert (moment in keys[1]) == (name == "AdamW" and state_dtype == "8bit-bf16")
            for param in (columns, rows):
                error = whole(param.detach()) - alone.detach()
                assert error.norm() <= 0.1 * (alone.detach() - values).norm()
            # From rows to columns the codes become numbers, and back.
            for saver, loader in (both, both[::-1]):
                before = amp_ext.optim.float32_state_dict(saver)["state"][0]
                loader.load_state_dict(saver.state_dict())
                after = amp_ext.optim.float32_state_dict(loader)["state"][0]
                for key, value in before.items():
                    error = whole(after[key]) - whole(value)
                    assert error.norm() <= 0.03 * whole(value).norm(), key


def parts_begin_where_torch_says(rank: int) -> None:
    pairs = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    for shape in [(5, 3), (1, 4), (9,), (2, 2, 2), (0, 3), ()]:
        over: list[tuple[Any, Any]] = [(line, [Replicate()]), (pairs, [Replicate(), Replicate()])]
        if shape:
            over += [(line, [Shard(0)]), (pairs, [Shard(0), Shard(0)])]
            over += [(pairs, [Replicate(), Shard(0)]), (pairs, [Shard(0), Replicate()])]
        for mesh, placements in over:
            param = distribute_tensor(torch.zeros(shape), mesh, placements)
            _, offset = compute_local_shape_and_global_offset(param.shape, mesh, placements)
            if not param.to_local().numel():
                continue  # it begins anywhere
            expected = offset[0] * (param.numel() // shape[0]) if shape else 0
            assert global_offset(param) == expected, (shape, placements)
    values = torch.arange(12.0).view(4, 3)
    columns = distribute_tensor(values, line, [Shard(1)])
    inner = DTensor.from_local(
        values[:2].t().contiguous().t(), line, [Shard(0)], shape=torch.Size((4, 3)), stride=(1, 4)
    )
    # Parts of which each counts for itself.
    assert global_offset(columns) == global_offset(inner) == 0


def a_mesh_of_two_dimensions_is_dithered_as_one(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    layout = [(mesh, [Shard(0), Shard(0)])] * len(SHAPES)
    for dtype, own in NARROW:
        assert_same_as_whole(layout, "AdamW", own, dtype, scaled=False)
    for dtype, own in CODED:
        assert_same_as_whole(layout, "AdamW", own, dtype, scaled=False, shapes=GROUPED_SHAPES)


def lower_parts_are_loaded_into_other_placements(rank: int) -> None:
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).to(BF16)

    def stepped(placement: Any, form: str) -> tuple[Any, Any]:
        param = Parameter(distribute_tensor(values.clone(), line, [placement]))
        optimizer = amp_ext.optim.SGD([param], lr=1e-3, master_weights=form)
        for _ in range(3):
            param.grad = distribute_tensor(values.clone(), line, [placement])
            optimizer.step()
        return param, optimizer

    for form in ("split", "split8"):
        first, optimizer = stepped(Shard(0), form)
        for placement in (Shard(0), Shard(1), Replicate()):
            second, other = stepped(placement, form)
            with torch.no_grad():
                second.copy_(first.redistribute(line, [placement]))
            other.load_state_dict(optimizer.state_dict())
            masters = [o.master_params()[0].full_tensor() for o in (optimizer, other)]
            assert torch.equal(*masters), (form, placement)


def each_mesh_dimension_takes_one_small_collective(rank: int) -> None:
    line, copies, mixed, _ = layouts()
    replicated = [(line[0][0], [Replicate()])] * 4
    # An optimizer, the numbers in a collective of its look, and whether a step alone has one.
    makes = [(partial(ours("AdamW"), max_grad_norm=1.0), 2, True), (ours("AdamW"), 1, False)]
    makes.append((theirs("SGD"), 1, False))
    for layout, expected in ([None] * 4, 0), (replicated, 0), (line, 1), (copies, 1), (mixed, 1):
        for make, size, has_own in makes:
            params = sharded([torch.randn(shape) for shape in SHAPES], layout)
            optimizer, scaler = make(params), small_scaler()
            scaler.scale(torch.zeros(()))
            for is_scaled in (True, False):
                give_exact_grads(params, [whole(p.detach()) for p in params], False, 0)
                with collectives() as sizes:
                    take_step(optimizer, scaler if is_scaled else None)
                assert sizes == [size] * expected * (is_scaled or has_own), (layout, size)


def track(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer.track_grad_norms = True


def norms_of_sharded_gradients_are_those_of_the_whole(rank: int) -> None:
    for layout in layouts():
        for clips in (True, False):
            params = sharded([torch.randn(shape) for shape in SHAPES], layout)
            wholes = [whole(param.detach()) for param in params]
            optimizer = ours("AdamW")(params, **({"max_grad_norm": 1.0} if clips else {}))
            optimizer.track_grad_norms = True
            scaler = small_scaler()
            for scaled in (True, False):
                scale = scaler.scale(torch.ones(())) if scaled else torch.ones(())
                give_exact_grads(params, wholes, False, 0)
                params[1].grad = None
                # A hook may ask for them when the scaler has looked.
                optimizer.track_grad_norms = not (scaled and clips)
                optimizer.register_step_pre_hook(track)
                grads = [None if p.grad is None else whole(p.grad) / scale for p in params]
                take_step(optimizer, scaler if scaled else None)
                expected = [math.nan if g is None else g.double().norm().item() for g in grads]
                torch.testing.assert_close(
                    optimizer.grad_norms.double(),
                    torch.tensor(expected, dtype=torch.float64),
                    rtol=1e-6,
                    atol=0,
                    equal_nan=True,
                )


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
    for hooked in (False, True):
        param = Parameter(torch.zeros(2))
        guard = amp_ext.optim.NormGuard(process_group=dist.group.WORLD, max_norm=8.0)
        optimizer = ours("SGD")([param], lr=1.0, norm_guard=guard)
        if hooked:
            optimizer.register_step_pre_hook(lambda *_: None)
        scaler = amp_ext.GradScaler("cpu", init_scale=2.0 ** (rank + 3))
        for step in range(4):
            param.grad = scaler.scale(torch.full((2,), 2.0))
            if step == 3 and rank == 1:
                param.grad = scaler.scale(torch.zeros(2))
            scaler.step(optimizer)
            scaler.update()
            expected = 16.0**0.5 if step < 3 else 8.0**0.5
            assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-6)
    params = [Parameter(distribute_tensor(torch.ones(2), layouts()[0][0][0], [Shard(0)]))]
    guard = amp_ext.optim.NormGuard(process_group=dist.group.WORLD)
    optimizer = ours("SGD")(params, lr=1.0, norm_guard=guard)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match="has a process_group, but the norm of sharded"):
        optimizer.step()
    empty = ours("SGD")(
        [{"params": [] if rank else [Parameter(torch.zeros(1))]}],
        lr=1.0,
        norm_guard=amp_ext.optim.NormGuard(process_group=dist.group.WORLD, max_norm=1.0),
    )
    for param in empty.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 2.0)
    empty.step()
    assert empty.norm_guard.last_step_skipped()
    assert empty.norm_guard.stats().norms == 1
    loaded = pickle.loads(pickle.dumps(empty.norm_guard))
    optimizer = ours("SGD")([Parameter(torch.zeros(1))], lr=1.0, norm_guard=loaded)
    with pytest.raises(RuntimeError, match="was unpickled without its process_group"):
        optimizer.step()
    optimizer.norm_guard = amp_ext.optim.NormGuard()
    scaler = small_scaler(process_group=dist.group.WORLD)
    scaler.scale(torch.zeros(()))
    message = "norm_guard of the optimizer has no process_group, so ranks could"
    with pytest.raises(RuntimeError, match=message):
        scaler.step(optimizer)


def a_rank_that_inspects_its_step_takes_part_in_the_norm_of_all_ranks(rank: int) -> None:
    param = Parameter(torch.zeros(4))
    guard = amp_ext.optim.NormGuard(process_group=dist.group.WORLD)
    optimizer = ours("SGD")([param], lr=0.0, norm_guard=guard)
    for asking, empty in [((0,), None), ((0, 1), 1), ((1,), None), ((1,), 1)]:
        if rank in asking:
            optimizer.inspect_next()
        param.grad = None if rank == empty else torch.full((4,), 1.0 + rank)
        optimizer.step()
        expected = 2.0 if empty == 1 else math.sqrt(20.0)
        assert optimizer.grad_norm.item() == pytest.approx(expected), (asking, empty)
    assert_agreed(guard.stats().mean)
    assert optimizer.inspection is not None


def an_inspection_of_sharded_parameters_is_that_of_the_whole(rank: int) -> None:
    options_of: list[dict[str, Any]] = [{}, {"max_grad_norm": 1.0}, {"master_weights": "split"}]
    options_of.append({"track_grad_norms": True})
    for layout, options in [*itertools.product(layouts(), options_of)][::3]:
        values = [torch.randn(shape).to(BF16) for shape in SHAPES]
        params, twins = sharded(values, layout), [Parameter(value.clone()) for value in values]
        both = [ours("AdamW")(side, lr=0.1, **options) for side in (params, twins)]
        for step in range(STEPS):
            scaler = small_scaler() if step else None
            if scaler is not None:
                scaler.scale(torch.zeros(()))
            give_exact_grads(params, twins, step == BAD_STEP, step)
            params[1].grad = twins[1].grad = None
            with collectives() as of_scan:
                both[0].scan_gradients(torch.zeros(()))
            with collectives() as sizes:
                found = both[0].inspect(scaler)
            scans = step > 0 or "max_grad_norm" in options
            assert len(sizes) == len(of_scan) * (2 if scans else 1), sizes
            wanted = both[1].inspect(scaler)
            assert found.skipped == wanted.skipped == (step == BAD_STEP)
            for name, numbers in wanted.to_dict()["params"].items():
                got, moments = found.to_dict()["params"][name], numbers.pop("moment_norms")
                assert got.pop("moment_norms") == pytest.approx(moments, rel=1e-9)
                assert got == pytest.approx(numbers, rel=1e-9)
            assert found.params.keys() == wanted.params.keys()
            both[0].inspect_next()
            for optimizer in both:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            assert both[0].inspection.to_dict() == found.to_dict()


def averages_of_shards_are_those_of_the_whole(rank: int) -> None:
    """Dithered ones too, and they are swapped and saved as shards."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 10).to(BF16)
    alone = copy.deepcopy(model)
    fully_sharded(model)
    sides = []
    for each in (model, alone):
        optimizer = amp_ext.optim.SGD(each.parameters(), lr=0.1)
        sides.append((each, optimizer, amp_ext.optim.WeightAverage(optimizer, 0.9, dtype=BF16)))
    for _ in range(4):
        grads = [torch.randn(param.shape).to(BF16) for param in alone.parameters()]
        for each, optimizer, _ in sides:
            for param, grad in zip(each.parameters(), grads, strict=True):
                is_sharded = isinstance(param, DTensor)
                mesh = (param.device_mesh, param.placements) if is_sharded else None
                param.grad = distribute_tensor(grad, *mesh) if mesh else grad.clone()
            optimizer.step()
    (_, _, ours), (_, _, whole_average) = sides
    assert ours.n_averaged == 4
    assert_same_bits(ours.averages, whole_average.averages)
    before = [param.detach().clone() for param in model.parameters()]
    with ours.swap():
        assert_same_bits(model.parameters(), whole_average.averages)
    assert_same_bits(model.parameters(), before)
    saved = copy.deepcopy(ours.state_dict())
    ours.restart()
    ours.load_state_dict(saved)
    assert_same_bits(ours.averages, whole_average.averages)
    optimizer = sides[0][1]
    optimizer.rebuild()
    begun = amp_ext.optim.WeightAverage(optimizer)
    masters = [optimizer.state[param]["master_param"] for param in model.parameters()]
    assert_same_bits(begun.averages, masters)
    optimizer.step()
    for master in masters:
        local_tensor(master).add_(1.0)  # of a parameter that was written, this would be lost
    written = [whole(master).clone() for master in masters]
    with begun.swap():
        pass
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_same_bits(masters, written)


def averages_reach_parameters_that_are_gathered_and_models_that_are_whole(rank: int) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    whole_one, model, x = copy.deepcopy(alone), copy.deepcopy(alone), torch.randn(8, 5)
    fully_sharded(model[0])
    fully_sharded(model)
    runs: list[list[float]] = []
    averages = []
    for each in (alone, model):
        optimizer = amp_ext.optim.SGD(each.parameters(), lr=0.5)
        average = amp_ext.optim.WeightAverage(optimizer, 0.5, model=each)
        losses: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                losses += [loss.item(), each(x).square().mean().item()]  # gathered from now on
                with average.swap():
                    losses.append(each(x).square().mean().item())
        runs.append(losses)
        averages.append(average)
    torch.testing.assert_close(runs[1], runs[0])
    with torch.no_grad():
        model(x)
    averages[1].copy_to(whole_one)  # also of a model that has gathered its parameters
    assert_same_bits(whole_one.parameters(), averages[1].averages)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"copy_to: 0.weight of model must be a whole tensor of s"):
        averages[0].copy_to(model)
    assert_same_bits(model.parameters(), before)
    sharded, unsharded = averages[1].averaged_state_dict(), averages[0].averaged_state_dict()
    for average, wrong, text in (
        (averages[1], unsharded, r"module.0.weight must be a DTensor of sizes \[7, 5\], \(Shard"),
        (averages[0], sharded, r"module.0.weight must be a whole tensor of sizes \[7, 5\]"),
        (averages[1], averages[0].state_dict(), r"averages\[0\] must be a DTensor of sizes \[7, 5"),
    ):
        with pytest.raises(ValueError, match=f"^WeightAverage.load_state_dict: {text}"):
            average.load_state_dict(wrong)
    averages[1].load_state_dict(copy.deepcopy(sharded))
    flat = FullyShardedDataParallel(torch.nn.Linear(5, 3), device_id=torch.device("cpu"))
    average = amp_ext.optim.WeightAverage(amp_ext.optim.SGD(flat.parameters(), lr=0.5), model=flat)
    with pytest.raises(
        RuntimeError, match=r"swap: param 0 was flattened by FullyShardedDataParallel"
    ):
        average.swap().__enter__()
    with pytest.raises(ValueError, match=r"averaged_state_dict: state_dict.. of model lacks"):
        average.averaged_state_dict()


def a_write_to_a_sharded_parameter_reaches_its_master(rank: int) -> None:
    values = [torch.randn(5, 3).to(BF16), torch.randn(1, 2).to(BF16)]
    params = sharded(values, [layouts()[0][0]] * 2)
    twins = [Parameter(value.clone()) for value in values]
    both = [ours("SGD")(side, lr=0.5) for side in (params, twins)]
    writes: list[Callable[[Any], Any]] = [
        lambda tensor: tensor.mul_(3),
        lambda tensor: local_tensor(tensor).mul_(0.5),
        lambda tensor: tensor.copy_(torch.ones_like(tensor)),
    ]
    for step, write in enumerate(writes):
        give_exact_grads(params, twins, False, step)
        for optimizer in both:
            optimizer.step()
        with torch.no_grad():
            for param in (*params, *twins):
                write(param)
        if step == 1:
            both[0].refresh_masters()
    give_exact_grads(params, twins, False, len(writes))
    for optimizer in both:
        optimizer.step()
    assert_same_bits(params, twins)
    assert_same_bits(*(optimizer.master_params() for optimizer in both))


def a_gradient_that_is_still_to_be_summed_is_summed_first(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    # The norm of the last is none that a float32 holds.
    for placement, size in ((Replicate(), 1.0), (Shard(0), 1.0), (Shard(0), 2.0**200)):
        value = torch.randn(4, 3, dtype=F32 if size == 1.0 else F64)
        param, twin = sharded([value], [(mesh, [placement])])[0], Parameter(value.clone())
        part = torch.full((4, 3), (1.0 + rank) * size, dtype=value.dtype)
        param.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        twin.grad = torch.full((4, 3), 3.0 * size, dtype=value.dtype)
        both = [ours("SGD")([p], lr=0.5, max_grad_norm=1.0) for p in (param, twin)]
        for optimizer in both:
            optimizer.step()
        assert same_bits(both[0].grad_norm, both[1].grad_norm)
        assert same_bits(whole(param.detach()), twin.detach())


CLIPPING = {"lr": 0.05, "max_grad_norm": 0.1}


def fully_sharded(module: Any) -> Any:
    """Shards on the CPU, where gloo is; FSDP alone would take a GPU that torch was built for."""
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def clip_apart(model: Any, optimizer: Any) -> Tensor:
    return amp_ext.clip_grad_norm_(model.parameters(), 0.1)


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
            if make is ours("AdamW") and not lacks_some:
                assert optimizer.inspect(scaler).skipped == (step == BAD_STEP)
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


def ranks_with_different_scales_skip_and_say_so(rank: int) -> None:
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
                    if wanted == 0.0:
                        scaler.update()
                        continue
                    message = "the scale differs between the ranks of process_group, so all"
                    with pytest.raises(RuntimeError, match=f"^GradScaler: {message} ranks skipped"):
                        scaler.update()
                    assert scaler.last_step_skipped(optimizer) is True
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


def fails_on_one_rank(rank: int) -> None:
    assert rank != BAD_RANK
    dist.barrier()


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
