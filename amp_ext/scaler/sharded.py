"""The gradient scaler for FullyShardedDataParallel, a subclass of ours and of torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from amp_ext.scaler.grad_scaler import GradScaler


class ShardedGradScaler(GradScaler, TorchShardedGradScaler):  # type: ignore[misc]
    """Scales the loss of a model whose flat parameters are sharded over ranks.

    Replaces ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``: if one rank finds inf
    or NaN in its shard, every rank skips the step. Differences:

    * The ranks also agree if the optimizer unscales inside its step, like those of
      ``amp_ext.optim`` and torch's fused ones. torch's class reduces only in ``unscale_``, so some
      ranks would step while others skip.
    * One scan needs one all-reduce of three numbers, however many devices hold gradients.
    * If ranks have different scales, all skip; in torch's class they drift.
    * Everything that :class:`GradScaler` adds is available.

    ``unscale_`` accepts float16 gradients, as in torch's class. FSDP2 (``fully_shard``) does not
    need this class: its parameters are DTensors, which the plain scaler supports.
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
        """Sets the options. As in torch, ``backoff_factor`` comes before ``growth_factor``.

        Arguments and errors are those of :class:`GradScaler`, except that ``process_group=None``
        stands for all ranks. ``options`` are the options that torch does not have.
        """
        of_torch = init_scale, growth_factor, backoff_factor, growth_interval, enabled
        super().__init__(device, *of_torch, process_group=process_group, **options)

    def _reduces_over(self) -> Any:
        if self.process_group is not None:
            return self.process_group
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "ShardedGradScaler: there is no default process group. Call "
                "torch.distributed.init_process_group() first."
            )
        return torch.distributed.group.WORLD
