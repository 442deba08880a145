"""The body of a mixed-precision training loop: autocast, loss scaling, accumulation, clipping."""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from amp_ext.amp_protocol import sum_of_flags, to_device
from amp_ext.clip_grad import clip_grad_norm_
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nan_loss import drop_iteration
from amp_ext.optim import NormGuard, WeightAverage, WeightDecayScheduler
from amp_ext.optim.checkpoints import keys_in_order, read_state_dict
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.params import params_of
from amp_ext.plain_numbers import with_plain_numbers
from amp_ext.scaler import GradScaler
from amp_ext.sharding import is_dtensor
from amp_ext.training.checkpoint_file import write_checkpoint
from amp_ext.training.config import MixedPrecisionConfig, create_fp16_grad_scaler
from amp_ext.training.metrics import StepMetrics

Scheduler = LRScheduler | WeightDecayScheduler


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

    The CPU waits for the GPU in one case: with a scheduler *and* a scaler or a norm guard, each
    optimizer step waits for the previous one to end. (torch's optimizers also wait with a scaler,
    unless they are fused.) The caller switches between train and eval mode.

    The arguments of the constructor are attributes.

    Attributes:
        optimizer: The optimizer. Its gradients stay until the next step starts, so that the caller
            can inspect them; with a scaler they may still be scaled.
        scheduler: The scheduler or list of schedulers; see :meth:`finish_scheduler_step`.
        scaler: The given scaler, a new one for fp16, or None.
        average: A :class:`~amp_ext.optim.WeightAverage` with the config's ``average_decay``, or
            None. To validate with the averages, use ``with trainer.average.swap():``.
    """

    @outside_inference_mode()
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
                its step: ``max_grad_norm`` and ``norm_guard`` of the config, unless None, are set
                on it.
            config: The settings.
            loss_function: Function of the model's output, and of the targets if there are any, that
                returns a tensor of one number. None takes the loss from the model's output: the
                output itself, its ``.loss``, ``["loss"]`` or the first item of a tuple.
            scheduler: A scheduler, or a list of schedulers of the learning rate or weight decay,
                stepped in order once per optimizer step that is not skipped. Step schedulers that
                count epochs yourself.
            scaler: A scaler to use instead of the one for fp16.

        Raises:
            TypeError: If a scheduler is a ``ReduceLROnPlateau``, whose ``step`` needs a metric, or
                the config has an ``average_decay`` and the optimizer is not of ``amp_ext.optim``.
            ValueError: If the dtype of a parameter does not fit the precision, the scaler is
                disabled, a number of the config does not fit a scaler or a guard, or the config has
                a ``norm_guard`` and the optimizer is not of ``amp_ext.optim``.
        """
        if any(isinstance(each, ReduceLROnPlateau) for each in _listed(scheduler)):
            raise TypeError(
                "MixedPrecisionTrainer: scheduler must have step() without arguments, got a "
                "ReduceLROnPlateau. Step it yourself after each validation."
            )
        params = params_of(optimizer)
        for dtype in {param.dtype for param in params} & {torch.float16, torch.bfloat16}:
            if dtype != config.dtype:
                raise ValueError(
                    f"MixedPrecisionTrainer: config.precision must be {dtype} for parameters of "
                    f"{dtype}, got {config.precision!r}"
                )
        self._device = params[0].device
        if scaler is None and config.needs_scaler:
            scaler = create_fp16_grad_scaler(
                self._device,
                init_scale=config.initial_loss_scale,
                growth_factor=config.growth_factor,
                backoff_factor=config.backoff_factor,
                growth_interval=config.growth_interval,
                min_scale=config.min_scale,
            )
        elif scaler is not None and not scaler.is_enabled():
            raise ValueError("MixedPrecisionTrainer: scaler must be enabled, got a disabled one")
        self._fused: Any = optimizer if isinstance(optimizer, FusedOptimizer) else None
        guard = None if config.norm_guard is None else NormGuard(**config.norm_guard)
        if guard is not None and (self._fused is None or self._fused.norm_guard is not None):
            raise ValueError(
                "MixedPrecisionTrainer: with a norm_guard in the config, optimizer must be one of "
                f"amp_ext.optim that has no norm_guard yet, got {type(optimizer)}"
            )
        decay: Any = config.average_decay
        # The average is the last to check its arguments, before the optimizer is changed.
        average = None if decay is None else WeightAverage(optimizer, decay, model=model)  # type: ignore[arg-type]
        if self._fused is not None and guard is not None:
            self._fused.norm_guard = guard
        if self._fused is not None and config.max_grad_norm is not None:
            for group in (optimizer.defaults, *optimizer.param_groups):
                group["max_grad_norm"] = config.max_grad_norm
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.loss_function = loss_function
        self.scheduler = scheduler
        self.scaler = scaler
        self.average = average
        self._mixed = config.precision != "fp32"
        self._in_16_bits = self._mixed and all(
            param.dtype == config.dtype for param in model.parameters() if param.is_floating_point()
        )
        self._accumulated = 0
        # Whether the last step was skipped; None once the scheduler knows.
        self._last_skipped: Tensor | bool | None = None
        # Metrics of a training without a scaler, and the loss before the first batch.
        self._no_scale = torch.ones((), device=self._device)
        self._not_skipped = torch.zeros((), dtype=torch.bool, device=self._device)
        self._loss = self._no_loss = torch.full((), torch.nan, device=self._device)

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
            self.discard()  # the last gradients, and all that is left of a call that raised
        loss = self._compute_loss(inputs, targets)
        batches = self.config.gradient_accumulation_steps
        share = loss / batches if batches > 1 else loss
        # 0 until backward() and the step have ended, so that the next call starts anew if they
        # raise, also KeyboardInterrupt, after which a notebook may continue.
        accumulated, self._accumulated = self._accumulated + 1, 0
        if self._fused is not None and self._fused.gradient_release is not None:
            self.finish_scheduler_step()  # backward() steps the parameters
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

        ``train_step`` calls this just before the next optimizer step, because at first only the GPU
        knows whether a step was skipped. Each step uses the right learning rate, but between two
        steps ``scheduler.get_last_lr()`` may be one step behind. :meth:`flush` and
        :meth:`state_dict` call this too. If the scheduler raises an exception, :meth:`state_dict`
        and :meth:`save` only warn, so that no checkpoint is lost.
        """
        # Set first, so that an exception is not raised again.
        skipped, self._last_skipped = self._last_skipped, None
        if self.scheduler is not None and skipped is not None and not skipped:
            for scheduler in _listed(self.scheduler):
                scheduler.step()

    def _guard(self) -> Any:
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
            source, loss = "without a loss_function the model's output", loss_in(output)
        else:
            with self._autocast(self._mixed):
                arguments = (output,) if targets is None else (output, targets)
                source, loss = "loss_function", self.loss_function(*arguments)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"train_step: {source} must give a loss, a tensor of one number, got {got}"
            )
        return loss.reshape(())

    def _autocast(self, enabled: bool) -> torch.autocast:
        return torch.autocast(self._device.type, self.config.dtype, enabled=enabled)

    def _cast(self, value: Any) -> Any:
        """Converts a floating-point input if all of the model's parameters are in 16 bits."""
        is_cast = self._in_16_bits and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.config.dtype) if is_cast else value

    def _loss_scale(self) -> Tensor:
        scale: Any = self._no_scale if self.scaler is None else self.scaler._scale
        return scale.clone()  # because an update writes to it

    def _step(self) -> StepMetrics:
        """Clips the gradients, steps the optimizer, and updates the scale and the scheduler."""
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
            flags: Any = self.scaler._found_inf_per_device(self.optimizer)
            skipped = sum_of_flags(flags, loss_scale.device) != 0  # type: ignore[assignment]
            self.scaler.update()
        if self._fused is not None and self._fused.grad_norm is not None:
            grad_norm = self._fused.grad_norm.clone()
        if self._guard() is not None and self._fused.step_applied is not None:
            skipped = skipped | to_device(self._fused.step_applied == 0, skipped.device)
        self._last_skipped = skipped
        if skipped is self._not_skipped:  # no step can be skipped, so nothing needs to wait
            self._last_skipped = False
            self.finish_scheduler_step()
        averaged = None if self.average is None else self.average.n_averaged.clone()
        return StepMetrics(self._loss, loss_scale, grad_norm, skipped, averaged)

    # Checkpoints.

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
        schedules = [each.state_dict() for each in _listed(self.scheduler)]
        single = schedules[0] if schedules else None
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "scheduler": schedules if isinstance(self.scheduler, Sequence) else single,
            "gradient_accumulation_steps": self.config.gradient_accumulation_steps,
            "accumulated": self._accumulated,
            "gradients": [each.grad for each in params_of(self.optimizer) if self._accumulated],
            "loss": self._loss if self._accumulated else None,
        }
        for name, part in (("norm_guard", self._guard()), ("average", self.average)):
            if part is not None:
                state[name] = part.state_dict()
        # Schedulers that compute with numpy leave its numbers in their states and in the groups.
        return with_plain_numbers(state)

    @outside_inference_mode()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the state of :meth:`state_dict`. Load the model first, or use :meth:`load`.

        The state may come from another precision: if this trainer has no scaler, a saved one is
        ignored, and if no scaler was saved, this trainer's starts as configured. Without a saved
        state, a norm guard keeps its statistics and an average restarts.

        Everything is checked first, and after an error nothing has changed, with one exception: a
        scheduler may refuse its state when other parts are loaded already. Load another state then,
        and after an interrupt (Ctrl-C).

        Args:
            state_dict: The result of ``state_dict()``.

        Raises:
            KeyError: If an entry is missing.
            ValueError: If the number of schedulers differs, or the accumulated batches do not fit
                this trainer.
        """
        self._load(state_dict)

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
        write_checkpoint(content, path)

    @outside_inference_mode()
    def load(self, path: str | os.PathLike[str]) -> Any:
        """Restores a checkpoint of :meth:`save` with the same model, optimizer and settings.

        Reads with ``weights_only=True``. The file may come from another precision or device.
        Generators of missing GPUs are skipped. Everything is checked first, and after an error
        nothing has changed, with three exceptions: the model, an optimizer of torch and a scheduler
        may refuse their states when other parts are loaded already. Load another checkpoint then,
        and after an interrupt (Ctrl-C).

        Args:
            path: Path of the file.

        Returns:
            The ``extra`` that was saved.

        Raises:
            KeyError: If an entry is missing.
            ValueError: If :meth:`load_state_dict` raises it.
            RuntimeError: If the model's parameters have other names or shapes.
            OSError: If the file does not exist or can't be read.
        """
        content = torch.load(path, map_location="cpu", weights_only=True)
        names = ("model", "model_metadata", "trainer", "random", "extra")
        missing = [name for name in names if name not in content]
        if missing:
            raise KeyError(
                f"MixedPrecisionTrainer.load: the file lacks {missing} and has "
                f"{list(content)[:8]}. Load a file that MixedPrecisionTrainer.save() wrote."
            )
        model: Any = OrderedDict(content["model"])
        model._metadata = content["model_metadata"]
        random = content["random"]
        torch.Generator().set_state(random["cpu"])  # raises if the state does not fit
        cuda = zip(range(torch.cuda.device_count()), random["cuda"], strict=False)
        self._load(content["trainer"], model)
        torch.set_rng_state(random["cpu"])
        for device, state in cuda:
            torch.cuda.set_rng_state(state, device)
        return content["extra"]

    def _load(self, state: Mapping[str, Any], model: Any = None) -> None:
        """Loads a state dict, and before it the state of the model if one is given.

        First checks everything that can be checked without a change.
        """
        average, guard = self.average, self._guard()
        saved_average = state.get("average")
        saved_scaler = None if self.scaler is None else state["scaler"]
        saved_guard = None if guard is None else state.get("norm_guard")
        schedulers = _listed(self.scheduler)
        # Copied because SequentialLR.load_state_dict removes their _schedulers.
        schedules = _listed(copy.deepcopy(state["scheduler"]))
        kinds = [type(each) for each in schedules]
        if kinds != [type(each.state_dict()) for each in schedulers]:
            raise ValueError(
                "MixedPrecisionTrainer.load_state_dict: state_dict must have the states of "
                f"{len(schedulers)} schedulers, got {[each.__name__ for each in kinds]}"
            )
        loss = self._no_loss if state["loss"] is None else state["loss"].to(self._device, copy=True)
        gradients = self._saved_gradients(state) if state["accumulated"] else []
        if saved_scaler is not None:
            GradScaler(self._device.type).load_state_dict(saved_scaler)
        if saved_guard is not None:
            copy.copy(guard).load_state_dict(saved_guard)
        if self._fused is not None:
            read_state_dict(self._fused, state["optimizer"])
        # The load of an average, and that of torch's optimizers, changes nothing if the state does
        # not fit. So each of them comes first, and a trainer never has both.
        if average is not None and saved_average is not None:
            average.load_state_dict(saved_average)
        if model is not None:
            self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state["optimizer"])
        if average is not None and saved_average is None:
            average.restart()
        for scheduler, schedule in zip(schedulers, schedules, strict=True):
            scheduler.load_state_dict(schedule)
        if self.scaler is not None and saved_scaler is not None:
            self.scaler.load_state_dict(saved_scaler)
            self.scaler.scale(loss)  # creates the scaler's tensors, which flush() needs
        if saved_guard is not None:
            guard.load_state_dict(saved_guard)
        self.discard()
        for param, grad in zip(params_of(self.optimizer), gradients, strict=False):
            param.grad = grad
        self._accumulated, self._loss, self._last_skipped = state["accumulated"], loss, None

    def _saved_gradients(self, state: Mapping[str, Any]) -> list[Tensor | None]:
        """Returns copies of the gradients in a state dict, in the order of the parameters."""
        params, gradients = params_of(self.optimizer), state["gradients"]
        if self._fused is not None:
            keys = keys_in_order(self._fused, state["optimizer"])
            if set(keys) == set(range(len(gradients))):
                gradients = [gradients[key] for key in keys]
        wanted = (self.config.gradient_accumulation_steps, self.scaler is not None, len(params))
        got = (state["gradient_accumulation_steps"], state["scaler"] is not None, len(gradients))
        if wanted != got:
            raise ValueError(
                "MixedPrecisionTrainer.load_state_dict: the file was saved while gradients "
                "accumulated, so gradient_accumulation_steps, whether there is a scaler, and the "
                f"number of parameters must be {got}, got {wanted}. Call flush() before save()."
            )
        copies = []
        for param, grad in zip(params, gradients, strict=True):
            copied = None if grad is None else grad.to(param.device, copy=True)
            param.detach().requires_grad_().grad = copied  # raises if its shape or dtype differs
            copies.append(copied)
        return copies


def _listed(value: Any) -> list[Any]:
    """Returns a list of schedulers, or of their states, from a list, a single one or None."""
    if value is None:
        return []
    return [*value] if isinstance(value, Sequence) else [value]


def loss_in(output: Any) -> Any:
    """Returns the loss in a model's output.

    Args:
        output: The loss itself, an object with ``.loss``, a mapping with ``["loss"]``, or a tuple
            or list whose first item is the loss.

    Returns:
        The loss; None if the output has none.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, (tuple, list)) and output else None
