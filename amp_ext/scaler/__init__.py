"""The gradient scaler and its reports."""

from amp_ext.scaler.grad_scaler import GradScaler
from amp_ext.scaler.stats import ScalerHistory, ScalerStats

__all__ = ["GradScaler", "ScalerHistory", "ScalerStats"]
