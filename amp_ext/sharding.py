"""Parameters that are sharded over ranks: local shards, and reductions over all ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext.amp_protocol import to_device
from amp_ext.params import check_params, params_of


def is_dtensor(tensor: Any) -> bool:
    """Returns True for a DTensor. Does not import ``torch.distributed.tensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_dtensors(tensors: Iterable[Any]) -> bool:
    """Returns True if one of the tensors is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    # A model has many tensors of few classes.
    return any(issubclass(each, module.DTensor) for each in set(map(type, tensors)))


def is_flattened(param: Tensor) -> bool:
    """Returns True for a parameter that FSDP1 has flattened, and for the flat parameter itself."""
    return hasattr(param, "_fsdp_flattened")


def is_flat(param: Tensor) -> bool:
    """Returns True for a flat parameter, as FSDP1 makes them without ``use_orig_params=True``."""
    return getattr(param, "_is_flat_param", False)


def local_tensor(tensor: Any) -> Tensor:
    """Returns this rank's shard of a DTensor, without a copy; returns other tensors unchanged."""
    if not is_dtensor(tensor):
        return tensor
    local = tensor._local_tensor
    # An asynchronous collective may still be computing the shard.
    return local.wait() if hasattr(local, "wait") else local


def is_over_rows(param: Any) -> bool:
    """Returns True if each rank holds all or consecutive rows (dimension 0) of a parameter."""
    if not is_dtensor(param):
        return True
    from torch.distributed.tensor import Shard

    # Subclasses of Shard are excluded, because they place the shards in another order.
    return all(p.is_replicate() or (type(p) is Shard and p.dim == 0) for p in param.placements)


def laid_out_as(
    param: Any,
    local: Tensor,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Returns a local shard as a DTensor if its parameter is a DTensor, else unchanged.

    Args:
        param: The parameter, whose mesh and placements the DTensor gets.
        local: This rank's shard.
        shape: Shape of the full tensor; None for the shape of the parameter.
        strides: Strides of the full tensor; None for the strides of the parameter.
    """
    if not is_dtensor(param):
        return local
    laid_out = type(param).from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=torch.Size(param.shape if shape is None else shape),
        stride=tuple(param.stride() if strides is None else strides),
    )
    # from_local() moves a shard to the mesh's type of device, but an offloaded shard stays on the
    # CPU.
    return laid_out if local_tensor(laid_out).device == local.device else laid_out.to(local.device)


def global_offset(param: Any) -> int:
    """Returns the index of this rank's first element, in the memory order of the full tensor.

    Shards must be contiguous in the full tensor: only dimension 0 is sharded, and it is outermost
    in memory. For other shards, and for replicated tensors, the result is 0.
    """
    mesh, placements = param.device_mesh, param.placements
    coordinate = mesh.get_coordinate()
    strides = [stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1]
    is_outermost = not strides or param.stride(0) >= max(strides)
    if coordinate is None or not param.numel() or not is_over_rows(param) or not is_outermost:
        return 0
    begin, rows = 0, param.shape[0] if param.ndim else 1
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        part = -(-rows // mesh.size(dim))  # the last ranks may have fewer rows, or none
        skipped = min(part * coordinate[dim], rows)
        begin, rows = begin + skipped, min(part, rows - skipped)
    return begin * (param.numel() // param.shape[0]) if begin else 0


@torch.no_grad()
def local_grad(param: Any, name: str) -> Tensor | None:
    """Returns this rank's shard of a parameter's gradient, or None if there is no gradient.

    A gradient with other placements than its parameter, for example a sum that is not yet reduced,
    is first redistributed and stored in ``param.grad``. All ranks must then call this together.

    Args:
        param: The parameter.
        name: Name of the parameter, for errors.

    Raises:
        TypeError: If the parameter is a DTensor but its gradient is not.
    """
    grad = param.grad
    if grad is None or not is_dtensor(param):
        return grad
    if not is_dtensor(grad):
        raise TypeError(f"{name} must have a DTensor as its gradient, got {type(grad).__name__}")
    if grad.placements != param.placements or grad.device_mesh != param.device_mesh:
        param.grad = grad = grad.redistribute(param.device_mesh, param.placements)
    return local_tensor(grad)


class ShardedOver:
    """The process groups over whose ranks the parameters of one optimizer are sharded.

    Parameters that are sharded over the same groups form a partition. Sums of a partition are
    reduced over exactly these groups, so that replicated elements don't count twice. Partition 0
    contains the parameters that are not sharded. The order of the groups is the same on every rank.
    """

    def __init__(self) -> None:
        """Starts without parameters."""
        self._groups: dict[str, Any] = {}
        self._partitions: dict[frozenset[str], int] = {frozenset(): 0}
        self._layouts: dict[Any, int] = {}
        self._device: torch.device | None = None

    def __bool__(self) -> bool:
        """Returns True if a parameter is sharded, so that there is something to reduce."""
        return bool(self._groups)

    def add(self, param: Any, name: str) -> int:
        """Registers a parameter and returns the index of its partition.

        Args:
            param: The parameter.
            name: Name of the parameter, for errors.

        Raises:
            ValueError: If a DTensor is neither sharded nor replicated.
        """
        if not is_dtensor(param):
            return 0
        mesh, placements = param.device_mesh, param.placements
        index = self._layouts.get((mesh, placements))
        if index is None:
            if any(placement.is_partial() for placement in placements):
                raise ValueError(f"{name} must be sharded or replicated, got {placements}")
            names = set()
            for dim, placement in enumerate(placements):
                if placement.is_replicate() or mesh.size(dim) == 1 or mesh.get_coordinate() is None:
                    continue
                group = mesh.get_group(dim)
                names.add(group.group_name)
                self._groups[group.group_name] = group
                local = local_tensor(param)
                if self._device is None:
                    is_there = local.device.type == mesh.device_type
                    self._device = local.device if is_there else torch.device(mesh.device_type)
            index = self._partitions.setdefault(frozenset(names), len(self._partitions))
            self._layouts[mesh, placements] = index
        return index

    @torch.no_grad()
    def all_reduce(
        self,
        found_inf: Tensor,
        findings: Collection[Tensor],
        sums: Iterable[tuple[int, Tensor]] = (),
        *,
        sums_squares: bool = False,
    ) -> tuple[dict[torch.device, Tensor], Tensor]:
        """Reduces flags and sums of squares over all ranks, in one collective for each group.

        Args:
            found_inf: The flag before this scan: one number, 0 or 1.
            findings: Flags of this scan, one number for each device of this rank. May be empty.
            sums: Pairs of a partition and its sum of squares, one float64 each. May be empty.
            sums_squares: True if the result needs ``sums``. Must be the same on all ranks.

        Returns:
            A dict from each device of ``findings`` (from the device of ``found_inf`` if
            ``findings`` is empty) to one float32, 1 if any rank has found inf or NaN. And one
            float64 on the mesh's device, the sum of squares over all partitions.

        Raises:
            RuntimeError: If a collective fails, for example because a rank has died.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        values = [zero] * (1 + (len(self._partitions) if sums_squares else 0))
        for flag in (found_inf, *findings):
            values[0] = values[0] + to_device(flag.reshape(()), zero.device)
        for index, sum_of_squares in sums if sums_squares else ():
            values[1 + index] = values[1 + index] + to_device(sum_of_squares, zero.device)
        for name, group in self._groups.items():
            members = [index for names, index in self._partitions.items() if name in names]
            chosen = [0, *(1 + index for index in members if sums_squares)]
            packed = torch.stack([values[index] for index in chosen])
            _all_reduce(packed, torch.distributed.ReduceOp.SUM, group)
            for index, value in zip(chosen, packed.unbind(), strict=True):
                values[index] = value
        everywhere = values[0].clamp(max=1.0).float()
        devices = [flag.device for flag in findings] or [found_inf.device]
        flags = {device: to_device(everywhere, device) for device in devices}
        return flags, sum(values[1:], zero)

    @torch.no_grad()
    def norms_of_whole(self, params: Iterable[Tensor], norms: Tensor) -> Tensor:
        """Returns the norm of each whole gradient, in one collective for each group.

        Args:
            params: All parameters of the optimizer, which have been added.
            norms: Norms of this rank's gradients and shards of gradients, float32 of shape
                ``[params]``, NaN where this rank has none.

        Raises:
            RuntimeError: If a collective fails, for example because a rank has died.
        """
        names_of = list(self._partitions)
        partitions = [names_of[self.add(param, "")] for param in params]
        # Two rows: the squares, and the number of shards with a gradient.
        squares, is_absent = norms.double().square(), norms.isnan()
        found = torch.stack([squares.where(~is_absent, 0.0), (~is_absent).double()])
        found = found.to(self._device)
        for name, group in self._groups.items():
            members = [row for row, names in enumerate(partitions) if name in names]
            shards = found[:, members]
            _all_reduce(shards, torch.distributed.ReduceOp.SUM, group)
            found[:, members] = shards
        squares, shards = found.to(norms.device).unbind()
        return squares.sqrt().where(shards != 0, math.nan).float()


def local_grads(optimizer: Any, operation: str) -> tuple[list[Tensor | None], ShardedOver]:
    """Returns this rank's shard of the gradient of every parameter of an optimizer.

    Args:
        optimizer: The optimizer, or a wrapper that delegates to it.
        operation: Start of errors.

    Returns:
        The gradients, None where a parameter has none; and the process groups over which parameters
        are sharded.

    Raises:
        TypeError, ValueError: If a group has no list of parameters, or a DTensor is neither sharded
            nor replicated.
    """
    grads: list[Tensor | None] = []
    sharded_over = ShardedOver()
    for group_index, group in enumerate(optimizer.param_groups):
        check_params(group, f"{operation}: %s of group {group_index}")
        for index, param in enumerate(group["params"]):
            if is_dtensor(param):
                name = f"{operation}: param of group {group_index}, param {index}"
                sharded_over.add(param, name)
                grads.append(local_grad(param, name))
            else:
                grads.append(param.grad)
    return grads, sharded_over


def check_process_group(group: Any, operation: str = "GradScaler") -> None:
    """Raises TypeError unless an object is None or a group that contains this process.

    Args:
        group: The object.
        operation: Start of the error.
    """
    if group is None:
        return
    if not (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        raise TypeError(
            f"{operation}: process_group must be None or a torch.distributed.ProcessGroup that "
            f"this process is a member of, got {group!r}"
        )


def check_guard(optimizer: Any) -> None:
    """Refuses a norm guard with which the ranks of a scaler could skip different steps.

    Args:
        optimizer: The optimizer that the scaler is about to step.

    Raises:
        RuntimeError: If the guard has no process group and no parameter is sharded.
    """
    guard = getattr(optimizer, "norm_guard", None)
    if guard is None or guard.process_group is not None:
        return
    if not any(map(is_dtensor, params_of(optimizer))):  # ranks share the norm of sharded parameters
        raise RuntimeError(
            "GradScaler.step: norm_guard of the optimizer has no process_group, so ranks could "
            "skip different steps. Set norm_guard.process_group to the scaler's process_group."
        )


@torch.no_grad()
def all_reduce_flags(
    flags: Mapping[torch.device, Tensor], scale: Tensor, group: Any
) -> dict[torch.device, Tensor]:
    """Reduces ``found_inf`` flags over all ranks of a group, in one collective.

    Args:
        flags: Maps each device of this rank to one number. May be empty.
        scale: The loss scale, one number, which should be the same on all ranks.
        group: The process group.

    Returns:
        A dict from each device of ``flags`` (from the device of ``scale`` if ``flags`` is empty) to
        one float32, the largest flag of all ranks, at least 1 if their scales differ.

    Raises:
        RuntimeError: If the collective fails, for example because a rank has died.
    """
    collective_device = _collective_device(scale.device, group)
    worst = torch.zeros((), dtype=torch.float32, device=collective_device)
    for flag in flags.values():
        worst = torch.maximum(worst, to_device(flag.reshape(()), collective_device).to(worst))
    largest = to_device(scale.detach().reshape(()), collective_device).to(worst)
    packed = torch.stack([worst, largest, -largest])
    _all_reduce(packed, torch.distributed.ReduceOp.MAX, group)
    worst, largest, negative_of_least = packed.unbind()
    worst = torch.maximum(worst, (largest != -negative_of_least).float())
    return {device: to_device(worst, device).clone() for device in flags or [scale.device]}


@torch.no_grad()
def sum_over_ranks(value: Tensor, group: Any) -> Tensor:
    """Returns the sum of a number over the ranks of a group, in one collective.

    Args:
        value: A tensor of one element.
        group: The process group.

    Raises:
        RuntimeError: If the collective fails, for example because a rank has died.
    """
    total = to_device(value, _collective_device(value.device, group)).clone()
    _all_reduce(total, torch.distributed.ReduceOp.SUM, group)
    return to_device(total, value.device)


def _collective_device(device: torch.device, group: Any) -> torch.device:
    """Returns the device for a collective: the given one, or one that the group supports."""
    taken = [kind.type for kind in group._device_types]
    return device if device.type in taken or not taken else torch.device(taken[0])


def _all_reduce(values: Tensor, operation: Any, group: Any) -> None:
    try:
        torch.distributed.all_reduce(values, operation, group)
    except RuntimeError as error:
        ranks = torch.distributed.get_process_group_ranks(group)
        listed = f"{ranks[0]} … {ranks[-1]} ({len(ranks)})" if len(ranks) > 8 else str(ranks)
        raise RuntimeError(
            f"amp_ext: the all-reduce over ranks {listed} failed. Check that all of "
            f"these ranks run and step the same optimizers. The error was: {error}"
        ) from error
