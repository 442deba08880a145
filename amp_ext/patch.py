"""Gives unchanged code our scaler and, on request, our optimizers, where it asks for torch's."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.cpu.amp.grad_scaler import GradScaler as TorchCpuScaler
from torch.cuda.amp.grad_scaler import GradScaler as TorchCudaScaler

from amp_ext import ops, optim
from amp_ext.grad_scaler import GradScaler as FusedScaler

__all__ = ["TorchPatch", "patch_torch"]


class _OldScaler:
    """What our scalers with torch's old constructors, which take no device, add.

    Copies and pickles keep the class. A pickle would find it by its name, but these have one name,
    as torch's have: checkpoints are keyed by it.
    """

    _torch_class: ClassVar[type]

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank_scaler, (self._torch_class,), self.__getstate__()


def _old_scaler(torch_class: type) -> type:
    bases = (_OldScaler, torch_class, FusedScaler)
    return type("GradScaler", bases, {"_torch_class": torch_class, "__doc__": FusedScaler.__doc__})


def _blank_scaler(torch_class: type) -> Any:
    our_class = _SCALERS[torch_class]
    return our_class.__new__(our_class)


class _PlainOptimizer(torch.optim.Optimizer):
    """Stands between our class and torch's, so that ours calls the base and not torch's."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)


class Adam(optim.Adam, _PlainOptimizer, torch.optim.Adam):
    """:class:`amp_ext.optim.Adam` that is a ``torch.optim.Adam`` as well."""


class AdamW(optim.AdamW, _PlainOptimizer, torch.optim.AdamW):
    """:class:`amp_ext.optim.AdamW` that is a ``torch.optim.AdamW`` as well."""


class SGD(optim.SGD, _PlainOptimizer, torch.optim.SGD):
    """:class:`amp_ext.optim.SGD` that is a ``torch.optim.SGD`` as well."""


_SCALERS: dict[Any, Any] = {
    torch.amp.GradScaler: FusedScaler,
    TorchCudaScaler: _old_scaler(TorchCudaScaler),
    TorchCpuScaler: _old_scaler(TorchCpuScaler),
}
_OPTIMIZERS: dict[Any, Any] = {
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
}

_lock = threading.Lock()
_patches: Counter[Any] = Counter()  # that are in force, for each class of torch
_constructors: dict[Any, Callable[..., None]] = {}  # torch's own, while there are patches


class TorchPatch:
    """A patch of torch that is in force until :meth:`undo` or the end of a ``with`` statement.

    Made by :func:`amp_ext.patch_torch`. Patches may overlap and end in any order: a class of torch
    is itself again when the last one that covers it ends. One patch may be entered again, also
    while it is entered; the outermost ``with`` ends it.
    """

    def __init__(self, classes: dict[Any, Any]) -> None:
        self._classes = classes
        self._in_force = False
        self._depth = 0
        self._apply()

    def __enter__(self) -> TorchPatch:
        self._apply()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.undo()

    def undo(self) -> None:
        """Ends the patch. Objects that were made under it live on; a second call does nothing."""
        with _lock:
            if not self._in_force:
                return
            self._in_force = False
            for torch_class in self._classes:
                _patches[torch_class] -= 1
                if _patches[torch_class] == 0:
                    torch_class.__init__ = _constructors.pop(torch_class)

    def _apply(self) -> None:
        with _lock:
            if self._in_force:
                return
            self._in_force = True
            for torch_class, our_class in self._classes.items():
                if _patches[torch_class] == 0:
                    _constructors[torch_class] = torch_class.__init__
                    torch_class.__init__ = _constructor(torch_class, our_class)
                _patches[torch_class] += 1


def _constructor(torch_class: Any, our_class: Any) -> Callable[..., None]:
    """Returns what makes a new object of torch's class one of ours and then constructs it.

    Objects of subclasses pass through, ours among them on their way up.
    """
    construct: Callable[..., None] = torch_class.__init__

    @functools.wraps(construct)
    def construct_ours(self: Any, *arguments: Any, **options: Any) -> None:
        if type(self) is torch_class:
            self.__class__ = our_class
            our_class.__init__(self, *arguments, **options)
        else:
            construct(self, *arguments, **options)

    return construct_ours


def patch_torch(*, optimizers: bool = False) -> TorchPatch:
    """Makes code that constructs torch's scaler, or its optimizers, get ours.

    In force at once, until the end of a ``with`` statement or until ``undo()``::

        with amp_ext.patch_torch(optimizers=True):
            train()  # torch.amp.GradScaler("cuda"), torch.optim.AdamW(model.parameters()), ...

        patch = amp_ext.patch_torch()
        train()
        patch.undo()  # or never

    It is the constructors that are patched, not the names: whatever name a class goes by is
    reached (``torch.cuda.amp.GradScaler``, one imported before the patch, one held in a table), and
    ``isinstance`` answers as ever, for ours are subclasses of torch's. What exists keeps its class.

    Not reached: subclasses that others derived from torch's classes (``ShardedGradScaler`` is one),
    the functions behind the optimizers, and other processes (call it there too; those that fork
    inherit it). ``type(scaler) is torch.amp.GradScaler`` is false for ours.

    Options keep their meaning and their defaults. Optimizers keep float32 masters of 16-bit
    parameters and refuse what :mod:`amp_ext.optim` refuses: sparse and complex gradients,
    ``differentiable=True``.

    Args:
        optimizers: Patches ``torch.optim.Adam``, ``AdamW`` and ``SGD`` too.

    Returns:
        The patch, which ends itself.

    Raises:
        ImportError: If the compiled module does not load; nothing is patched then.
        RuntimeError: If the environment variable ``AMP_EXT_CPU_ISA`` names no instruction set.
    """
    ops.cpu_isa()  # so that a compiled module that does not load fails here, not in the training
    return TorchPatch({**_SCALERS, **(_OPTIMIZERS if optimizers else {})})
