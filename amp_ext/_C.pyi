# Types of the compiled module; what the functions do stands in amp_ext.ops.
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

class OptionDescription:  # of an option of the groups of an optimizer
    name: str
    type: str  # a key of the types in amp_ext.optim.options
    wanted: str  # what it must be, in words, its range aside
    count: int  # of its numbers, if it is a tuple of them
    on_load: str  # "required", "off if missing", "kept if missing" or "kept"
    is_read: bool  # by steps

class BufferDescription:
    name: str
    role: str
    dither_stride: int  # 0: it is never dithered
    code: str  # of 8 bits, that it may take, as "q8h"; empty: none

class OptimizerDescription:
    operation: str  # over lists
    fields: tuple[str, ...]  # its hyperparameters
    buffers: tuple[BufferDescription, ...]
    options: tuple[OptionDescription, ...]
    # What messages say, with "%s" for the name of an option; and what makes the text of a value.
    def check_options(
        self, options: dict[str, Any], where: str, shown: Callable[[Any], str]
    ) -> None: ...
    def check_as_torch(self, defaults: dict[str, Any], shown: Callable[[Any], str]) -> None: ...
    def state_spec(self, optimizer: str, group: dict[str, Any]) -> StateSpec: ...

class ScaledIteration:
    needs_reset: bool
    def is_of(self, optimizer: Any) -> bool: ...
    def check_needs_no_reset(self, operation: str) -> None: ...
    def check_unscaled(self) -> None: ...
    def on_loss_scaled(self, has_stepped: bool) -> None: ...
    def forget_unscaling(self) -> None: ...

class LossScale:
    warned_of_scale: bool
    def __init__(self, name_of_param: Callable[[Any, int], str]) -> None: ...
    def make(self, attributes: dict[str, Any], device: torch.device) -> None: ...
    def load(
        self,
        attributes: dict[str, Any],
        state_dict: dict[str, Any],
        checked: Callable[[str, Any], float],
    ) -> None: ...
    def start_iteration(
        self, operation: str, attributes: dict[str, Any], state: dict[str, Any], optimizer: Any
    ) -> Tensor | None: ...
    def scan(
        self,
        iteration: ScaledIteration,
        grads: Sequence[Tensor | None],
        found_inf: Tensor,
        inv_scale: Tensor | None,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor] | None: ...
    def note_different_scales(
        self, state: dict[str, Any], flags: dict[torch.device, Tensor], differ: Tensor
    ) -> None: ...
    def update(
        self,
        attributes: dict[str, Any],
        new_scale: float | Tensor | None,
        next_states: dict[int, dict[str, Any]],
    ) -> tuple[str, str, bool] | None: ...
    def must_warn_of(self, value: float) -> bool: ...
    @staticmethod
    def warning_of(value: str) -> str: ...
    def check_scales(self) -> None: ...
    def step_skipped(self, optimizer: Any) -> bool | None: ...
    def stats(
        self, initial_scale: float
    ) -> tuple[int, int, int, int, float, float, float, str | None]: ...
    def history(self) -> tuple[int, list[float], list[bool]]: ...

class NormStatistics:  # by which a guard judges norms
    def __init__(
        self,
        sigma_factor: float,
        window: int,
        warmup_steps: int,
        max_norm: float,
        patience: int,
        clips: bool,
    ) -> None: ...
    def state(self, wait: bool) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def limits(self, wait: bool) -> tuple[float, float]: ...  # deviation, limit
    def last_step_skipped(self, wait: bool) -> bool: ...
    def history(self, wait: bool) -> tuple[int, list[float], list[bool]]: ...
    def must_warn(self) -> bool: ...
    @staticmethod
    def warning() -> str: ...

class InspectedStep:  # what the trial of a step has found
    sums: Tensor  # [params, sums] float64; those of rank's parts can be combined
    # Whether the step is skipped; and of each parameter with a gradient its place, (group, index),
    # and its numbers in the order of amp_ext.optim.inspection.ParamInspection.
    def read(self) -> tuple[bool, list[tuple[tuple[int, int], tuple[Any, ...]]]]: ...

class Plan:  # what an optimizer knows of its parameters and states, as long as it lives
    grad_norm: Tensor | None  # of all gradients at the last step
    grad_norms: Tensor | None  # of each
    step_applied: Tensor | None  # whether the last step was taken, while landings are followed
    failure: str  # how far the step came that failed; empty if none has
    note_of_failure: str  # with what to do
    def __init__(
        self,
        optimizer: str,
        description: OptimizerDescription,
        before: Plan | None,
        failure: str,
    ) -> None: ...
    def forget(self) -> None: ...
    def average(
        self, step_plan: Any, optimizer: Any, name: str, averages: WeightAverages
    ) -> bool | None: ...
    def swap_back(self, averages: WeightAverages) -> None: ...
    def check_not_swapped_in(self, operation: str) -> None: ...
    def track_step_applied(self) -> None: ...
    def set_guard(self, guard: NormStatistics | None) -> None: ...
    tracks_grad_norms: bool
    def wants_norm(self, max_grad_norm: float | None) -> bool: ...
    # For each parameter its group, its index there, itself, its partition if it is sharded, and
    # where its first element stands in the whole.
    def register_params(
        self,
        optimizer: Any,
        operation: str,
        rows: Sequence[tuple[int, int, Tensor, int | None, int]],
    ) -> None: ...
    # All of these None if the parameters are to be listed anew.
    def scan(
        self, step_plan: Any, optimizer: Any, found_inf: Tensor, grad_scale: Tensor | None
    ) -> list[tuple[Tensor, Tensor, int, Tensor | None, Tensor | None]] | None: ...
    def scan_without_recording(
        self, step_plan: Any, optimizer: Any, grad_scale: Tensor | None
    ) -> list[tuple[Tensor, None, int, Tensor | None, Tensor | None]] | None: ...
    def inspect(  # False if it wants the sum of squares
        self,
        step_plan: Any,
        optimizer: Any,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        is_in_step: bool,
    ) -> InspectedStep | bool | None: ...
    def gradients_were_written(self, step_plan: Any, optimizer: Any) -> bool | None: ...
    def step(  # False if it wants the sums of squares
        self,
        step_plan: Any,
        optimizer: Any,
        amp_context: Any,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        squares_of_params: Tensor | None,
    ) -> bool | None: ...

class WeightAverages:  # of the parameters of an optimizer
    averages: list[Tensor]
    counters: Tensor | None  # steps that have landed, averages taken
    listings: int  # of parameters that differ from those before
    joined: list[int]  # of these since the last step, the indices
    def __init__(
        self, decay: float | None, every: int, warmup: bool, dtype: torch.dtype
    ) -> None: ...
    def check_not_swapped(self, operation: str) -> None: ...
    def load(
        self,
        operation: str,
        averages: Sequence[Tensor],
        steps: int,
        n_averaged: int,
        joined: Sequence[int],
    ) -> None: ...

class ParamRef:  # a parameter, and where it is listed
    def __init__(
        self, unsharded: Tensor, local: Tensor, group: int, index: int, shards_whole_rows: bool
    ) -> None: ...

class StateSpec:  # what a group lets its parameters keep
    optimizer: str
    names: list[str]
    keeps_step: bool
    master_weights: bool | str
    state_dtype: str | None
    def is_key(self, key: Any) -> bool: ...
    def master_key(self, param: ParamRef) -> str: ...
    def has_codes(self, param: ParamRef) -> bool: ...
    def complete_state(self, param: ParamRef, state: dict[str, Tensor]) -> dict[str, Tensor]: ...
    def check_is_stepped(self, param: ParamRef, operation: str) -> None: ...
    def float32_state(self, param: ParamRef, state: dict[str, Tensor]) -> dict[str, Tensor]: ...
    def layout_under(self, key: str, param: Tensor) -> tuple[list[int], list[int]]: ...
    def check_saved_state(self, param: ParamRef, saved: dict[str, Any], operation: str) -> None: ...
    def blocks_in(self, saved: dict[str, Any]) -> list[tuple[str, str, list[str]]]: ...
    def loaded_state(self, param: ParamRef, saved: dict[str, Any]) -> dict[str, Tensor]: ...

# Functions, whose signatures stand in amp_ext.ops, and the descriptions of optimizers.
def __getattr__(name: str) -> Any: ...

MASTER_KEYS: tuple[str, ...]
