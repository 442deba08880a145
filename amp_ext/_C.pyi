# Types of the compiled module; what the functions do stands in amp_ext.ops.
from collections.abc import Sequence

from torch import Tensor

class _CommonHyperparameters:
    lr: float
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool
    clip_value: float
    write_back_grads: bool
    def __init__(self, **fields: float | bool) -> None: ...

class AdamHyperparameters(_CommonHyperparameters):
    beta1: float
    beta2: float
    eps: float

class SgdHyperparameters(_CommonHyperparameters):
    momentum: float
    dampening: float
    nesterov: bool

class LossScaleHyperparameters:
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    def __init__(self, **fields: float) -> None: ...

class GradientOptions:
    grad_scale: Tensor | None
    found_inf: Tensor | None
    max_grad_norm: float | None
    sum_of_squares: Tensor | None
    grad_norm: Tensor | None
    def __init__(self, **fields: Tensor | float | None) -> None: ...

class Plan:
    def __init__(self, operation: str, buffer_names: Sequence[str]) -> None: ...
    def add_param(self, group: int, index_in_group: int, param: Tensor) -> int: ...
    def set_state(
        self,
        number: int,
        buffers: Sequence[Tensor],
        master_param: Tensor | None,
        step: Tensor | None,
    ) -> None: ...
    def has_params(self, groups: Sequence[list[Tensor]]) -> bool: ...
    def read_grads(self) -> list[int]: ...
    def check_finite(
        self, found_inf: Tensor, grad_scale: Tensor | None, sum_squares: bool
    ) -> list[Tensor]: ...
    def step(
        self,
        groups: Sequence[AdamHyperparameters] | Sequence[SgdHyperparameters],
        lrs: Sequence[Tensor | None],
        options: GradientOptions,
    ) -> None: ...

def check_finite_(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    grad_scale: Tensor | None,
    sum_of_squares: Tensor | None,
) -> None: ...
def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor: ...
def clip_grads_(grads: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None: ...
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None: ...
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    hyperparameters: LossScaleHyperparameters,
) -> None: ...
def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] | None,
    master_params: Sequence[Tensor] | None,
    hyperparameters: AdamHyperparameters,
    lr: Tensor | None,
    options: GradientOptions,
) -> None: ...
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None,
    steps: Sequence[Tensor] | None,
    master_params: Sequence[Tensor] | None,
    hyperparameters: SgdHyperparameters,
    lr: Tensor | None,
    options: GradientOptions,
) -> None: ...
def refresh_masters_(params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None: ...
def cpu_isa() -> str: ...
