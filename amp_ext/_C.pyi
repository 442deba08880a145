# Types of the compiled module; what the functions do stands in amp_ext.ops.
from collections.abc import Sequence

from torch import Tensor

class AdamHyperparameters:
    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled_weight_decay: bool,
        maximize: bool,
    ) -> None: ...

class SgdHyperparameters:
    def __init__(
        self,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        decoupled_weight_decay: bool,
        maximize: bool,
    ) -> None: ...

class LossScaleHyperparameters:
    def __init__(
        self, growth_factor: float, backoff_factor: float, growth_interval: int
    ) -> None: ...

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
    def params_without_state(self) -> list[int]: ...
    def check_finite(self, found_inf: Tensor, grad_scale: Tensor | None) -> list[Tensor]: ...
    def step(
        self,
        groups: Sequence[AdamHyperparameters] | Sequence[SgdHyperparameters],
        lrs: Sequence[Tensor | None],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None: ...

def check_finite_(
    tensors: Sequence[Tensor], found_inf: Tensor, grad_scale: Tensor | None
) -> None: ...
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
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None: ...
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None,
    steps: Sequence[Tensor] | None,
    master_params: Sequence[Tensor] | None,
    hyperparameters: SgdHyperparameters,
    lr: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None: ...
def refresh_masters_(params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None: ...
def cpu_isa() -> str: ...
