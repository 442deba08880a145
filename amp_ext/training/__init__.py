"""Trains models in mixed precision with one call per batch, and helps to choose a precision."""

from amp_ext.training.config import MixedPrecisionConfig, create_fp16_grad_scaler
from amp_ext.training.precision import (
    PrecisionBenchmark,
    PrecisionChoice,
    PrecisionTiming,
    benchmark_precision,
    choose_precision,
)
from amp_ext.training.trainer import MixedPrecisionTrainer, StepMetrics

__all__ = [
    "MixedPrecisionConfig",
    "MixedPrecisionTrainer",
    "PrecisionBenchmark",
    "PrecisionChoice",
    "PrecisionTiming",
    "StepMetrics",
    "benchmark_precision",
    "choose_precision",
    "create_fp16_grad_scaler",
]
