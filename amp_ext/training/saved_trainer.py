"""What a trainer saves, and how another goes on from it with the same bits."""

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

from amp_ext.grad_scaler import GradScaler
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.checkpoints import keys_in_order
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.weight_average import WeightAverage
from amp_ext.optim.weight_decay_scheduler import WeightDecayScheduler
from amp_ext.plain_numbers import with_plain_numbers
from amp_ext.sharding import is_dtensor
from amp_ext.training.checkpoint_file import write_checkpoint
from amp_ext.training.config import MixedPrecisionConfig
from amp_ext.training.random_state import random_state, set_random_state

__all__ = ["SavedTrainer", "Scheduler"]

Scheduler = LRScheduler | WeightDecayScheduler


class SavedTrainer:
    """The parts of a :class:`~amp_ext.training.MixedPrecisionTrainer`, which go on from a file."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: MixedPrecisionConfig
    scheduler: Scheduler | Sequence[Scheduler] | None
    scaler: GradScaler | None
    average: WeightAverage | None
    _fused: FusedOptimizer | None  # the optimizer, if it is one of ours
    _some_param: Tensor  # of the optimizer
    _accumulated: int  # batches since the last step
    _loss: Tensor  # of the last batch
    _no_loss: Tensor
    _scheduler_is_due: bool

    def finish_scheduler_step(self) -> None:
        """Steps the scheduler if the last optimizer step was taken; waits for that step.

        At first only the GPU knows whether a step was skipped. So the scheduler moves on just
        before the next step: each step has the learning rate that it would have if skips were known
        at once, while in between ``scheduler.get_last_lr()`` may be that of the step before.
        :meth:`flush` and :meth:`state_dict` finish too. An exception of the scheduler is raised
        again, but :meth:`state_dict` and :meth:`save` warn instead: no checkpoint is lost.
        """
        if not self._scheduler_is_due or self.scheduler is None:
            return
        guard = self._guard()
        if self.scaler is not None:
            is_skipped = self.scaler.last_step_skipped(self.optimizer, wait=True)
        else:
            is_skipped = guard is not None and guard.last_step_skipped(wait=True)
        self._scheduler_is_due = False  # first, or an exception would come at each further step
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
        """Returns all that a resumed training needs beside the model and the random numbers.

        The dict has the states of the optimizer, the scaler, the scheduler, the guard of norms and
        the average, and the gradients that have accumulated: a resumed run has the same bits, also
        from the middle of an accumulation. Its tensors are those in use, as in an optimizer's
        ``state_dict()``: save them, or copy them to keep them.
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
        # A schedule that computes with numpy leaves numpy's numbers in both dicts.
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
        """Goes on where :meth:`state_dict` was called. Load the model first, or use :meth:`load`.

        The precision may have changed in between: a saved scaler is left out where this trainer has
        none, and this trainer's starts as configured where none was saved. A guard keeps its
        statistics where none were saved, and an average begins anew.

        Args:
            state_dict: From ``state_dict()``.

        Raises:
            KeyError: If an entry is missing.
            ValueError: If the numbers of schedulers differ, or the batches that have accumulated do
                not fit this trainer. Nothing has been changed after any error, nor after an
                interrupt.
        """
        self._load("MixedPrecisionTrainer.load_state_dict", state_dict)

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Writes a file from which :meth:`load` goes on with the same bits.

        The file holds the state of the model, all of :meth:`state_dict`, torch's random generators
        (that of the CPU and those of all GPUs) and ``extra``. It replaces an older file in one
        step, once it is on the disk: a process that is killed at any moment leaves the old file or
        the new one, and never a part of either. A ``<name>.<16 digits>.tmp`` that such a process
        leaves can be deleted. The mode of a file stays, and so do symbolic links. The dicts of the
        file are plain ones, so that a program in C++ can read it too.

        Of several processes that train together, let one save. Waits for the device.

        Args:
            path: The file; its folder must be there.
            extra: All else that the caller needs to go on: the number of the epoch, the position in
                the data, the state of a generator of its own. Tensors, numbers, text, None, and
                lists, tuples, sets and dicts of these.

        Raises:
            ValueError: If parameters are sharded over ranks, or something can't be read with
                ``weights_only=True``, by its class; or if a folder, a device, a pipe or a socket is
                at the path.
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
        """Goes on where :meth:`save` was called, of the same model, optimizer and settings.

        The model, the optimizer and the generators take over all of the file or nothing: after an
        error or an interrupt they are as before. Takes a copy of the model meanwhile, and reads
        with ``weights_only=True``. The file may come from another precision or device; generators
        of GPUs that are not there are left out.

        Args:
            path: The file.

        Returns:
            The ``extra`` that was saved.

        Raises:
            KeyError: If an entry is missing.
            ValueError: If parameters are sharded over ranks, or what :meth:`load_state_dict`
                refuses.
            RuntimeError: If the model's parameters have other names or shapes.
            OSError: If there is no such file.
        """
        operation = "MixedPrecisionTrainer.load"
        self._check_not_sharded(operation)
        with outside_inference_mode():
            content = torch.load(path, map_location="cpu", weights_only=True)
        missing = [name for name in ("model", "trainer", "random", "extra") if name not in content]
        if missing:
            raise KeyError(
                f"{operation}: the file must have {missing}, got {list(content)[:8]}; those of "
                "MixedPrecisionTrainer.save have"
            )
        model: Any = content["model"]
        if "model_metadata" in content:  # older files and those of programs in C++ lack it
            model = OrderedDict(model)
            model._metadata = content["model_metadata"]
        self._load(operation, content["trainer"], model, content["random"])
        return content["extra"]

    def _check_not_sharded(self, operation: str) -> None:
        """Checks that this process has all of the model, and not one part of several."""
        names = [name for name, value in self.model.state_dict().items() if is_dtensor(value)]
        names += [
            name or type(module).__name__
            for name, module in self.model.named_modules()
            if type(module).__name__ == "FullyShardedDataParallel"
        ]
        if names:
            raise ValueError(
                f"{operation}: parameters must not be sharded over ranks, got {names[0]!r}: use "
                "torch.distributed.checkpoint for the model and the optimizer"
            )

    def _load(
        self,
        operation: str,
        state_dict: Mapping[str, Any],
        model: Mapping[str, Any] | None = None,
        random: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes over a state, and the states of the model and the generators if they are given."""
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
            schedules = copy.deepcopy(state_dict["scheduler"])  # torch's loads remove entries
        if not isinstance(schedules, Sequence):
            schedules = [schedules]
        tensors: list[Tensor] = []
        optimizer = self._fused
        written = [vars(self.optimizer)] if optimizer is None else optimizer.written_by_load()
        written.append(vars(self))
        if self.scaler is not None:
            written.append(vars(self.scaler))
            tensors = [each for each in vars(self.scaler).values() if isinstance(each, Tensor)]
        with contextlib.ExitStack() as undo:  # also an interrupt, after which a notebook goes on
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
                self.scaler.scale(loss)  # makes the scaler's tensors, for a flush
            for scheduler, schedule in zip(self._schedulers(), schedules, strict=False):
                scheduler.load_state_dict(schedule)
            if self.average is not None:
                undo.callback(self.average.load_state_dict, _copied(self.average.state_dict()))
                average = state_dict.get("average")  # older files lack it
                if average is None:
                    self.average.restart()
                else:
                    self.average.load_state_dict(average)
            guard = self._guard()
            if guard is not None and "norm_guard" in state_dict:  # last: a load drops its history
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
        """Returns checked copies of the gradients that have accumulated, if there are any."""
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
                f"{operation}: batches that have accumulated must be {wanted}, got {got}: call "
                "flush() before you save"
            )
        return [
            None if grad is None else grad.to(param.device, copy=True)
            for param, grad in zip(params, gradients, strict=True)
        ]


def _count(schedules: Any) -> str:
    """Describes how many schedulers there are, or how many states of them."""
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
    """Gives a dict, such as the attributes of an object, the entries that it had."""
    for name in entries.keys() - before.keys():
        del entries[name]
    entries.update(before)


def _set_grads(params: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Sets the gradients of parameters, if there are any to set."""
    for param, grad in zip(params, gradients, strict=False):
        param.grad = grad


def _accumulation(batches: int, scaled: bool, params: int) -> str:
    """Describes what the gradients of an unfinished accumulation are, for comparison and errors."""
    return f"{batches} to a step, {'scaled' if scaled else 'unscaled'}, with {params} parameters"
