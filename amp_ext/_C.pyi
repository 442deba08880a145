# Types of the compiled module. amp_ext.ops documents the functions.
from collections.abc import Sequence
from typing import Any

from torch import Tensor

class BufferDescription:
    name: str
    role: str
    dither_stride: int  # Weyl stride, see csrc/formats/dither.h; 0: the buffer is never dithered
    code: str  # name of its 8-bit format, such as "q8h"; empty if it has none
    option: str | None  # option that a group must set to have the buffer; None: every group has it

class FormulaNames:  # names of one optimizer
    operation: str  # of the operation over lists, such as "adam_"
    fields: tuple[str, ...]  # of the hyperparameters
    buffers: tuple[BufferDescription, ...]

class Shard:  # what a step needs to know of a parameter that may be a DTensor
    def __init__(
        self,
        partition: int,  # which sums of squares are added over the same ranks
        global_offset: int,  # of the local shard's first element in the full tensor
        is_dtensor: bool,
        has_blocks: bool,  # whether moments of the full tensor can be quantized in blocks
        grad: Tensor | None,
        version: int,  # of the DTensor; its shard has another one
        grad_version: int,
    ) -> None: ...

class CompiledStepper:  # half of amp_ext.optim.stepper.Stepper, see csrc/python/stepper.h
    grad_norm: Tensor | None  # [] float32, norm of all gradients at the last step
    step_applied: Tensor | None  # [] float32, 0 if the last step was skipped; None if not tracked
    skipped_matrices: Tensor | None  # [] int64, matrices that Muon left as they were; or None
    tracks_step_applied: bool
    progress: str  # how many parameters a failed step has updated: "3 of 8 parameters"; or ""
    def __init__(self, optimizer: str, hyperparameters: str) -> None: ...
    # Returns how many parameters had a gradient. Or, if nothing was done, a list: the places
    # (group, index) of parameters whose states must be completed first; an empty list if options or
    # parameters can't be read.
    def step(
        self,
        state: dict[Any, Any],
        param_groups: list[dict[str, Any]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        max_norm: Tensor | None,
        is_of_scaler: bool,
        params: Sequence[Tensor] | None = None,
        shards: Sequence[Shard] = (),
        trusts_states: bool = False,
    ) -> int | list[tuple[int, int]]: ...
    # Returns None if options or parameters can't be read.
    def scan(
        self,
        param_groups: list[dict[str, Any]],
        params: Sequence[Tensor] | None,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        sums_squares: bool,
        shards: Sequence[Shard] = (),
    ) -> list[tuple[Tensor, Tensor, int, Tensor | None]] | None: ...
    def gradients_were_written(
        self, param_groups: list[dict[str, Any]], shards: Sequence[Shard] = ()
    ) -> bool: ...
    def check_grads(
        self,
        param_groups: list[dict[str, Any]],
        is_of_scaler: bool,
        shards: Sequence[Shard] = (),
        params: Sequence[Tensor] | None = None,
    ) -> None: ...
    def mark_scaled(
        self, param_groups: list[dict[str, Any]], shards: Sequence[Shard] = ()
    ) -> None: ...
    def forget_scan(self) -> None: ...
    def forget_masters(self) -> None: ...  # to which values float32 masters were rounded

# Returns how many buffers a group has, and whether the formula and dithering count steps.
def state_needs(hyperparameters: str, group: dict[str, Any]) -> tuple[int, bool, bool]: ...

# Returns (found_inf, first_nonfinite) for each device, or None if kernels can't read one.
def scan_grads(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    found_inf: Tensor,
    scale: Tensor | None,  # counts as an overflow if it has no finite inverse
    inv_scale: Tensor | None,  # multiplies the gradients; then `scale` is not read
    allow_fp16: bool,
) -> list[tuple[Tensor, Tensor]] | None: ...

# Returns what identifies the version counter of a tensor, which views share.
def version_counter_of(tensor: Tensor) -> int: ...

# Stands for the descriptions of optimizers and all functions, whose signatures amp_ext.ops has.
# Only update_scale_ takes more arguments here, see csrc/python/scaler.cpp.
def __getattr__(name: str) -> Any: ...
