"""Gives unchanged code our scaler and, on request, our optimizers, where it asks for torch's."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch

from amp_ext import ops, optim
from amp_ext.grad_scaler import GradScaler as FusedScaler


class GradScaler(torch.cuda.amp.GradScaler, FusedScaler):
    """Ours with torch's old constructor and its name, by which some key their checkpoints."""


class _PlainOptimizer(torch.optim.Optimizer):
    """Stands between our class and torch's, so that ours calls the base and not torch's."""

    __init__ = torch.optim.Optimizer.__init__
    __setstate__ = torch.optim.Optimizer.__setstate__


class Adam(optim.Adam, _PlainOptimizer, torch.optim.Adam):
    """:class:`amp_ext.optim.Adam` that is a ``torch.optim.Adam`` as well."""


class AdamW(optim.AdamW, _PlainOptimizer, torch.optim.AdamW):
    """:class:`amp_ext.optim.AdamW` that is a ``torch.optim.AdamW`` as well."""


class SGD(optim.SGD, _PlainOptimizer, torch.optim.SGD):
    """:class:`amp_ext.optim.SGD` that is a ``torch.optim.SGD`` as well."""


_SCALERS = {torch.amp.GradScaler: FusedScaler, torch.cuda.amp.GradScaler: GradScaler}
_OPTIMIZERS = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW, torch.optim.SGD: SGD}

_constructors: dict[Any, list[Any]] = defaultdict(list)  # torch's first, then ours, all alike


class TorchPatch:
    """A patch of torch, made by :func:`amp_ext.patch_torch`; a ``with`` statement ends it, too."""

    def __init__(self, classes: dict[Any, Any]) -> None:
        self._classes = classes
        self._in_force = False
        self.__enter__()

    def __enter__(self) -> TorchPatch:
        if not self._in_force:
            for torch_class, our_class in self._classes.items():
                _patch(torch_class, our_class)
            self._in_force = True
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Ends the patch. Objects that were made under it live on; a second call does nothing."""
        if self._in_force:
            for torch_class in self._classes:
                torch_class.__init__ = _constructors[torch_class].pop()
            self._in_force = False


def _patch(torch_class: Any, our_class: Any) -> None:
    """Lets a new object of torch's class become one of ours, and ours construct it."""
    construct = torch_class.__init__

    @functools.wraps(construct)
    def construct_ours(self: Any, *arguments: Any, **options: Any) -> None:
        if type(self) is not torch_class:  # of a subclass, or ours on its way up
            return construct(self, *arguments, **options)
        self.__class__ = our_class
        return our_class.__init__(self, *arguments, **options)

    _constructors[torch_class].append(construct)
    torch_class.__init__ = construct_ours


def patch_torch(*, optimizers: bool = False) -> TorchPatch:
    """Makes code that constructs torch's scaler, or its optimizers, get ours.

    In force at once, until ``undo()`` or the end of a ``with`` statement; patches may end in any
    order. ``isinstance`` answers as ever, for ours are subclasses of torch's. What exists, and
    subclasses of others (``ShardedGradScaler`` is one), stay as they are.

    Args:
        optimizers: Patches ``torch.optim.Adam``, ``AdamW`` and ``SGD`` too. They keep float32
            masters of 16-bit parameters and refuse what :mod:`amp_ext.optim` refuses. Their step is
            called after an overflow too and writes nothing; Accelerate takes that for a step, and
            its schedules move on.

    Raises:
        ImportError: If the compiled module does not load; nothing is patched then.
    """
    ops.cpu_isa()  # so that a compiled module that does not load fails here, not in the training
    return TorchPatch({**_SCALERS, **(_OPTIMIZERS if optimizers else {})})
