"""Precision plugins for Lightning's Trainer and Fabric.

Both have the constructor arguments of Lightning's own plugins, and their class names, which the
Trainer saves. Checkpoints can therefore be resumed with either plugin.
"""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import OptState

from amp_ext.integrations import import_client
from amp_ext.scaler import GradScaler

_lightning = import_client("lightning", at_least="2.4", below="3")
_TrainerPlugin: Any = _lightning.pytorch.plugins.MixedPrecision
_FabricPlugin: Any = _lightning.fabric.plugins.MixedPrecision

__all__ = ["FabricMixedPrecision", "MixedPrecision"]


class _WithScaler:
    """Has the constructor of both plugins, which creates a scaler if none is given."""

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", scaler: Any = None
    ) -> None:
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)  # type: ignore[call-arg]


class MixedPrecision(_WithScaler, _TrainerPlugin):
    """``lightning.pytorch.plugins.MixedPrecision`` with our scaler; can clip for any optimizer.

    Lightning's plugin refuses ``gradient_clip_val`` with optimizers that unscale gradients inside
    their step, such as ours and torch's fused ones. This plugin unscales before it clips. ::

        Trainer(plugins=[MixedPrecision()], gradient_clip_val=1.0)

    Args:
        precision: "16-mixed", or "bf16-mixed", which has no scaler.
        device: Type of the device that trains: "cuda" or "cpu".
        scaler: By default a new ``amp_ext.GradScaler(device)``.

    Raises:
        MisconfigurationException: If a scaler is given for "bf16-mixed".
    """

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, *options: Any, **named: Any
    ) -> None:
        """Unscales and clips the gradients of an optimizer.

        Args:
            optimizer: The optimizer, or Lightning's wrapper around it.
            clip_val: Largest norm or value; 0 disables clipping.
            *options: Positional arguments for Lightning, such as the algorithm.
            **named: Keyword arguments for Lightning.
        """
        if clip_val > 0 and getattr(optimizer, "_step_supports_amp_scaling", False):
            _unscale_once(self.scaler, optimizer)
        super(_TrainerPlugin, self).clip_gradients(optimizer, clip_val, *options, **named)


class FabricMixedPrecision(_WithScaler, _FabricPlugin):
    """``lightning.fabric.plugins.MixedPrecision`` with our scaler; can clip for any optimizer.

    Pass ``error_if_nonfinite=False`` to ``fabric.clip_gradients``, so that the scaler can skip a
    step after an overflow; by default Fabric raises. ::

        Fabric(plugins=[FabricMixedPrecision()])

    Args:
        precision: "16-mixed", or "bf16-mixed", which has no scaler.
        device: Type of the device that trains: "cuda" or "cpu".
        scaler: By default a new ``amp_ext.GradScaler(device)``.

    Raises:
        ValueError: If a scaler is given for "bf16-mixed".
    """

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscales the gradients of an optimizer before Fabric clips them.

        Args:
            optimizer: The optimizer.
        """
        _unscale_once(self.scaler, optimizer)


def _unscale_once(scaler: Any, optimizer: Any) -> None:
    """Unscales the gradients of an optimizer, unless they were unscaled since the last update."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwraps Lightning's optimizer
    if scaler is None or not scaler.is_enabled():
        return
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
