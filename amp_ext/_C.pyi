# Types of the compiled module. amp_ext.ops documents the functions.
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

class OptionDescription:  # an option of a parameter group
    name: str
    type: str  # name of the type, such as "number", "numbers" or "flag"
    wanted: str  # the type in words, for errors; without the valid range
    count: int  # length of the tuple, for the type "numbers"
    on_load: str  # "required", "off if missing", "kept if missing" or "kept"
    is_read: bool  # False for options of torch that have no effect here

class BufferDescription:
    name: str
    role: str
    dither_stride: int  # Weyl stride, see csrc/elements/dither.h; 0: the buffer is never dithered
    code: str  # name of its 8-bit format, such as "q8h"; empty if it has none
    option: str | None  # option that a group must set to have the buffer; None: every group has it

class OptimizerDescription:
    operation: str  # name of the operation over lists, such as "adam_"
    fields: tuple[str, ...]  # names of the hyperparameters
    buffers: tuple[BufferDescription, ...]
    options: tuple[OptionDescription, ...]
    # `where` begins the errors, with "%s" for the option; `shown` converts a value to text.
    def check_options(
        self, options: dict[str, Any], where: str, shown: Callable[[Any], str]
    ) -> None: ...
    def check_as_torch(self, defaults: dict[str, Any], shown: Callable[[Any], str]) -> None: ...
    counts_from_buffer: bool  # torch's class stores no step count
    # Returns how many buffers a group has, and whether the formula and dithering count steps.
    def state_needs(self, group: Mapping[str, Any]) -> tuple[int, bool, bool]: ...

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
    ) -> tuple[str, bool] | None: ...
    def must_warn_of(self, value: float) -> bool: ...
    @staticmethod
    def warning_of(value: str) -> str: ...
    def check_scales(self) -> None: ...
    def step_skipped(self, optimizer: Any) -> bool | None: ...
    def stats(
        self, initial_scale: float
    ) -> tuple[int, int, int, int, float, float, float, str | None]: ...

class PlanAnswer(enum.Enum):  # what the caller of a Plan must do next
    REGISTER_PARAMS = 1  # parameters or options have changed: register the parameters, ask again
    NEEDS_GLOBAL_NORM = 2  # add up the sums of squares over all ranks, and pass them
    DONE = 3

class GradientRelease:  # hooks that step the parameters of one optimizer during backward()
    # Without a scaler, `scaler` is None.
    def __init__(self, optimizer: str, scaler: Any) -> None: ...
    # Steps a parameter. Calls methods of `owner`, the GradientRelease of Python.
    def on_gradient(self, plan: Plan, owner: Any, optimizer: Any, param: Tensor) -> None: ...
    # Each of `rows` is as in Plan.register_params().
    def register_params(self, rows: Sequence[tuple[int, int, Tensor, int | None, int]]) -> None: ...
    def in_turn(self, work: Callable[[], None]) -> None: ...  # calls it in one thread at a time
    # Begins an iteration unless it has begun, by a call of owner._begin(), which calls begin().
    def open(self, plan: Plan, owner: Any) -> None: ...
    # Hooks step the parameters of `stepped`. `grad_scale` is `scale` on their device.
    def begin(
        self,
        plan: Plan,
        optimizer: Any,
        stepped: Any,
        scale: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None: ...
    # Returns for each device the number of skipped parameters and the index of the first nonfinite
    # gradient.
    def collect(self, plan: Plan) -> tuple[list[Tensor], list[Tensor]]: ...
    def complete(self, plan: Plan) -> None: ...
    def give_up(self, plan: Plan) -> str: ...  # returns the warning about it, or ""
    def forget(self, plan: Plan) -> None: ...
    def check_options(self, plan: Plan, optimizer: Any) -> None: ...
    def check_scaler(self, scaler: Any, method: str) -> None: ...
    def check_caller_of_step(self, has_scale: bool, has_scan: bool) -> None: ...
    @staticmethod
    def throw_needs_gradients(operation: str) -> NoReturn: ...

class Plan:  # the checked parameters, gradients and states of one optimizer, cached between steps
    grad_norm: Tensor | None  # [] float32, norm of all gradients at the last step
    step_applied: Tensor | None  # [] float32, 0 if the last step was skipped; None if not tracked
    failure: str  # how many parameters the last failed step updated; empty if no step failed
    note_of_failure: str  # `failure`, and how to go on
    def __init__(
        self,
        optimizer: str,
        description: OptimizerDescription,
        before: Plan | None,
        failure: str,
    ) -> None: ...
    def forget(self) -> None: ...
    # Ignores writes that left the parameters as they were: how many, by id() of the parameter.
    def forget_writes(self, writes: dict[int, int]) -> None: ...
    def track_step_applied(self) -> None: ...
    # Each of `rows` is (group, index in the group, parameter, partition, offset of the local
    # shard's first element in the unsharded parameter). The partition is None without sharding.
    def register_params(
        self,
        optimizer: Any,
        operation: str,
        rows: Sequence[tuple[int, int, Tensor, int | None, int]],
    ) -> None: ...
    # The methods that take `step_plan` may all return REGISTER_PARAMS, and step() may return
    # NEEDS_GLOBAL_NORM.
    def scan(
        self,
        step_plan: Any,
        optimizer: Any,
        found_inf: Tensor,
        grad_scale: Tensor | None,
        sums_squares: bool,
    ) -> list[tuple[Tensor, Tensor, int, Tensor | None]] | PlanAnswer: ...
    def gradients_were_written(self, step_plan: Any, optimizer: Any) -> bool | PlanAnswer: ...
    def step(
        self,
        step_plan: Any,
        optimizer: Any,
        amp_context: Any,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        max_norm: Tensor | None,
        is_of_scaler: bool,
        chunks: Any = None,
    ) -> PlanAnswer: ...
    # Returns found_inf and sum_of_squares for a step of another plan.
    def prepare_copied_step(
        self,
        step_plan: Any,
        optimizer: Any,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        is_of_scaler: bool,
    ) -> tuple[Tensor | None, Tensor | None] | PlanAnswer: ...
    def remember_copied_step(
        self, step_plan: Any, optimizer: Any, had_scale: bool
    ) -> PlanAnswer: ...

# Stands for the descriptions of optimizers and all functions, whose signatures amp_ext.ops has.
def __getattr__(name: str) -> Any: ...
