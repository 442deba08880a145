"""Mixed-precision training for PyTorch: a gradient scaler and fused optimizers."""

from amp_ext import ops, optim
from amp_ext.clip_grad import clip_grad_norm_
from amp_ext.grad_scaler import GradScaler

__version__ = "0.1.0"

__all__ = ["GradScaler", "clip_grad_norm_", "ops", "optim"]
