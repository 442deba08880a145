"""Saves trainers to checkpoints, and resumes them with bit-identical results."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.checkpoints import keys_in_order
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.weight_average import WeightAverage
from amp_ext.optim.weight_decay_scheduler import WeightDecayScheduler
from amp_ext.plain_numbers import with_plain_numbers
from amp_ext.scaler import GradScaler
from amp_ext.sharding import is_dtensor
from amp_ext.training.checkpoint_file import write_checkpoint
from amp_ext.training.config import MixedPrecisionConfig
from amp_ext.training.random_state import random_state, set_random_state

__all__ = ["SavedTrainer", "Scheduler"]

Scheduler = LRScheduler | WeightDecayScheduler


class SavedTrainer:
    """Base class of :class:`~amp_ext.training.MixedPrecisionTrainer` that saves and loads it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: MixedPrecisionConfig
    scheduler: Scheduler | Sequence[Scheduler] | None
    scaler: GradScaler | None
    average: WeightAverage | None
    _fused: FusedOptimizer | None  # the optimizer, if it is one of amp_ext
    _some_param: Tensor  # the first parameter of the optimizer
    _accumulated: int  # number of batches since the last step
    _loss: Tensor  # loss of the last batch
    _no_loss: Tensor  # NaN, for metrics before the first batch
    _scheduler_is_due: bool

    def finish_scheduler_step(self) -> None:
        """Steps the scheduler unless the last optimizer step was skipped; waits for that step.

        ``train_step`` calls this just before the next optimizer step, because at first only the GPU
        knows whether a step was skipped. Each step uses the right learning rate, but between two
        steps ``scheduler.get_last_lr()`` may be one step behind. :meth:`flush` and
        :meth:`state_dict` call this too. If the scheduler raises an exception, :meth:`state_dict`
        and :meth:`save` only warn, so that no checkpoint is lost.
        """
        if not self._scheduler_is_due or self.scheduler is None:
            return
        guard = self._guard()
        if self.scaler is not None:
            is_skipped = self.scaler.last_step_skipped(self.optimizer, wait=True)
        else:
            is_skipped = guard is not None and guard.last_step_skipped(wait=True)
        self._scheduler_is_due = False  # set first, so that an exception is not raised again
        if not is_skipped:
            for scheduler in self._schedulers():
                scheduler.step()

    def _schedulers(self) -> list[Any]:
        if self.scheduler is None:
            return []
        return [*self.scheduler] if isinstance(self.scheduler, Sequence) else [self.scheduler]

    def _guard(self) -> NormGuard | None:
        return None if self._fused is None else self._fused.norm_guard

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the training, except for the model and the random generators.

        The dict has the states of the optimizer, scaler, scheduler, norm guard and average, and the
        accumulated gradients: a resumed run is bit-identical even in the middle of an accumulation.
        Its tensors are not copies, as in an optimizer's ``state_dict()``; later steps change them.
        """
        try:
            self.finish_scheduler_step()
        except Exception as error:
            warnings.warn(
                f"MixedPrecisionTrainer: the scheduler's step raised {type(error).__name__}: "
                f"{error}. The state is returned with the scheduler as it is now.",
                stacklevel=2,
            )
        gradients = [param.grad for param in params_of(self.optimizer)] if self._accumulated else []
        optimizer = self.optimizer.state_dict()
        # Converts numpy numbers, which schedulers that compute with numpy leave in both dicts.
        if "param_groups" in optimizer:
            groups = with_plain_numbers(optimizer["param_groups"])
            optimizer = {**optimizer, "param_groups": groups}
        schedules: Any = [each.state_dict() for each in self._schedulers()]
        if not isinstance(self.scheduler, Sequence):
            schedules = schedules[0] if schedules else None
        guard = self._guard()
        return {
            "optimizer": optimizer,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "scheduler": with_plain_numbers(schedules),
            **({} if guard is None else {"norm_guard": guard.state_dict()}),
            "gradient_accumulation_steps": self.config.gradient_accumulation_steps,
            "accumulated": self._accumulated,
            "gradients": gradients,
            "loss": self._loss if self._accumulated else None,
            **({} if self.average is None else {"average": self.average.state_dict()}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the state of :meth:`state_dict`. Load the model first, or use :meth:`load`.

        The state may come from another precision: if this trainer has no scaler, a saved one is
        ignored, and if no scaler was saved, this trainer's starts as configured. Without a saved
        state, a norm guard keeps its statistics and an average restarts. After any error or
        interrupt, nothing has changed.

        Args:
            state_dict: The result of ``state_dict()``.

        Raises:
            KeyError: If an entry is missing.
            ValueError: If the number of schedulers differs, or the accumulated batches do not fit
                this trainer.
        """
        self._load("MixedPrecisionTrainer.load_state_dict", state_dict)

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Writes a checkpoint file from which :meth:`load` resumes with bit-identical results.

        The file has the state of the model, the result of :meth:`state_dict`, torch's random
        generators (of the CPU and all GPUs) and ``extra``. It replaces an older file atomically: a
        process that is killed leaves the old file or the new one, and maybe a temporary
        ``<name>.<16 digits>.tmp``, which can be deleted. The file keeps the mode of the old file,
        and a symbolic link keeps pointing to it. All dicts in it are plain ones, so that C++
        programs can read it.

        Waits for the device. If several processes train together, only one of them should save.

        Args:
            path: Path of the file, in an existing folder.
            extra: Further data of the caller, such as the epoch, the position in the data or the
                state of a generator: tensors, numbers, strings, None, and lists, tuples, sets and
                dicts of these.

        Raises:
            ValueError: If parameters are sharded over ranks, if ``torch.load`` would refuse a value
                with ``weights_only=True``, or if the path is a folder, device, pipe or socket.
            OSError: If the file can't be written. The old file is still there after any error.
        """
        operation = "MixedPrecisionTrainer.save"
        self._check_not_sharded(operation)
        model = self.model.state_dict()
        metadata = getattr(model, "_metadata", {})  # the versions of the modules
        content = {
            "model": dict(model),
            "model_metadata": {name: dict(each) for name, each in metadata.items()},
            "trainer": self.state_dict(),
            "random": random_state(),
            "extra": extra,
        }
        write_checkpoint(operation, content, path)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Restores a checkpoint of :meth:`save` with the same model, optimizer and settings.

        After an error or an interrupt, the model, the optimizer and the generators are as before;
        to restore them, the call holds a copy of the model. Reads with ``weights_only=True``. The
        file may come from another precision or device. Generators of missing GPUs are skipped.

        Args:
            path: Path of the file.

        Returns:
            The ``extra`` that was saved.

        Raises:
            KeyError: If an entry is missing.
            ValueError: If parameters are sharded over ranks, or :meth:`load_state_dict` raises it.
            RuntimeError: If the model's parameters have other names or shapes.
            OSError: If the file does not exist or can't be read.
        """
        operation = "MixedPrecisionTrainer.load"
        self._check_not_sharded(operation)
        with outside_inference_mode():
            content = torch.load(path, map_location="cpu", weights_only=True)
        missing = [name for name in ("model", "trainer", "random", "extra") if name not in content]
        if missing:
            raise KeyError(
                f"{operation}: the file lacks {missing} and has {list(content)[:8]}. Load a file "
                "that MixedPrecisionTrainer.save() wrote."
            )
        model: Any = content["model"]
        if "model_metadata" in content:  # older files and those of programs in C++ lack it
            model = OrderedDict(model)
            model._metadata = content["model_metadata"]
        self._load(operation, content["trainer"], model, content["random"])
        return content["extra"]

    def _check_not_sharded(self, operation: str) -> None:
        """Checks that the parameters of the model are not sharded over processes."""
        names = [name for name, value in self.model.state_dict().items() if is_dtensor(value)]
        names += [
            name or type(module).__name__
            for name, module in self.model.named_modules()
            if type(module).__name__ == "FullyShardedDataParallel"
        ]
        if names:
            raise ValueError(
                f"{operation}: {names[0]!r} is sharded over ranks. Use "
                "torch.distributed.checkpoint for the model and the optimizer."
            )

    def _load(
        self,
        operation: str,
        state_dict: Mapping[str, Any],
        model: Mapping[str, Any] | None = None,
        random: Mapping[str, Any] | None = None,
    ) -> None:
        """Loads a state dict, and the states of the model and the generators if given."""
        entries = ("optimizer", "scaler", "scheduler", "gradient_accumulation_steps")
        wanted = (*entries, "accumulated", "gradients")
        missing = [name for name in wanted if name not in state_dict]
        if missing:
            raise KeyError(f"{operation}: state_dict must have {missing}, got {list(state_dict)}")
        here, there = _count(self.scheduler), _count(state_dict["scheduler"])
        if here != there:
            raise ValueError(
                f"{operation}: state_dict must have {here} of a scheduler, got {there}"
            )
        params, loss = params_of(self.optimizer), state_dict.get("loss")
        with outside_inference_mode():
            gradients = self._copied_gradients(operation, state_dict, params)
            # Older files lack the loss of the last batch.
            loss = self._no_loss if loss is None else loss.to(self._some_param.device, copy=True)
            # Copies the schedules because load_state_dict of some torch schedulers removes entries.
            schedules = copy.deepcopy(state_dict["scheduler"])
        if not isinstance(schedules, Sequence):
            schedules = [schedules]
        tensors: list[Tensor] = []
        optimizer = self._fused
        written = [vars(self.optimizer)] if optimizer is None else optimizer.written_by_load()
        written.append(vars(self))
        if self.scaler is not None:
            written.append(vars(self.scaler))
            tensors = [each for each in vars(self.scaler).values() if isinstance(each, Tensor)]
        with contextlib.ExitStack() as undo:  # undoes all changes after an error or interrupt
            undo.callback(set_random_state, random_state())
            for each in written:
                undo.callback(_set_entries, each, dict(each))
            for tensor in tensors:
                undo.callback(tensor.copy_, tensor.clone())
            undo.callback(_set_grads, params, [param.grad for param in params])
            for scheduler in self._schedulers():
                undo.callback(scheduler.load_state_dict, dict(scheduler.state_dict()))
            if model is not None:
                undo.callback(self.model.load_state_dict, _copied(self.model.state_dict()))
                self.model.load_state_dict(model)
            self.optimizer.load_state_dict(state_dict["optimizer"])
            if self.scaler is not None and state_dict["scaler"] is not None:
                self.scaler.load_state_dict(state_dict["scaler"])
                self.scaler.scale(loss)  # creates the scaler's tensors, which flush() needs
            for scheduler, schedule in zip(self._schedulers(), schedules, strict=False):
                scheduler.load_state_dict(schedule)
            if self.average is not None:
                undo.callback(self.average.load_state_dict, _copied(self.average.state_dict()))
                average = state_dict.get("average")  # older files lack this entry
                if average is None:
                    self.average.restart()
                else:
                    self.average.load_state_dict(average)
            guard = self._guard()
            # The guard is loaded last, since an undo would not restore its history.
            if guard is not None and "norm_guard" in state_dict:
                undo.callback(_load_unless_equal, guard, guard.state_dict())
                guard.load_state_dict(state_dict["norm_guard"])
            _set_grads(params, gradients)
            self._accumulated, self._loss = state_dict["accumulated"], loss
            self._scheduler_is_due = False
            if random is not None:
                set_random_state(random)
            undo.pop_all()

    def _copied_gradients(
        self, operation: str, state_dict: Mapping[str, Any], params: list[Tensor]
    ) -> list[Tensor | None]:
        """Returns copies of the saved gradients, or [] between two accumulations; checks them."""
        if not state_dict["accumulated"]:
            return []
        gradients = state_dict["gradients"]
        if self._fused is not None:
            keys = keys_in_order(self._fused, state_dict["optimizer"])
            if set(keys) == set(range(len(gradients))):
                gradients = [gradients[key] for key in keys]
        scaled = self.scaler is not None
        wanted = _accumulation(self.config.gradient_accumulation_steps, scaled, len(params))
        scaled = state_dict["scaler"] is not None
        got = _accumulation(state_dict["gradient_accumulation_steps"], scaled, len(gradients))
        if wanted != got:
            raise ValueError(
                f"{operation}: the file was saved while gradients accumulated ({got}), which do "
                f"not fit this trainer ({wanted}). Call flush() before save(), or construct the "
                "trainer as it was saved."
            )
        return [
            None if grad is None else grad.to(param.device, copy=True)
            for param, grad in zip(params, gradients, strict=True)
        ]


def _count(schedules: Any) -> str:
    """Returns the number of schedulers, or of their states, in words."""
    if isinstance(schedules, Sequence):
        return f"a list of {len(schedules)}"
    return "none" if schedules is None else "one"


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a module's state dict; ``copy.deepcopy`` refuses tensors in CSR layouts."""
    copied = OrderedDict(
        (name, value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value))
        for name, value in state.items()
    )
    if hasattr(state, "_metadata"):  # the versions of the modules
        copied._metadata = copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    return copied


def _load_unless_equal(guard: NormGuard, state_dict: dict[str, Any]) -> None:
    if guard.state_dict() != state_dict:
        guard.load_state_dict(state_dict)


def _set_entries(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restores the entries that a dict, such as ``vars(object)``, had before."""
    for name in entries.keys() - before.keys():
        del entries[name]
    entries.update(before)


def _set_grads(params: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Sets the gradients of parameters; does nothing if ``gradients`` is empty."""
    for param, grad in zip(params, gradients, strict=False):
        param.grad = grad


def _accumulation(batches: int, scaled: bool, params: int) -> str:
    """Describes the gradients of an unfinished accumulation, for comparison and for errors."""
    return f"{batches} batches a step, {'scaled' if scaled else 'unscaled'} and {params} parameters"
