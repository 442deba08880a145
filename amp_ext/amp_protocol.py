"""What a gradient scaler and an optimizer that unscales inside its own step tell each other.

As in torch, the scaler sets the attributes ``grad_scale`` and ``found_inf`` of the optimizer, calls
its ``step`` and deletes them. Before that, the optimizer scans its own gradients for the scaler,
and keeps the result until its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: The error of torch's scaler and ours for a ``step`` without a scan.
NOTHING_WAS_SCANNED = "No inf checks were recorded for this optimizer."
#: The error with which torch's scaler refuses ``closure=``.
NO_CLOSURE = "Closure use is not currently supported if GradScaler is enabled."


@dataclass(slots=True)
class ScanResult:
    """The result of one scan of all gradients of an optimizer for inf and NaN.

    Attributes:
        found_infs: Maps each device with gradients to one float32: not 0 if a gradient there has
            inf or NaN.
        first_nonfinites: Maps each of these devices to one int64, the index of the first parameter
            whose gradient has inf or NaN. ``GradScaler.update`` reads and resets these indices.
        sum_of_squares: One float64, the sum of squares of all scaled gradients over all ranks. None
            if no norm is needed, or if the compiled stepper has kept the sum: without sharded
            parameters and without a norm guard.
        counts_tensors: True if each flag is the number of parameters that were skipped, each for
            its own gradient, because the gradients were released.
    """

    found_infs: dict[torch.device, Tensor]
    first_nonfinites: Mapping[torch.device, Tensor]
    sum_of_squares: Tensor | None = None
    counts_tensors: bool = False


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device. A copy to the CPU is synchronous and can be read at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def sum_of_flags(flags: Mapping[torch.device, Tensor], device: torch.device) -> Tensor | int:
    """Returns the sum of all flags, or the int 0 if there are none, as in torch.

    Args:
        flags: Maps each device to one float32.
        device: The device of the sum.
    """
    if not flags:
        return 0
    first, *others = flags.values()
    total = to_device(first, device)
    for flag in others:
        total = total + to_device(flag, device)
    return total
