"""The body of a mixed-precision training loop: autocast, loss scaling, accumulation, clipping."""

from __future__ import annotations

import copy
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from amp_ext.amp_protocol import sum_of_flags, to_device
from amp_ext.clip_grad import clip_grad_norm_
from amp_ext.nan_loss import drop_iteration
from amp_ext.optim import WeightAverage, WeightDecayScheduler
from amp_ext.optim.checkpoints import keys_in_order, read_state_dict
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.params import params_of
from amp_ext.plain_numbers import with_plain_numbers
from amp_ext.scaler import GradScaler
from amp_ext.sharding import is_dtensor
from amp_ext.training.config import MixedPrecisionConfig

Scheduler = LRScheduler | WeightDecayScheduler


@dataclass(frozen=True, eq=False)
class StepMetrics:
    """Metrics of one ``train_step``.

    Every tensor has one element on its device, and later steps do not change it. ``float()``,
    ``bool()``, ``.item()``, printing and :meth:`to_dict` wait for the GPU. Nothing else waits.
    After a batch that only accumulates gradients, the last two metrics are None.

    Attributes:
        loss: Loss of the batch as the loss function returned it, neither scaled nor divided; None
            for a ``flush`` that directly follows the load of a checkpoint.
        loss_scale: Loss scale of this batch; 1 without a scaler.
        grad_norm: Norm of the unscaled gradients before clipping; None if it is not measured
            (without ``max_grad_norm`` and a guard).
        skipped: Bool, true if the step was skipped by the scaler, because of inf or NaN, or by the
            optimizer's ``norm_guard``; always false without both.
    """

    loss: Tensor | None
    loss_scale: Tensor
    grad_norm: Tensor | None = None
    skipped: Tensor | None = None

    def to_dict(self) -> dict[str, float | bool | None]:
        """Returns all metrics as Python numbers; waits for the GPU."""
        return {name: None if each is None else each.item() for name, each in vars(self).items()}


class MixedPrecisionTrainer:
    """Trains a module in mixed precision, with one call per batch.

    ::

        config = MixedPrecisionConfig(precision="fp16", max_grad_norm=1.0)
        optimizer = amp_ext.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = MixedPrecisionTrainer(model, optimizer, config, loss_function=F.cross_entropy)
        for inputs, targets in loader:
            metrics = trainer.train_step(inputs, targets)
        trainer.flush()
        print(metrics.to_dict())  # loss, loss_scale, grad_norm and skipped as numbers

    Autocast depends on the dtypes of the model's parameters:

    * All in the configured 16-bit dtype (after ``model.half()`` or ``model.bfloat16()``): the model
      runs without autocast, on inputs whose floating-point tensors are converted to that dtype. The
      loss function runs under autocast, which computes losses in float32. Use an optimizer of
      ``amp_ext.optim``, which keeps float32 master weights.
    * Otherwise (float32, or only some in 16 bits, such as a frozen base): the model and the loss
      function run under autocast.
    * The precision "fp32" disables autocast, even if the caller has enabled it.

    With a scaler, a step with inf or NaN gradients is skipped, and the scale is reduced. A NaN loss
    then only wastes its batch, or the batches accumulated with it. bf16 and fp32 have no scaler. To
    skip such steps there too, pass a scaler with a constant scale of 1:
    ``scaler=amp_ext.GradScaler(device_type, init_scale=1.0, dynamic=False)``.

    The CPU waits for the GPU in one case: with a scheduler *and* a scaler or a norm guard, the
    first ``train_step`` after an optimizer step waits for that step to end. (torch's optimizers
    also wait with a scaler, unless they are fused.) The caller switches between train and eval
    mode.

    The arguments of the constructor are attributes.

    Attributes:
        optimizer: The optimizer. Its gradients stay until the next step starts, so that the caller
            can inspect them; with a scaler they may still be scaled.
        scheduler: The scheduler or list of schedulers; see :meth:`finish_scheduler_step`.
        scaler: The given scaler, a new one for fp16, or None.
        average: A :class:`~amp_ext.optim.WeightAverage` with the config's ``average_decay``, or
            None. To validate with the averages, use ``with trainer.average.swap():``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: MixedPrecisionConfig,
        *,
        loss_function: Callable[..., Tensor] | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """Checks the arguments, and creates a scaler for fp16 if none is given.

        Args:
            model: The model, already on its device and in its dtypes.
            optimizer: An optimizer of the model's parameters. One of ``amp_ext.optim`` clips inside
                its step: the config's ``max_grad_norm``, unless None, is set on it.
            config: The settings.
            loss_function: Function of the model's output, and of the targets if there are any, that
                returns a tensor of one number. None takes the loss from the model's output: the
                output itself, its ``.loss``, ``["loss"]`` or the first item of a tuple.
            scheduler: A scheduler, or a list of schedulers of the learning rate or weight decay,
                stepped in order once per optimizer step that is not skipped. Step schedulers that
                count epochs or need a metric (``ReduceLROnPlateau``) yourself.
            scaler: A scaler to use instead of the one for fp16.

        Raises:
            TypeError: If the config has an ``average_decay`` and the optimizer is not of
                ``amp_ext.optim``.
            ValueError: If the dtype of a parameter does not fit the precision, the scaler is
                disabled, or a number of the config does not fit a scaler or an average.
        """
        params = params_of(optimizer)
        unfit = {param.dtype for param in params} & {torch.float16, torch.bfloat16} - {config.dtype}
        if unfit:
            raise ValueError(
                "MixedPrecisionTrainer: config.precision must be that of 16-bit parameters, got "
                f"{config.precision!r} for parameters of {unfit.pop()}"
            )
        self._device = params[0].device
        if scaler is None and config.precision == "fp16":
            names = ("growth_factor", "backoff_factor", "growth_interval", "min_scale")
            options = {name: getattr(config, name) for name in names}
            scaler = GradScaler(self._device.type, config.initial_loss_scale, **options)
        elif scaler is not None and not scaler.is_enabled():
            raise ValueError("MixedPrecisionTrainer: scaler must be enabled, got a disabled one")
        self._fused: Any = optimizer if isinstance(optimizer, FusedOptimizer) else None
        decay: Any = config.average_decay
        # The average checks its arguments before the optimizer is changed.
        self.average = None if decay is None else WeightAverage(optimizer, decay, model=model)  # type: ignore[arg-type]
        if self._fused is not None and config.max_grad_norm is not None:
            for group in (optimizer.defaults, *optimizer.param_groups):
                group["max_grad_norm"] = config.max_grad_norm
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.loss_function = loss_function
        self.scheduler = scheduler
        self.scaler = scaler
        self._mixed = config.precision != "fp32"
        self._in_16_bits = self._mixed and all(
            param.dtype == config.dtype for param in model.parameters() if param.is_floating_point()
        )
        self._accumulated = 0
        self._loss: Tensor | None = None  # loss of the last batch
        # Whether the last step was skipped; None once the scheduler knows.
        self._last_skipped: Tensor | bool | None = None

    # Training.

    def train_step(self, inputs: Any, targets: Any = None) -> StepMetrics:
        """Trains on a batch; steps the optimizer once enough batches have accumulated.

        If the forward pass raises, the batch does not count. If the backward pass or the step
        raises, the accumulated batches are discarded, and the next call starts a new step, without
        their gradients. After an interrupt within the step, the scale and the scheduler may not
        have been updated.

        Args:
            inputs: Arguments of the model: positional arguments as a tuple or list, keyword
                arguments as a mapping, or anything else as the only argument. (Pass ``([...],)`` to
                a model whose argument is a list.)
            targets: Second argument of the loss function; None calls it with the output alone.

        Returns:
            The metrics of this batch, on the device. ``grad_norm`` and ``skipped`` are None if the
            optimizer was not stepped.

        Raises:
            TypeError: If the model does not take ``inputs``, such as a pair of inputs and targets.
            ValueError: If there are targets but no loss function, or the loss is not one number.
        """
        if targets is not None and self.loss_function is None:
            raise ValueError("train_step: targets must be None without a loss_function")
        if self._accumulated == 0:
            self.finish_scheduler_step()
            self.discard()  # the last gradients, and all that is left of a call that raised
        loss = self._compute_loss(inputs, targets)
        batches = self.config.gradient_accumulation_steps
        share = loss / batches
        # 0 until backward() and the step have ended, so that the next call starts anew if they
        # raise, also KeyboardInterrupt, after which a notebook may continue.
        accumulated, self._accumulated = self._accumulated + 1, 0
        (share if self.scaler is None else self.scaler.scale(share)).backward()
        self._loss = loss.detach()
        if accumulated >= batches:
            return self._step()
        self._accumulated = accumulated
        return StepMetrics(self._loss, self._loss_scale())

    def flush(self) -> StepMetrics | None:
        """Steps with the batches left over at the end of an epoch, and steps the scheduler.

        The gradients are the mean over these batches, even if they are fewer than
        ``gradient_accumulation_steps``.

        Returns:
            The metrics of the step, with the loss of the last batch; None if no batch was left.
        """
        metrics = None
        accumulated, self._accumulated = self._accumulated, 0  # a step that raises starts anew
        if accumulated:
            for param in params_of(self.optimizer):
                if param.grad is not None:
                    param.grad.mul_(self.config.gradient_accumulation_steps / accumulated)
            metrics = self._step()
        self.finish_scheduler_step()
        return metrics

    def discard(self) -> None:
        """Discards the accumulated batches and their gradients."""
        self._accumulated = 0
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            drop_iteration(self.scaler)

    def finish_scheduler_step(self) -> None:
        """Steps the scheduler unless the last optimizer step was skipped; waits for that step.

        ``train_step`` calls this at the start of the next step, because at first only the GPU knows
        whether a step was skipped. Each step uses the right learning rate, but between two steps
        ``scheduler.get_last_lr()`` may be one step behind. :meth:`flush` and
        :meth:`state_dict` call this too.
        """
        # Set first, so that an exception is not raised again.
        skipped, self._last_skipped = self._last_skipped, None
        if self.scheduler is not None and skipped is not None and not skipped:
            for scheduler in _listed(self.scheduler):
                scheduler.step()

    def _parts(self) -> dict[str, Any]:
        """Returns all parts with a state, except for the schedulers, by their names in a file."""
        parts = {"optimizer": self.optimizer, "scaler": self.scaler, "average": self.average}
        parts["norm_guard"] = None if self._fused is None else self._fused.norm_guard
        return {name: part for name, part in parts.items() if part is not None}

    def _compute_loss(self, inputs: Any, targets: Any) -> Tensor:
        kind, dtype = self._device.type, self.config.dtype
        with torch.autocast(kind, dtype, enabled=self._mixed and not self._in_16_bits):
            if isinstance(inputs, Mapping):
                output = self.model(**{name: self._cast(value) for name, value in inputs.items()})
            else:
                arguments = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
                output = self.model(*map(self._cast, arguments))
        if self.loss_function is None:
            # The output is the loss or has it as an attribute, an entry, or the first item.
            loss = getattr(output, "loss", output)
            if isinstance(output, Mapping):
                loss = output.get("loss")
            elif loss is output and isinstance(output, (tuple, list)) and output:
                loss = output[0]
        else:
            with torch.autocast(kind, dtype, enabled=self._mixed):
                loss = self.loss_function(output, *([] if targets is None else [targets]))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "train_step: the loss function, or else the model, must return a loss, a tensor of "
                f"one number, got {getattr(loss, 'shape', type(loss).__name__)}"
            )
        return loss.reshape(())

    def _cast(self, value: Any) -> Any:
        """Converts a floating-point input if all of the model's parameters are in 16 bits."""
        is_cast = self._in_16_bits and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.config.dtype) if is_cast else value

    def _loss_scale(self) -> Tensor:
        scale: Any = None if self.scaler is None else self.scaler._scale
        # Cloned because an update writes to it.
        return torch.ones((), device=self._device) if scale is None else scale.clone()

    def _step(self) -> StepMetrics:
        """Clips the gradients, steps the optimizer, and updates the scale and the scheduler."""
        loss_scale, grad_norm = self._loss_scale(), None
        skipped: Any = torch.zeros((), dtype=torch.bool, device=self._device)
        if self._fused is None and self.config.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            grad_norm = clip_grad_norm_(params_of(self.optimizer), self.config.max_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            flags: Any = self.scaler._found_inf_per_device(self.optimizer)
            skipped = sum_of_flags(flags, loss_scale.device) != 0
            self.scaler.update()
        if self._fused is not None and self._fused.grad_norm is not None:
            grad_norm = self._fused.grad_norm.clone()
        can_skip = self._parts().keys() & {"scaler", "norm_guard"}
        if "norm_guard" in can_skip and self._fused.step_applied is not None:
            skipped = skipped | to_device(self._fused.step_applied == 0, skipped.device)
        self._last_skipped = skipped if can_skip else False
        if not can_skip:  # nothing needs to wait
            self.finish_scheduler_step()
        return StepMetrics(self._loss, loss_scale, grad_norm, skipped)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the training, except for the model and the random generators.

        The dict has the states of the optimizer, scaler, scheduler, norm guard and average, and the
        accumulated gradients: a resumed run is bit-identical even in the middle of an accumulation.
        Its tensors are not copies, as in an optimizer's ``state_dict()``; later steps change them.
        """
        self.finish_scheduler_step()
        state = {name: part.state_dict() for name, part in self._parts().items()}
        state |= {
            "scheduler": [each.state_dict() for each in _listed(self.scheduler)],
            "gradient_accumulation_steps": self.config.gradient_accumulation_steps,
            "accumulated": self._accumulated,
            "gradients": [each.grad for each in params_of(self.optimizer) if self._accumulated],
        }
        # Schedulers that compute with numpy leave its numbers in their states and in the groups.
        return with_plain_numbers(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, model: Any = None) -> None:
        """Restores the state of :meth:`state_dict`.

        The state may come from another precision: if this trainer has no scaler, a saved one is
        ignored, and if no scaler was saved, this trainer's starts as configured. Without a saved
        state, a norm guard keeps its statistics and an average restarts.

        Everything is checked first, and after an error nothing has changed, with three exceptions:
        the model, an optimizer of torch and a scheduler may refuse their states when other parts
        are loaded already. Load another state then, and after an interrupt (Ctrl-C).

        Args:
            state_dict: The result of ``state_dict()``.
            model: The state dict of the model; None if the model is loaded already.

        Raises:
            KeyError: If an entry is missing.
            ValueError: If the number of schedulers differs, or the accumulated batches do not fit
                this trainer.
            RuntimeError: If the model's parameters have other names or shapes.
        """
        schedulers = _listed(self.scheduler)
        # Copied because SequentialLR.load_state_dict removes their _schedulers.
        schedules = copy.deepcopy(_listed(state_dict["scheduler"]))
        if len(schedules) != len(schedulers):
            raise ValueError(
                "MixedPrecisionTrainer.load_state_dict: state_dict must have the states of "
                f"{len(schedulers)} schedulers, got {len(schedules)}"
            )
        gradients = self._saved_gradients(state_dict) if state_dict["accumulated"] else []
        found = {name for name, saved in state_dict.items() if saved is not None} | {"optimizer"}
        parts = {name: part for name, part in self._parts().items() if name in found}
        if "scaler" in parts:
            GradScaler(self._device.type).load_state_dict(state_dict["scaler"])
        if "norm_guard" in parts:
            copy.copy(parts["norm_guard"]).load_state_dict(state_dict["norm_guard"])
        if self._fused is not None:
            read_state_dict(self._fused, state_dict["optimizer"])
        # The load of an average, and that of torch's optimizers, changes nothing if the state does
        # not fit. So each of them comes first, and a trainer never has both.
        if "average" in parts:
            parts.pop("average").load_state_dict(state_dict["average"])
        if model is not None:
            self.model.load_state_dict(model)
        for name, part in parts.items():
            part.load_state_dict(state_dict[name])
        if self.average is not None and "average" not in found:
            self.average.restart()
        for scheduler, schedule in zip(schedulers, schedules, strict=True):
            scheduler.load_state_dict(schedule)
        if self.scaler is not None:
            # Creates the scaler's tensors, which flush() needs.
            self.scaler.scale(torch.zeros((), device=self._device))
        self.discard()
        for param, grad in zip(params_of(self.optimizer), gradients, strict=False):
            param.grad = grad
        self._accumulated, self._loss, self._last_skipped = state_dict["accumulated"], None, None

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Writes a checkpoint file from which :meth:`load` resumes with bit-identical results.

        The file has the state of the model, the result of :meth:`state_dict`, torch's random
        generators (of the CPU and all GPUs) and ``extra``. It replaces an older file atomically: a
        process that is killed leaves the old file or the new one, and maybe a temporary
        ``<name>.<16 digits>.tmp``, which can be deleted. A symbolic link keeps pointing to the
        file. All dicts in it are plain ones, so that C++ programs can read it.

        Waits for the device. If several processes train together, only one of them should save.

        Args:
            path: Path of the file, in an existing folder.
            extra: Further data of the caller, such as the epoch, the position in the data or the
                state of a generator: tensors, numbers, strings, None, and lists, tuples, sets and
                dicts of these.

        Raises:
            ValueError: If parameters are sharded over ranks, or if ``torch.load`` would refuse a
                value with ``weights_only=True``.
            OSError: If the file can't be written. The old file is still there after any error.
        """
        model = self.model.state_dict()
        for name, part in {**model, **dict(self.model.named_modules())}.items():
            if is_dtensor(part) or type(part).__name__ == "FullyShardedDataParallel":
                raise ValueError(
                    f"MixedPrecisionTrainer.save: {name or type(part).__name__!r} is sharded over "
                    "ranks. Use torch.distributed.checkpoint for the model and the optimizer."
                )
        metadata = getattr(model, "_metadata", {})  # the versions of the modules
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        content = {
            "model": dict(model),
            "model_metadata": {name: dict(each) for name, each in metadata.items()},
            "trainer": self.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
            "extra": extra,
        }
        target = os.path.realpath(path)  # the file that a symbolic link points to
        temporary = f"{target}.{secrets.token_hex(8)}.tmp"
        try:
            with open(temporary, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            classes = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
            if classes:
                raise ValueError(
                    "MixedPrecisionTrainer.save: model, trainer and extra must have tensors, "
                    "numbers, text, and lists and dicts of these, got " + ", ".join(classes)
                )
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Restores a checkpoint of :meth:`save` with the same model, optimizer and settings.

        Reads with ``weights_only=True``. The file may come from another precision or device.
        Generators of missing GPUs are skipped. :meth:`load_state_dict` says what is checked before
        anything changes.

        Args:
            path: Path of the file.

        Returns:
            The ``extra`` that was saved.

        Raises:
            KeyError: If :meth:`save` did not write the file.
            ValueError, RuntimeError: If :meth:`load_state_dict` raises it.
            OSError: If the file does not exist or can't be read.
        """
        content = torch.load(path, map_location="cpu", weights_only=True)
        model: Any = OrderedDict(content["model"])
        model._metadata = content["model_metadata"]
        random = content["random"]
        torch.Generator().set_state(random["cpu"])  # raises if the state does not fit
        self.load_state_dict(content["trainer"], model=model)
        torch.set_rng_state(random["cpu"])
        torch.cuda.set_rng_state_all(random["cuda"][: torch.cuda.device_count()])
        return content["extra"]

    def _saved_gradients(self, state: Mapping[str, Any]) -> list[Tensor | None]:
        """Returns copies of the gradients in a state dict, in the order of the parameters."""
        params, gradients = params_of(self.optimizer), state["gradients"]
        got = (state["gradient_accumulation_steps"], bool(state.get("scaler")), len(gradients))
        wanted = (self.config.gradient_accumulation_steps, self.scaler is not None, len(params))
        if wanted != got:
            raise ValueError(
                "MixedPrecisionTrainer.load_state_dict: the file was saved while gradients "
                "accumulated, so gradient_accumulation_steps, whether there is a scaler, and the "
                f"number of parameters must be {got}, got {wanted}. Call flush() before save()."
            )
        if self._fused is not None:
            gradients = [gradients[key] for key in keys_in_order(self._fused, state["optimizer"])]
        copies = []
        for param, grad in zip(params, gradients, strict=True):
            copies.append(None if grad is None else grad.to(param.device, copy=True))
            # Raises if the shape or dtype of the gradient differs.
            param.detach().requires_grad_().grad = copies[-1]
        return copies


def _listed(value: Any) -> list[Any]:
    """Returns a list of schedulers, or of their states, from a list, a single one or None."""
    if value is None:
        return []
    return [*value] if isinstance(value, Sequence) else [value]
