"""The gradient scaler for FullyShardedDataParallel: torch's class of that name, and ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from amp_ext.grad_scaler import GradScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler, TorchShardedGradScaler):  # type: ignore[misc]
    """Scales the loss of a model whose flat parameters are sharded over ranks.

    Takes the place of ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``: what one
    rank finds in its shard, every rank knows before it steps. What differs:

    * The ranks agree also where the optimizer unscales inside its step, as those of
      ``amp_ext.optim`` and torch's fused ones do. torch's class reduces only in ``unscale_``, and
      some ranks would step while others skip.
    * One look takes one all-reduce of three numbers, however many devices hold gradients.
    * Ranks with different scales skip, and ``update`` raises; in torch's class they drift apart.
    * All that :class:`GradScaler` does besides.

    float16 gradients may be unscaled here, as in torch's class. FSDP2 (``fully_shard``) needs none
    of this: its parameters are DTensors, which the plain scaler knows.
    """

    _takes_fp16 = True

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        """Sets the options; note torch's order, in which ``backoff_factor`` comes first.

        The arguments and errors are those of :class:`GradScaler`, but that ``process_group=None``
        stands for all ranks; ``options`` are those that torch does not have.
        """
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            process_group=process_group,
            **options,
        )

    def _reduces_over(self) -> Any:
        if self.process_group is not None:
            return self.process_group
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "ShardedGradScaler: the process group of all ranks must be there, got none: call "
                "torch.distributed.init_process_group first"
            )
        return torch.distributed.group.WORLD
