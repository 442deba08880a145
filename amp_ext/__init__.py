"""Mixed-precision training for PyTorch: a gradient scaler and fused optimizers."""

from typing import TYPE_CHECKING, Any

from amp_ext import compiled_ops, memory, ops, optim, tensor_core, training
from amp_ext.clip_grad import clip_grad_norm_
from amp_ext.nonfinite import check_for_overflow, find_nonfinite, handle_nan_loss
from amp_ext.patch import patch_torch
from amp_ext.scaler import GradScaler, ScalerHistory, ScalerStats

if TYPE_CHECKING:
    from amp_ext.load_planner import LoadPlanner
    from amp_ext.scaler.sharded import ShardedGradScaler

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "LoadPlanner",
    "ScalerHistory",
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
    """Imports the classes that need ``torch.distributed`` only when they are used."""
    if name == "LoadPlanner":
        from amp_ext.load_planner import LoadPlanner

        return LoadPlanner
    if name == "ShardedGradScaler":
        from amp_ext.scaler.sharded import ShardedGradScaler

        return ShardedGradScaler
    raise AttributeError(f"module 'amp_ext' has no attribute {name!r}")
