"""The loop body of mixed-precision training: autocast, loss scale, accumulation, clipping, step."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from amp_ext.clip_grad import clip_grad_norm_
from amp_ext.grad_scaler import GradScaler
from amp_ext.hand_over import moved
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.checkpoints import keys_in_order
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.weight_average import WeightAverage
from amp_ext.plain_numbers import with_plain_numbers
from amp_ext.sharding import is_dtensor
from amp_ext.training.checkpoint_file import write_checkpoint
from amp_ext.training.config import MixedPrecisionConfig
from amp_ext.training.loss import loss_in, one_number
from amp_ext.training.metrics import StepMetrics
from amp_ext.training.put_back import Before
from amp_ext.training.random_state import random_state, set_random_state
from amp_ext.training.scaler import create_fp16_grad_scaler


class MixedPrecisionTrainer:
    """Trains any module in mixed precision, one call a batch.

    ::

        config = MixedPrecisionConfig(precision="fp16", max_grad_norm=1.0)
        optimizer = amp_ext.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = MixedPrecisionTrainer(model, optimizer, config, loss_function=F.cross_entropy)
        for inputs, targets in loader:
            metrics = trainer.train_step(inputs, targets)
        trainer.flush()
        print(metrics.to_dict())  # loss, loss_scale, grad_norm and skipped as numbers

    The precision follows from the parameters:

    * float32 parameters: the model and the loss function run under autocast.
    * All parameters in the configured 16 bits (``model.half()``, ``model.bfloat16()``): there is
      nothing to autocast. Floating tensors among the inputs are converted, the model runs as it is,
      and only the loss function runs under autocast, which computes losses in float32. Take an
      optimizer of ``amp_ext.optim``: it keeps float32 masters.
    * Some parameters in 16 bits (a frozen base, say): as with float32 parameters.
    * "fp32" switches autocast off, also around the caller's.

    Under a scaler a step whose gradients are inf or NaN is skipped, the scale falls, and the next
    step is as good as ever: a NaN loss costs its batch, or those accumulated with it. bf16 and fp32
    have no scaler and no such guard unless they are given one that only guards,
    ``scaler=amp_ext.GradScaler(device_type, init_scale=1.0, dynamic=False)``.

    The host waits for the GPU at one place: with a scheduler *and* a scaler or a guard of norms,
    before an optimizer step, for the end of the previous one. (Besides, torch's optimizers wait
    under a scaler, unless they are fused.) Train or eval mode is the caller's.

    The arguments are attributes.

    Attributes:
        optimizer: As given. Its gradients are dropped at the start of the next step, so they can
            still be looked at after one; under a scaler they may be scaled.
        scheduler: As given; see :meth:`finish_scheduler_step`.
        scaler: As given, or made for fp16, or None.
        average: A :class:`~amp_ext.optim.WeightAverage` with the config's ``average_decay``, or
            None. ``with trainer.average.swap():`` validates with the averages.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: MixedPrecisionConfig,
        *,
        loss_function: Callable[..., Tensor] | None = None,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """Checks that the parts fit, and makes the scaler that fp16 needs.

        Args:
            model: On its device and in its dtypes.
            optimizer: Over parameters of the model. One of ``amp_ext.optim`` clips inside its step:
                its groups take over the config's ``max_grad_norm``, if there is one, and it gets
                the config's ``norm_guard``.
            config: The settings.
            loss_function: Takes the model's output, and the targets if there are any; returns one
                number. Without it the model's output must be the loss or have it: as ``.loss``,
                ``["loss"]``, or the first item of a tuple.
            scheduler: Moves on after every optimizer step that was not skipped. A scheduler that
                counts epochs is stepped by the caller.
            scaler: A scaler in place of the one that the config asks for.

        Raises:
            TypeError: If a part is of another kind, or the scheduler needs a figure to step; or an
                average is wanted of an optimizer that is none of ``amp_ext.optim``.
            ValueError: If the optimizer has no parameters, their dtype does not fit the precision,
                the scaler is disabled, a number of the config does not fit a scaler or a guard, or
                an optimizer of others is to have a guard.
        """
        _check_kind("model", model, nn.Module)
        _check_kind("optimizer", optimizer, torch.optim.Optimizer)
        _check_kind("config", config, MixedPrecisionConfig)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "MixedPrecisionTrainer: scheduler must step without a figure, got "
                "ReduceLROnPlateau: step it yourself after each validation"
            )
        params = params_of(optimizer)
        _check_params(params, config)
        if scaler is not None:
            _check_kind("scaler", scaler, GradScaler)
            if not scaler.is_enabled():
                raise ValueError(
                    "MixedPrecisionTrainer: scaler must be enabled, got a disabled one"
                )
        elif config.needs_scaler:
            scaler = create_fp16_grad_scaler(
                params[0].device,
                init_scale=config.initial_loss_scale,
                growth_factor=config.growth_factor,
                backoff_factor=config.backoff_factor,
                growth_interval=config.growth_interval,
                min_scale=config.min_scale,
            )
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.loss_function = loss_function
        self.scheduler = scheduler
        self.scaler = scaler
        self._fused = optimizer if isinstance(optimizer, FusedOptimizer) else None
        guard = None
        if config.norm_guard is not None:
            if self._fused is None:
                raise ValueError(
                    "MixedPrecisionTrainer: optimizer must be one of amp_ext.optim with a "
                    f"norm_guard, got {type(optimizer).__name__}"
                )
            if self._fused.norm_guard is not None:
                raise ValueError(
                    "MixedPrecisionTrainer: optimizer must have no norm_guard where the config has "
                    "one, got one of its own"
                )
            guard = NormGuard(**config.norm_guard)
        decay: Any = config.average_decay
        self.average = None if decay is None else WeightAverage(optimizer, decay, model=model)  # type: ignore[arg-type]
        # Nothing is refused from here on, so that the optimizer is as before where something was.
        if guard is not None:
            self._fused.norm_guard = guard  # type: ignore[union-attr]
        if self._fused is not None and config.max_grad_norm is not None:
            for group in (optimizer.defaults, *optimizer.param_groups):
                group["max_grad_norm"] = config.max_grad_norm
        self._some_param = params[0]
        self._mixed = config.precision != "fp32"
        self._in_16_bits = self._mixed and all(
            param.dtype == config.dtype for param in model.parameters() if param.is_floating_point()
        )
        self._accumulated = 0  # batches since the last step
        self._scheduler_is_due = False
        # Values of the metrics without a scaler.
        with outside_inference_mode():
            self._no_scale = torch.ones((), device=params[0].device)
            self._not_skipped = torch.zeros((), dtype=torch.bool, device=params[0].device)
            self._no_loss = torch.full((), torch.nan, device=params[0].device)
        self._loss = self._no_loss  # of the last batch

    # Training.

    def train_step(self, inputs: Any, targets: Any = None) -> StepMetrics:
        """Trains on a batch; steps the optimizer when enough batches have accumulated.

        If the forward pass raises, the batch does not count. If the backward pass or the step
        raises, the accumulated gradients are discarded, and the next call starts anew. After an
        interrupt amid the step the scale and the scheduler may stand where they stood before it.

        Args:
            inputs: Arguments of the model: a tuple or list gives positional arguments, a
                mapping gives keywords, anything else is the one argument. (A model that takes one
                list gets ``([...],)``.)
            targets: Second argument of the loss function; None calls it with the output alone.

        Returns:
            The figures of this batch, on the device. ``grad_norm`` and ``skipped`` are None if the
            optimizer's turn has not come.

        Raises:
            ValueError: If there are targets and no loss function, or no loss of one number.
        """
        if targets is not None and self.loss_function is None:
            raise ValueError(
                "train_step: targets must be None without a loss_function, got "
                f"{type(targets).__name__}"
            )
        if self._accumulated == 0:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self._compute_loss(inputs, targets)
        batches = self.config.gradient_accumulation_steps
        share = loss / batches if batches > 1 else loss
        try:
            (share if self.scaler is None else self.scaler.scale(share)).backward()
            self._accumulated += 1
            self._loss = loss.detach()
            if self._accumulated < batches:
                return StepMetrics(self._loss, self._loss_scale())
            return self._step()
        except BaseException:  # also an interrupt, after which a notebook goes on
            self.discard()
            raise

    def flush(self) -> StepMetrics | None:
        """Steps with the batches that are left over; call it at the end of an epoch.

        The step takes the mean over the batches that there are, not over
        ``gradient_accumulation_steps``. The scheduler's step is finished as well.

        Returns:
            The figures of the step, with the loss of the last batch; None if nothing was left.
        """
        metrics = None
        if self._accumulated:
            correction = self.config.gradient_accumulation_steps / self._accumulated
            try:
                for param in params_of(self.optimizer):
                    if param.grad is not None:
                        param.grad.mul_(correction)
                metrics = self._step()
            except BaseException:
                self.discard()
                raise
        self.finish_scheduler_step()
        return metrics

    def discard(self) -> None:
        """Forgets the batches that have accumulated, and their gradients."""
        self._accumulated = 0
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            self.scaler._per_optimizer_states.clear()

    def finish_scheduler_step(self) -> None:
        """Moves the scheduler on if the last optimizer step was taken; waits for that step.

        At first only the GPU knows whether a step was skipped. So the scheduler moves on just
        before the next step: each step has the learning rate that it would have if skips were known
        at once, while in between ``scheduler.get_last_lr()`` may be that of the step before.
        :meth:`flush` and :meth:`state_dict` finish too.
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
            self.scheduler.step()

    def _guard(self) -> NormGuard | None:
        return None if self._fused is None else self._fused.norm_guard

    def _compute_loss(self, inputs: Any, targets: Any) -> Tensor:
        with self._autocast(self._mixed and not self._in_16_bits):
            if isinstance(inputs, Mapping):
                output = self.model(**{name: self._cast(value) for name, value in inputs.items()})
            elif isinstance(inputs, (tuple, list)):
                output = self.model(*map(self._cast, inputs))
            else:
                output = self.model(self._cast(inputs))
        if self.loss_function is None:
            return one_number(loss_in(output), "without a loss_function the model's output")
        with self._autocast(self._mixed):
            arguments = (output,) if targets is None else (output, targets)
            return one_number(self.loss_function(*arguments), "loss_function")

    def _autocast(self, enabled: bool) -> torch.autocast:
        return torch.autocast(self._some_param.device.type, self.config.dtype, enabled=enabled)

    def _cast(self, value: Any) -> Any:
        """Converts a floating input of a model that is in 16 bits throughout."""
        if self._in_16_bits and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.config.dtype)
        return value

    def _loss_scale(self) -> Tensor:
        if self.scaler is None:
            return self._no_scale
        scale, _ = self.scaler._check_scale_growth_tracker("train_step")
        return scale.clone()

    def _step(self) -> StepMetrics:
        """Clips, steps the optimizer, lets the scale and the scheduler follow."""
        self.finish_scheduler_step()
        loss_scale, grad_norm, skipped = self._loss_scale(), None, self._not_skipped
        if self._fused is None and self.config.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            grad_norm = clip_grad_norm_(params_of(self.optimizer), self.config.max_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            flags = self.scaler._found_inf_per_device(self.optimizer).values()
            found: Any = sum(moved(flag, loss_scale.device) for flag in flags)
            skipped = found != 0
            self.scaler.update()
        if self._fused is not None and self._fused.grad_norm is not None:
            grad_norm = self._fused.grad_norm.clone()
        if self._fused is not None and self._fused.norm_guard is not None:
            landed = self._fused.has_landed
            if landed is not None:
                skipped = skipped | moved(landed == 0, skipped.device)
        self._accumulated = 0
        self._scheduler_is_due = True
        if self.scaler is None and self._guard() is None:  # nothing to wait for
            self.finish_scheduler_step()
        averaged = None if self.average is None else self.average.n_averaged.clone()
        return StepMetrics(self._loss, loss_scale, grad_norm, skipped, averaged)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a resumed training needs beside the model and the random numbers.

        The dict has the states of the optimizer, the scaler, the scheduler, the guard of norms and
        the average, and the gradients that have accumulated: a resumed run has the same bits, also
        from the middle of an accumulation. Its tensors are those in use, as in an optimizer's
        ``state_dict()``: save them, or copy them to keep them.
        """
        self.finish_scheduler_step()
        gradients = [param.grad for param in params_of(self.optimizer)] if self._accumulated else []
        optimizer = self.optimizer.state_dict()
        # A schedule that computes with numpy leaves numpy's numbers in both dicts.
        if "param_groups" in optimizer:
            groups = with_plain_numbers(optimizer["param_groups"])
            optimizer = {**optimizer, "param_groups": groups}
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        guard = self._guard()
        return {
            "optimizer": optimizer,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "scheduler": with_plain_numbers(scheduler),
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
            ValueError: If only one side has a scheduler, or the batches that have accumulated do
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
        if (self.scheduler is None) != (state_dict["scheduler"] is None):
            here, there = ("none", "one") if self.scheduler is None else ("one", "none")
            raise ValueError(
                f"{operation}: state_dict must have {here} of a scheduler, got {there}"
            )
        params, loss = params_of(self.optimizer), state_dict.get("loss")
        with outside_inference_mode():
            gradients = self._copied_gradients(operation, state_dict, params)
            # Older files lack the loss of the last batch.
            loss = self._no_loss if loss is None else loss.to(self._some_param.device, copy=True)
            schedule = copy.deepcopy(state_dict["scheduler"])  # torch's loads remove entries
        tensors: list[Tensor] = []
        optimizer = self._fused
        written = [vars(self.optimizer)] if optimizer is None else optimizer.written_by_load()
        written.append(vars(self))
        if self.scaler is not None:
            written.append(vars(self.scaler))
            tensors = [each for each in vars(self.scaler).values() if isinstance(each, Tensor)]
        with contextlib.ExitStack() as undo:  # also an interrupt, after which a notebook goes on
            undo.callback(set_random_state, random_state())
            undo.callback(Before(written, tensors).put_back)
            undo.callback(_set_grads, params, [param.grad for param in params])
            if self.scheduler is not None:
                undo.callback(self.scheduler.load_state_dict, dict(self.scheduler.state_dict()))
            if model is not None:
                undo.callback(self.model.load_state_dict, copy.deepcopy(self.model.state_dict()))
                self.model.load_state_dict(model)
            self.optimizer.load_state_dict(state_dict["optimizer"])
            if self.scaler is not None and state_dict["scaler"] is not None:
                self.scaler.load_state_dict(state_dict["scaler"])
                self.scaler.scale(loss)  # makes the scaler's tensors, for a flush
            if self.scheduler is not None:
                self.scheduler.load_state_dict(schedule)
            if self.average is not None:
                undo.callback(
                    self.average.load_state_dict, copy.deepcopy(self.average.state_dict())
                )
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


def _load_unless_equal(guard: NormGuard, state_dict: dict[str, Any]) -> None:
    if guard.state_dict() != state_dict:
        guard.load_state_dict(state_dict)


def _set_grads(params: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Sets the gradients of parameters, if there are any to set."""
    for param, grad in zip(params, gradients, strict=False):
        param.grad = grad


def _check_kind(name: str, part: object, kind: type) -> None:
    if not isinstance(part, kind):
        wanted = f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
        raise TypeError(
            f"MixedPrecisionTrainer: {name} must be {wanted}, got {type(part).__name__}"
        )


def _check_params(params: list[Tensor], config: MixedPrecisionConfig) -> None:
    """Checks that the parameters can be trained in the precision."""
    if not params:
        raise ValueError("MixedPrecisionTrainer: optimizer must have parameters, got none")
    dtypes = {param.dtype for param in params}
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if dtype in dtypes and config.precision != precision:
            raise ValueError(
                f"MixedPrecisionTrainer: config.precision must be {precision!r} for parameters of "
                f"{dtype}, got {config.precision!r}"
            )


def _accumulation(batches: int, scaled: bool, params: int) -> str:
    """Describes what the gradients of an unfinished accumulation are, for comparison and errors."""
    return f"{batches} to a step, {'scaled' if scaled else 'unscaled'}, with {params} parameters"
