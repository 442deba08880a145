"""Mixed-precision training for PyTorch: a gradient scaler and fused optimizers."""

import importlib
from typing import TYPE_CHECKING, Any

from amp_ext import compiled_ops, ops, optim
from amp_ext.clip_grad import clip_grad_norm_
from amp_ext.nan_loss import handle_nan_loss
from amp_ext.nonfinite import check_for_overflow, find_nonfinite
from amp_ext.patch import patch_torch
from amp_ext.scaler import GradScaler, ScalerStats

if TYPE_CHECKING:
    from amp_ext import memory, tensor_core, training
    from amp_ext.load_planner import LoadPlanner
    from amp_ext.scaler.sharded import ShardedGradScaler

# Maps the names that are imported at their first use to their modules. The classes need
# torch.distributed.
_LAZY = {
    "LoadPlanner": "amp_ext.load_planner",
    "ShardedGradScaler": "amp_ext.scaler.sharded",
    "memory": "amp_ext.memory",
    "tensor_core": "amp_ext.tensor_core",
    "training": "amp_ext.training",
}

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "LoadPlanner",
    "ScalerStats",
    "ShardedGradScaler",
    "check_for_overflow",
    "clip_grad_norm_",
    "compiled_ops",
    "find_nonfinite",
    "handle_nan_loss",
    "memory",
    "ops",
    "optim",
    "patch_torch",
    "tensor_core",
    "training",
]


def __dir__() -> list[str]:
    """Returns the public names, as tab completion shows them."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports a module or a class that few programs use, when it is used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'amp_ext' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return getattr(module, name, module)
