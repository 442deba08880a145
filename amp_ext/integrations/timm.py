"""Uses our scaler in timm's loss scaler, and adds our optimizers to timm's registry."""

from __future__ import annotations

import dataclasses
from typing import Any

from amp_ext import optim
from amp_ext.integrations import import_client
from amp_ext.scaler import GradScaler

_NativeScaler: Any = import_client("timm.utils", at_least="1.0.12", below="2").NativeScaler
_factory = import_client("timm.optim._optim_factory", at_least="1.0.12", below="2")

__all__ = ["NativeScaler", "register_optimizers"]

# Maps the names of optimizers in timm's registry to our classes that replace them.
_OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "momentum": optim.SGD,
}


class NativeScaler(_NativeScaler):
    """``timm.utils.NativeScaler`` with our scaler, and the same methods and state dict.

    Args:
        device: Type of the device that trains: "cuda" or "cpu".
        scaler: By default a new ``amp_ext.GradScaler(device)``.
    """

    def __init__(self, device: str = "cuda", scaler: GradScaler | None = None) -> None:
        """Creates a scaler if none is given."""
        self._scaler = GradScaler(device) if scaler is None else scaler


def register_optimizers() -> None:
    """Adds our optimizers to timm's: ``create_optimizer_v2(model, opt="ampadamw")``.

    The names are "ampadam", "ampadamw", "ampsgd" and "ampmomentum". The defaults are those of
    timm's optimizer whose name lacks "amp". For example, "ampsgd" has Nesterov momentum, because
    timm's "sgd" has Nesterov momentum. A second call changes nothing.
    """
    registry = _factory.default_registry
    for name, our_class in _OPTIMIZERS.items():
        if f"amp{name}" not in registry.list_optimizers():
            theirs = registry.get_optimizer_info(name)
            registry.register(
                dataclasses.replace(
                    theirs,
                    name=f"amp{name}",
                    opt_class=our_class,
                    description=f"amp_ext.optim.{our_class.__name__}",
                )
            )
