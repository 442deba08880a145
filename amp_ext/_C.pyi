# Types of the compiled module; what the functions do stands in amp_ext.ops.
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

class OptionDescription:  # of an option of the groups of an optimizer
    name: str
    kind: str  # a key of the types in amp_ext.optim.options
    wanted: str  # what it must be, in words, its range aside
    count: int  # of its numbers, if it is a tuple of them
    on_load: str  # "required", "off if missing", "kept if missing" or "kept"
    is_read: bool  # by steps

class _CommonHyperparameters:
    operation: str
    fields: tuple[str, ...]
    buffers: tuple[tuple[str, str], ...]
    options: tuple[OptionDescription, ...]
    buffer_count: Callable[[dict[str, Any]], int]  # of the options of a group
    # Of the options of a group, or of defaults; what messages say, with "%s" for the name; and what
    # makes the text of a value.
    check_options: Callable[[dict[str, Any], str, Callable[[Any], str]], None]
    check_as_torch: Callable[[dict[str, Any], Callable[[Any], str]], None]  # of defaults
    keeps_step: Callable[[dict[str, Any]], bool]  # likewise
    lr: float | Tensor
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool
    clip_value: float
    timestep: float
    write_back_grads: bool
    dither: bool
    def __init__(self, group: dict[str, Any]) -> None: ...
    @staticmethod
    def kept(kind: str, group: dict[str, Any]) -> Kept: ...

class AdamHyperparameters(_CommonHyperparameters):
    beta1: float
    beta2: float
    eps: float
    denominator_floor: float

class LionHyperparameters(_CommonHyperparameters):
    beta1: float
    beta2: float

class SgdHyperparameters(_CommonHyperparameters):
    momentum: float
    dampening: float
    nesterov: bool

class LossScaleHyperparameters:
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    hysteresis: int
    dynamic: bool
    def __init__(self, **fields: float) -> None: ...

class GradientOptions:
    grad_scale: Tensor | None
    found_inf: Tensor | None
    max_grad_norm: float | None
    sum_of_squares: Tensor | None
    grad_norm: Tensor | None
    skip_nonfinite: bool
    def __init__(self, **fields: Tensor | float | None) -> None: ...

class LookResult:
    found_inf: Tensor
    first_nonfinite: Tensor
    sum_of_squares: Tensor | None
    partition: int

class ScalerSummary:
    updates: int
    skips: int
    consecutive_skips: int
    settled_after: int
    nonfinite_slot: int
    nonfinite_index: int
    nonfinite_update: int
    scale: float
    smallest_scale: float
    largest_scale: float
    settled_scale: float

class OptimizerReport:
    update: int
    skips: int
    last_was_skipped: bool

class ScaleHistory:
    first_update: int
    scales: list[float]
    skipped: list[bool]

class ScalerMonitor:
    def __init__(self, scale: Tensor) -> None: ...
    def add_optimizer(self) -> int: ...
    def read(self) -> ScalerSummary: ...
    def read_optimizer(self, slot: int) -> OptimizerReport: ...
    def history(self) -> ScaleHistory: ...

class StepProgress:
    def __bool__(self) -> bool: ...

class KeptStates:
    def keep(self, states: Mapping[Any, Any], keys: set[str]) -> None: ...
    def are_in(self, states: Mapping[Any, Any]) -> bool: ...

class UnscaledGrads:
    def __init__(self, params: Sequence[Tensor]) -> None: ...
    def note_scale(self, params: Sequence[Tensor], has_stepped: bool) -> None: ...
    def first_late(self, params: Sequence[Tensor]) -> int | None: ...
    def first_written(self, params: Sequence[Tensor]) -> int | None: ...
    def first_unscaled(self, params: Sequence[Tensor]) -> int | None: ...

class RoundedParams: ...
class ScaledGrads: ...

class Plan:
    progress: StepProgress
    def __init__(self, operation: str, buffer_names: Sequence[str]) -> None: ...
    def add_param(self, group: int, index_in_group: int, param: Tensor) -> int: ...
    def add_sharded_param(
        self, group: int, index_in_group: int, param: Tensor, partition: int
    ) -> int: ...
    def set_shard(self, index: int, param: Tensor, grad: Tensor | None) -> None: ...
    def set_first_element(self, index: int, first_element: int) -> None: ...
    def set_rounded_params(self, rounded: RoundedParams) -> None: ...
    def rounded_params(self) -> RoundedParams: ...
    def set_scaled_grads(self, scaled: ScaledGrads) -> None: ...
    def scaled_grads(self) -> ScaledGrads: ...
    def take_params(self, groups: Sequence[Iterable[Tensor]]) -> bool: ...
    def let_go(self) -> None: ...
    def gradients_were_written(self) -> bool: ...
    def check_finite(
        self,
        found_inf: Tensor,
        grad_scale: Tensor | None,
        sum_squares: bool,
        skip_nonfinite: bool,
    ) -> list[LookResult]: ...
    def step(
        self,
        groups: Sequence[_CommonHyperparameters],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        max_grad_norm: float | None,
        sum_of_squares: Tensor | None,
        grad_norm: Tensor | None,
        skip_nonfinite: bool,
        step_plan: Any,
        states: dict[Any, Any],
        hand_over: Any,
    ) -> None: ...

class ListedParam:  # a parameter, and where it is listed
    def __init__(
        self, whole: Tensor, local: Tensor, group: int, index: int, has_whole_rows: bool
    ) -> None: ...

class Kept:  # what a group lets its parameters keep
    kind: str
    names: list[str]
    keeps_step: bool
    master_weights: bool | str
    state_dtype: str | None
    def is_key(self, key: Any) -> bool: ...
    def master_key(self, param: ListedParam) -> str: ...
    def has_codes(self, param: ListedParam) -> bool: ...
    def whole_state(self, param: ListedParam, state: dict[str, Tensor]) -> dict[str, Tensor]: ...
    def check_is_stepped(self, param: ListedParam, operation: str) -> None: ...
    def float32_state(self, param: ListedParam, state: dict[str, Tensor]) -> dict[str, Tensor]: ...
    def layout_under(self, key: str, param: Tensor) -> tuple[list[int], list[int]]: ...
    def check_saved_state(
        self, param: ListedParam, saved: dict[str, Any], operation: str
    ) -> None: ...
    def blocks_in(self, saved: dict[str, Any]) -> list[tuple[str, str, list[str]]]: ...
    def loaded_state(self, param: ListedParam, saved: dict[str, Any]) -> dict[str, Tensor]: ...

def check_finite_(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    grad_scale: Tensor | None,
    sum_of_squares: Tensor | None,
    first_nonfinite: Tensor | None,
) -> None: ...
def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor: ...
def clip_grads_(grads: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None: ...
def unscale_(
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    first_nonfinite: Tensor | None,
) -> None: ...
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    first_nonfinites: Sequence[Tensor | None],
    slots: Sequence[int],
    hyperparameters: LossScaleHyperparameters,
    hysteresis_tracker: Tensor | None,
    monitor: ScalerMonitor | None,
) -> None: ...
def adam_(**arguments: Sequence[Tensor | str] | Tensor | float | str | None) -> None: ...
def lion_(**arguments: Sequence[Tensor | str] | Tensor | float | str | None) -> None: ...
def sgd_(**arguments: Sequence[Tensor | str] | Tensor | float | str | None) -> None: ...
def refresh_masters_(params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None: ...
def configured_options() -> list[str]: ...
def places_by_name(own: Sequence[str], saved: Sequence[str]) -> list[int]: ...
def name_of_another_group(own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> str: ...
def check_saved_groups(
    operation: str,
    classes: Sequence[str],
    own_keys: Sequence[str],
    required: Sequence[str],
    groups: Sequence[dict[str, Any]],
    states: Sequence[dict[str, Any]],
) -> None: ...
def check_lengths(own: Sequence[int], saved: Sequence[int]) -> None: ...
def counts_for_states(group: dict[str, Any]) -> bool: ...
def wanted_of_scaler(name: str, value: float) -> str: ...
def open_beside(path: bytes) -> tuple[bytes, int, int, bytes, bytes]: ...
def whole_master(param: Tensor, masters: Mapping[str, Tensor]) -> Tensor: ...
def has_blocks(param: Tensor, has_whole_rows: bool) -> bool: ...
def split_master(param: Tensor, master: Tensor, low_bits: int) -> Tensor: ...
def join_master(param: Tensor, low: Tensor) -> Tensor: ...
def encode_ratios(moment: Tensor, second_moment: Tensor) -> Tensor: ...
def decode_ratios(codes: Tensor, second_moment: Tensor) -> Tensor: ...
def encode_groups(moment: Tensor, code: str) -> tuple[Tensor, Tensor]: ...
def decode_groups(codes: Tensor, exponents: Tensor, code: str) -> Tensor: ...
def cpu_isa() -> str: ...
def is_profiled() -> bool: ...
def complement_of_power(base: float, exponent: float) -> float: ...  # of bias corrections

MASTER_KEYS: tuple[str, ...]
NO_TENSOR: int
