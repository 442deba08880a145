"""Mixed-precision training for PyTorch: fused optimizers with float32 masters."""

from amp_ext import ops, optim

__version__ = "0.1.0"

__all__ = ["ops", "optim"]
