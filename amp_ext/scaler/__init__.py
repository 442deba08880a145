"""The gradient scaler and its reports."""

from amp_ext.scaler.grad_scaler import GradScaler
from amp_ext.scaler.stats import ScalerStats

__all__ = ["GradScaler", "ScalerStats"]
