"""The state of a trainer in checkpoints: collects, reads and restores it."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.checkpoints import keys_in_order
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.plain_numbers import with_plain_numbers
from amp_ext.sharding import is_dtensor
from amp_ext.training.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from amp_ext.training.trainer import MixedPrecisionTrainer

__all__ = ["file_of", "listed", "load_file", "load_state", "state_of"]


def state_of(trainer: MixedPrecisionTrainer) -> dict[str, Any]:
    """Returns the state dict of a trainer; its tensors are not copies."""
    is_accumulating = trainer._accumulated > 0
    optimizer = trainer.optimizer.state_dict()
    # Converts numpy numbers, which schedulers that compute with numpy leave in both dicts.
    if "param_groups" in optimizer:
        optimizer = {**optimizer, "param_groups": with_plain_numbers(optimizer["param_groups"])}
    schedules: Any = [each.state_dict() for each in listed(trainer.scheduler)]
    if not isinstance(trainer.scheduler, Sequence):
        schedules = schedules[0] if schedules else None
    scaler, guard, average = trainer.scaler, trainer._guard(), trainer.average
    return {
        "optimizer": optimizer,
        "scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": with_plain_numbers(schedules),
        **({} if guard is None else {"norm_guard": guard.state_dict()}),
        "gradient_accumulation_steps": trainer.config.gradient_accumulation_steps,
        "accumulated": trainer._accumulated,
        "gradients": [each.grad for each in params_of(trainer.optimizer)] * is_accumulating,
        "loss": trainer._loss if is_accumulating else None,
        **({} if average is None else {"average": average.state_dict()}),
    }


def file_of(trainer: MixedPrecisionTrainer, extra: Any) -> dict[str, Any]:
    """Returns the content of a checkpoint file."""
    _check_not_sharded("MixedPrecisionTrainer.save", trainer.model)
    model = trainer.model.state_dict()
    metadata = getattr(model, "_metadata", {})  # the versions of the modules
    return {
        "model": dict(model),
        "model_metadata": {name: dict(each) for name, each in metadata.items()},
        "trainer": trainer.state_dict(),
        "random": random_state(),
        "extra": extra,
    }


def load_file(trainer: MixedPrecisionTrainer, path: str | os.PathLike[str]) -> Any:
    """Restores a trainer, its model and torch's generators from a file; returns ``extra``."""
    operation = "MixedPrecisionTrainer.load"
    _check_not_sharded(operation, trainer.model)
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
    load_state(trainer, operation, content["trainer"], model, content["random"])
    return content["extra"]


def load_state(
    trainer: MixedPrecisionTrainer,
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
    here, there = _count(trainer.scheduler), _count(state_dict["scheduler"])
    if here != there:
        raise ValueError(f"{operation}: state_dict must have {here} of a scheduler, got {there}")
    params, loss = params_of(trainer.optimizer), state_dict.get("loss")
    with outside_inference_mode():
        gradients = _copied_gradients(trainer, operation, state_dict, params)
        # Older files lack the loss of the last batch.
        loss = trainer._no_loss if loss is None else loss.to(params[0].device, copy=True)
        # Copies the schedules because SequentialLR.load_state_dict removes their _schedulers.
        schedules = listed(copy.deepcopy(state_dict["scheduler"]))
    fused, scaler, average = trainer._fused, trainer.scaler, trainer.average
    written = [vars(trainer.optimizer)] if fused is None else fused.written_by_load()
    written += [vars(trainer), *([] if scaler is None else [vars(scaler)])]
    with contextlib.ExitStack() as undo:  # undoes all changes after an error or interrupt
        undo.callback(set_random_state, random_state())
        for each in written:
            undo.callback(_set_entries, each, dict(each))
        for tensor in [] if scaler is None else vars(scaler).values():
            if isinstance(tensor, Tensor):
                undo.callback(tensor.copy_, tensor.clone())
        undo.callback(_set_grads, params, [param.grad for param in params])
        for scheduler in listed(trainer.scheduler):
            undo.callback(scheduler.load_state_dict, dict(scheduler.state_dict()))
        if model is not None:
            undo.callback(trainer.model.load_state_dict, _copied(trainer.model.state_dict()))
            trainer.model.load_state_dict(model)
        trainer.optimizer.load_state_dict(state_dict["optimizer"])
        if scaler is not None and state_dict["scaler"] is not None:
            scaler.load_state_dict(state_dict["scaler"])
            scaler.scale(loss)  # creates the scaler's tensors, which flush() needs
        for scheduler, schedule in zip(listed(trainer.scheduler), schedules, strict=False):
            scheduler.load_state_dict(schedule)
        if average is not None:
            undo.callback(average.load_state_dict, _copied(average.state_dict()))
            if state_dict.get("average") is None:  # older files lack this entry
                average.restart()
            else:
                average.load_state_dict(state_dict["average"])
        guard = trainer._guard()
        # The guard is loaded last, since an undo would not restore whether it skipped a step.
        if guard is not None and "norm_guard" in state_dict:
            undo.callback(_load_unless_equal, guard, guard.state_dict())
            guard.load_state_dict(state_dict["norm_guard"])
        _set_grads(params, gradients)
        trainer._accumulated, trainer._loss = state_dict["accumulated"], loss
        trainer._scheduler_is_due = False
        if random is not None:
            set_random_state(random)
        undo.pop_all()


def _check_not_sharded(operation: str, model: nn.Module) -> None:
    """Raises ValueError if parameters of a model are sharded over processes."""
    names = [name for name, value in model.state_dict().items() if is_dtensor(value)]
    names += [
        name or type(module).__name__
        for name, module in model.named_modules()
        if type(module).__name__ == "FullyShardedDataParallel"
    ]
    if names:
        raise ValueError(
            f"{operation}: {names[0]!r} is sharded over ranks. Use "
            "torch.distributed.checkpoint for the model and the optimizer."
        )


def _copied_gradients(
    trainer: MixedPrecisionTrainer,
    operation: str,
    state_dict: Mapping[str, Any],
    params: list[Tensor],
) -> list[Tensor | None]:
    """Returns copies of the saved gradients, or [] between two accumulations; checks them."""
    if not state_dict["accumulated"]:
        return []
    gradients = state_dict["gradients"]
    if trainer._fused is not None:
        keys = keys_in_order(trainer._fused, state_dict["optimizer"])
        if set(keys) == set(range(len(gradients))):
            gradients = [gradients[key] for key in keys]
    batches = trainer.config.gradient_accumulation_steps
    wanted = _accumulation(batches, trainer.scaler, len(params))
    batches = state_dict["gradient_accumulation_steps"]
    got = _accumulation(batches, state_dict["scaler"], len(gradients))
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


def listed(value: Any) -> list[Any]:
    """Returns a list of schedulers, or of their states, from a list, a single one or None."""
    if value is None:
        return []
    return [*value] if isinstance(value, Sequence) else [value]


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


def _accumulation(batches: int, scaler: Any, params: int) -> str:
    """Describes the gradients of an unfinished accumulation, for comparison and for errors."""
    scaled = "unscaled" if scaler is None else "scaled"
    return f"{batches} batches a step, {scaled} and {params} parameters"
