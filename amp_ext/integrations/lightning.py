"""Lightning: precision plugins for its Trainer and its Fabric.

Both plugins have the constructor of Lightning's own. A checkpoint of the Trainer names its plugin.
Ours has the same name, so a checkpoint of either can be resumed under the other.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch.amp.grad_scaler import OptState

from amp_ext.grad_scaler import GradScaler
from amp_ext.integrations import import_client

# The package pytorch_lightning is the same library, but its Trainer takes no plugins of lightning.
_IN_PYTORCH_LIGHTNING = (
    "; for pytorch_lightning, whose Trainer refuses plugins of lightning, write "
    'pytorch_lightning.plugins.MixedPrecision("16-mixed", "cuda", '
    'scaler=amp_ext.GradScaler("cuda"))'
)
_has_other = importlib.util.find_spec("pytorch_lightning") is not None
_lightning = import_client(
    "lightning", at_least="2.4", below="3", instead=_IN_PYTORCH_LIGHTNING if _has_other else ""
)
_TrainerPlugin: Any = _lightning.pytorch.plugins.MixedPrecision
_FabricPlugin: Any = _lightning.fabric.plugins.MixedPrecision

__all__ = ["FabricMixedPrecision", "MixedPrecision"]


class MixedPrecision(_TrainerPlugin):
    """``lightning.pytorch.plugins.MixedPrecision`` with our scaler, which clips for any optimizer.

    Lightning's own plugin refuses ``gradient_clip_val`` with optimizers that unscale inside their
    step, as ours and torch's fused ones do. This plugin unscales their gradients before it clips,
    and the step does not unscale them again. ::

        Trainer(plugins=[MixedPrecision()], gradient_clip_val=1.0)

    Args:
        precision: "16-mixed", or "bf16-mixed", which has no scaler.
        device: Type of the device that trains: "cuda" or "cpu".
        scaler: By default a new ``amp_ext.GradScaler(device)``.

    Raises:
        MisconfigurationException: If a scaler is given for "bf16-mixed".
    """

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", scaler: Any = None
    ) -> None:
        """Makes the scaler, if none is given."""
        super().__init__(precision, device, _scaler_for(precision, device, scaler))

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, *options: Any, **named: Any
    ) -> None:
        """Unscales and clips the gradients of an optimizer.

        Args:
            optimizer: The optimizer, or Lightning's wrapper around it.
            clip_val: Largest norm or value; 0 clips nothing.
            *options: The algorithm, for Lightning.
            **named: Likewise.
        """
        if clip_val > 0 and getattr(optimizer, "_step_supports_amp_scaling", False):
            _unscale_once(self.scaler, optimizer)
        super(_TrainerPlugin, self).clip_gradients(optimizer, clip_val, *options, **named)


class FabricMixedPrecision(_FabricPlugin):
    """``lightning.fabric.plugins.MixedPrecision`` with our scaler, which clips for any optimizer.

    ``fabric.clip_gradients(..., error_if_nonfinite=False)`` leaves an overflow to the scaler, which
    skips the step; by default Fabric raises instead. ::

        Fabric(plugins=[FabricMixedPrecision()])

    Args:
        precision: "16-mixed", or "bf16-mixed", which has no scaler.
        device: Type of the device that trains: "cuda" or "cpu".
        scaler: By default a new ``amp_ext.GradScaler(device)``.

    Raises:
        ValueError: If a scaler is given for "bf16-mixed".
    """

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", scaler: Any = None
    ) -> None:
        """Makes the scaler, if none is given."""
        super().__init__(precision, device, _scaler_for(precision, device, scaler))

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscales the gradients of an optimizer, before they are clipped.

        Args:
            optimizer: The optimizer.
        """
        _unscale_once(self.scaler, optimizer)


def _scaler_for(precision: str, device: str, scaler: Any) -> Any:
    return GradScaler(device) if scaler is None and precision == "16-mixed" else scaler


def _unscale_once(scaler: Any, optimizer: Any) -> None:
    """Unscales gradients that are still scaled."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # the scaler knows the inner one
    if scaler is None or not scaler.is_enabled():
        return
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
