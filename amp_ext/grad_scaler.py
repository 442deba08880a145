"""The name of amp_ext.scaler.grad_scaler in pickles of earlier versions."""

from amp_ext.scaler.grad_scaler import GradScaler

__all__ = ["GradScaler"]
