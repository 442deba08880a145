"""Shows the effect of the coming step on each parameter, as a table and a plot."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.amp_protocol import sum_of_flags
from amp_ext.nonfinite import names_of_params
from amp_ext.optim.amp_context import context_from_attributes, context_from_scaler
from amp_ext.program import format_table

__all__ = ["Inspection", "ParamInspection", "inspect_before_step", "inspect_step"]

# Indices into the sums of a parameter: the largest update, and the number of elements (NaN without
# a gradient).
_LARGEST, _NUMEL = 0, 1


@dataclasses.dataclass(frozen=True)
class ParamInspection:
    """The effect of a step on one parameter, or on its float32 master if it has one.

    Attributes:
        norm: Norm of the parameter or master before the step.
        update_norm: Norm of the update that the step adds.
        ratio: ``update_norm / norm``; 0 without an update.
        largest_update: Largest magnitude of an element of the update.
        moment_norms: Norm of each buffer after the step, keyed by name, such as "exp_avg".
        unmoved: Fraction of the parameter's elements, 0 to 1, whose stored value the step does not
            change.
        unmoved_master: The same fraction for the master; None without a master.
    """

    norm: float
    update_norm: float
    ratio: float
    largest_update: float
    moment_norms: dict[str, float]
    unmoved: float
    unmoved_master: float | None


class Inspection:
    """The effect of a step on each parameter that has a gradient. ``print`` shows it as a table.

    The values stay on the device until they are first read, which waits for a GPU once.
    """

    def __init__(self, inspected: ops.InspectedStep, names: Mapping[tuple[int, int], str]) -> None:
        """Stores the results of a trial step.

        Args:
            inspected: Results from the compiled module, combined over all ranks.
            names: Maps (index of the group, index in the group) to the name of the parameter.
        """
        self._inspected = inspected
        self._names = names

    @cached_property
    def _numbers(self) -> tuple[bool, dict[str, ParamInspection]]:
        skipped, params = self._inspected.read()
        return skipped, {self._names[placed]: ParamInspection(*it) for placed, it in params}

    @property
    def skipped(self) -> bool:
        """True if an overflow or a guard makes the step write nothing; all updates are 0 then."""
        return self._numbers[0]

    @property
    def params(self) -> dict[str, ParamInspection]:
        """Maps the name of each parameter that has a gradient to the effect of the step on it.

        The names are those of ``named_grad_norms()``, in the order of the groups.
        """
        return self._numbers[1]

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict of plain numbers: "skipped", and in "params" a dict for each parameter."""
        params = {name: dataclasses.asdict(param) for name, param in self.params.items()}
        return {"skipped": self.skipped, "params": params}

    def __getstate__(self) -> dict[str, Any]:
        """Returns the values only, which is all that a pickle needs."""
        return {"_numbers": self._numbers}

    def __repr__(self) -> str:
        """Returns the table, for notebooks."""
        return str(self)

    def __str__(self) -> str:
        """Returns the table."""
        moments = dict.fromkeys(
            name for param in self.params.values() for name in param.moment_norms
        )
        table = [["", "norm", "update", "ratio", "largest", *moments, "unmoved"]]
        has_masters = any(param.unmoved_master is not None for param in self.params.values())
        if has_masters:
            table[0].append("of master")
        for name, param in self.params.items():
            norms: list[float | None] = [param.norm, param.update_norm, param.ratio]
            norms += [param.largest_update, *(param.moment_norms.get(moment) for moment in moments)]
            shares = [param.unmoved] + [param.unmoved_master] * has_masters
            texts = ["" if number is None else f"{number:.3g}" for number in norms]
            texts += ["" if share is None else f"{share:.1%}" for share in shares]
            table.append([name, *texts])
        skipped = "The step is skipped, after an overflow or by a guard.\n" * self.skipped
        return skipped + format_table(table)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots for each parameter the norms of weights and update, their ratio, and ``unmoved``.

        The norm axis is logarithmic, so that updates of 0 are not shown.

        Args:
            path: File of the picture, such as "updates.png"; its extension sets the format.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        names = list(self.params)
        placed_params = range(len(names))
        figure = Figure(figsize=(9, max(2.5, 1.5 + 0.22 * len(names))), layout="constrained")
        of_norms, of_shares = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        columns = {
            "norm": ("weight", "#777777", "s"),
            "update_norm": ("update", "#1f77b4", "o"),
            "ratio": ("update / weight", "#d62728", "x"),
        }
        for field, (label, color, marker) in columns.items():
            values = [getattr(param, field) for param in self.params.values()]
            of_norms.plot(values, placed_params, marker, color=color, label=label, markersize=5)
        of_norms.set(
            xscale="log", yticks=placed_params, yticklabels=names, ylim=(len(names) - 0.5, -0.5)
        )
        of_norms.set_title("Norms" + (": the step is skipped" if self.skipped else ""), fontsize=10)
        unmoved = [100 * param.unmoved for param in self.params.values()]
        of_shares.barh(placed_params, unmoved, color="#ff7f0e", height=0.6)
        of_shares.set(xlim=(0, 100))
        of_shares.set_title("Elements that stay as they are, %", fontsize=10)
        for axes in (of_norms, of_shares):
            axes.grid(axis="x", color="#dddddd", linewidth=0.5)
            axes.set_axisbelow(True)
        figure.legend(fontsize=8, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=120)


def _combined(sums: Tensor) -> Tensor:
    """Combines the sums of all ranks into the sums of the unsharded parameters.

    Args:
        sums: Sums on each rank, float64 of shape ``[ranks, params, sums]``, NaN where a rank has no
            gradient.
    """
    absent = sums[:, :, _NUMEL].isnan()
    present = sums.masked_fill(absent[:, :, None], 0.0)
    whole = present.sum(dim=0)
    whole[:, _LARGEST] = present[:, :, _LARGEST].amax(dim=0)
    whole[absent.all(dim=0)] = torch.nan
    return whole


def inspect_before_step(optimizer: Any, scaler: Any) -> Inspection:
    """Returns what the coming step would do, with the scale and the flags of a scaler, if any.

    Args:
        optimizer: One of :mod:`amp_ext.optim`.
        scaler: The gradient scaler that will step it, ours or torch's, or None.
    """
    if scaler is None:
        context = context_from_attributes(optimizer)
        return inspect_step(optimizer, context.grad_scale, context.found_inf)
    context = context_from_scaler(scaler, optimizer, f"{type(optimizer).__name__}.inspect")
    found_inf, sum_of_squares = context.found_inf, None
    if found_inf is None and context.grad_scale is not None:
        scan = optimizer._scan_without_recording(context.grad_scale)
        flags = dict(scan.found_infs)
        if hasattr(scaler, "flags_of_all_ranks"):
            flags = scaler.flags_of_all_ranks(flags)
        found_inf = sum_of_flags(flags, context.grad_scale.device)
        sum_of_squares = scan.sum_of_squares
    return inspect_step(optimizer, context.grad_scale, found_inf, sum_of_squares)


def inspect_step(
    optimizer: Any,
    grad_scale: Tensor | None,
    found_inf: Tensor | int | None,
    sum_of_squares: Tensor | None = None,
    is_in_step: bool = False,
) -> Inspection:
    """Returns what a step with the given loss scale and flags would do.

    Args:
        optimizer: One of :mod:`amp_ext.optim`.
        grad_scale: One float32, the scale that the gradients carry, or None.
        found_inf: One float32, not 0 if the step is skipped; or None. An int if no parameter had a
            gradient when the scaler scanned them.
        sum_of_squares: One float64, the sum over the gradients of all ranks, or None.
        is_in_step: True if the step itself calls this, because of ``inspect_next()``.
    """
    plan = optimizer._plan
    if not isinstance(found_inf, Tensor):
        found_inf = None
    arguments = grad_scale, found_inf
    inspect, found = plan.compiled.inspect, plan.needs_global_norm
    if not plan.guard_lacks_sum(sum_of_squares):
        found = optimizer._call_plan("inspect", inspect, *arguments, sum_of_squares, is_in_step)
    if found is plan.needs_global_norm:
        sum_of_squares = optimizer._scan_without_recording(None).sum_of_squares
        found = optimizer._call_plan("inspect", inspect, *arguments, sum_of_squares, is_in_step)
    if plan.sharded_over:
        found.sums = plan.sharded_over.combine(plan.params, found.sums, _combined)
    indices = [
        (group_index, index)
        for group_index, group in enumerate(optimizer.param_groups)
        for index in range(len(group["params"]))
    ]
    return Inspection(found, dict(zip(indices, names_of_params(optimizer), strict=True)))
