"""What ranks check of sharded parameters: steps, parts, norms and files."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from harness.edge_shapes import BF16, F16, F32, F64
from harness.optimizer_cases import FEW_OPTIMIZERS, optimizers_named, ours, take_step
from harness.ranks import (
    BAD_STEP,
    STEPS,
    assert_agreed,
    assert_same_bits,
    collectives,
    small_scaler,
    whole,
)
from harness.reference import same_bits
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

import amp_ext
from amp_ext.sharding import local_tensor

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
    for state_dtype, name in itertools.product(("8bit-bf16", "8bit"), ("AdamW", "Lion")):
        params = [
            Parameter(distribute_tensor(values, line, [Shard(1)])),
            Parameter(distribute_tensor(values, line, [Shard(0)])),
        ]
        alone = Parameter(values.clone())
        both = [ours(name)([param], state_dtype=state_dtype) for param in params]
        exact = ours(name)([alone])
        for step in range(STEPS):
            for param in params:
                give_exact_grads([param], [alone], False, step)
            for optimizer in (*both, exact):
                optimizer.step()
        for param in params:
            error = whole(param.detach()) - alone.detach()
            assert error.norm() <= 0.1 * (alone.detach() - values).norm()
        columns, rows = (o.state[p] for o, p in zip(both, params, strict=True))
        moment = "exp_avg" if name == "Lion" else "exp_avg_sq"
        assert columns[moment].dtype == BF16
        assert (moment in rows) == (name == "AdamW" and state_dtype == "8bit-bf16")
        # From rows to columns the codes become numbers, and back.
        for saver, loader in (both, both[::-1]):
            before = amp_ext.optim.float32_state_dict(saver)["state"][0]
            loader.load_state_dict(saver.state_dict())
            after = amp_ext.optim.float32_state_dict(loader)["state"][0]
            for key, value in before.items():
                error = whole(after[key]) - whole(value)
                assert error.norm() <= 0.03 * whole(value).norm(), key


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


def a_write_to_a_sharded_parameter_reaches_its_master(rank: int) -> None:
    values = [torch.randn(5, 3).to(BF16), torch.randn(1, 2).to(BF16)]
    params = sharded(values, [layouts()[0][0]] * 2)
    twins = [Parameter(value.clone()) for value in values]
    both = [ours("SGD")(side, lr=0.5) for side in (params, twins)]
    for step in range(4):
        give_exact_grads(params, twins, False, step)
        for optimizer in both:
            optimizer.step()
        with torch.no_grad():
            for param in (*params, *twins):
                (local_tensor(param) if step == 1 else param).mul_(0.75)
        if step == 1:
            both[0].refresh_masters()
    assert_same_bits(params, twins)


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
