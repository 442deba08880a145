"""The name of amp_ext.scaler.sharded in pickles of earlier versions."""

from amp_ext.scaler.sharded import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
