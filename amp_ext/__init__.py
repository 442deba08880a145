"""Mixed-precision training for PyTorch: a gradient scaler and fused optimizers."""

from amp_ext import compiled_ops, memory, ops, optim, tensor_core, training
from amp_ext.clip_grad import clip_grad_norm_
from amp_ext.grad_scaler import GradScaler
from amp_ext.nonfinite import check_for_overflow, find_nonfinite, handle_nan_loss
from amp_ext.patch import patch_torch
from amp_ext.scaler_stats import ScalerHistory, ScalerStats

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "ScalerHistory",
    "ScalerStats",
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
