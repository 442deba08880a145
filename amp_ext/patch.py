"""Makes unchanged code that constructs torch's scaler and optimizers get amp_ext's instead."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch

from amp_ext import ops, optim
from amp_ext.scaler import GradScaler as FusedScaler


class GradScaler(torch.cuda.amp.GradScaler, FusedScaler):
    """Our scaler with the constructor of ``torch.cuda.amp.GradScaler``.

    It also has the name of that class, because some checkpoints use the name as a key.
    """


class _PlainOptimizer(torch.optim.Optimizer):
    """Precedes torch's class in the MRO, so that our class calls torch.optim.Optimizer directly."""

    __init__ = torch.optim.Optimizer.__init__
    __setstate__ = torch.optim.Optimizer.__setstate__


_SCALERS = {torch.amp.GradScaler: FusedScaler, torch.cuda.amp.GradScaler: GradScaler}
# Maps a class of torch to a subclass of our optimizer that also inherits from it.
_OPTIMIZERS = {
    getattr(torch.optim, name): type(
        name,
        (getattr(optim, name), _PlainOptimizer, getattr(torch.optim, name)),
        {"__module__": __name__},
    )
    for name in optim.__all__
    if hasattr(torch.optim, name)
}
# Pickles name the classes.
globals().update({each.__name__: each for each in _OPTIMIZERS.values()})

# Maps each patched class to the __init__ methods that its patches have replaced: torch's own, then
# those of earlier patches. All patches are alike, so they may end in any order.
_constructors: dict[Any, list[Any]] = defaultdict(list)


class TorchPatch:
    """A patch of torch, made by :func:`amp_ext.patch_torch`. A ``with`` block also ends it."""

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
        """Ends the patch. Objects constructed under it keep working; a second call does nothing."""
        if self._in_force:
            for torch_class in self._classes:
                torch_class.__init__ = _constructors[torch_class].pop()
            self._in_force = False


def _patch(torch_class: Any, our_class: Any) -> None:
    """Replaces the constructor of a class of torch, so that new objects get our class."""
    construct = torch_class.__init__

    @functools.wraps(construct)
    def construct_ours(self: Any, *arguments: Any, **options: Any) -> None:
        if type(self) is not torch_class:  # a subclass, such as our_class
            return construct(self, *arguments, **options)
        self.__class__ = our_class
        return our_class.__init__(self, *arguments, **options)

    _constructors[torch_class].append(construct)
    torch_class.__init__ = construct_ours


def patch_torch(*, optimizers: bool = False) -> TorchPatch:
    """Makes code that constructs torch's scaler and optimizers get amp_ext's instead.

    The patch takes effect at once, until ``undo()`` or the end of a ``with`` statement. Checks with
    ``isinstance`` still work, because our classes are subclasses of torch's. Existing objects, and
    other subclasses of torch's classes such as ``ShardedGradScaler``, are not affected.

    Args:
        optimizers: Also patches the classes of ``torch.optim`` that :mod:`amp_ext.optim` replaces,
            such as ``AdamW``. Our optimizers keep float32 masters of 16-bit parameters, and refuse
            whatever :mod:`amp_ext.optim` refuses. A scaler calls their ``step`` also after an
            overflow. Accelerate counts this as a step, and its schedules advance.

    Raises:
        ImportError: If the compiled module can't be loaded; nothing is patched then.
    """
    ops.cpu_isa()  # fails here, not during training, if the compiled module can't be loaded
    return TorchPatch({**_SCALERS, **(_OPTIMIZERS if optimizers else {})})
