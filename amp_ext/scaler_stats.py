"""The name of amp_ext.scaler.stats in pickles of earlier versions."""

from amp_ext.scaler.stats import ScalerHistory, ScalerStats

__all__ = ["ScalerHistory", "ScalerStats"]
