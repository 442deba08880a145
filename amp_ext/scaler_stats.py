"""The name of amp_ext.scaler.stats in pickles of earlier versions."""

from amp_ext.scaler.stats import ScalerStats

__all__ = ["ScalerStats"]
