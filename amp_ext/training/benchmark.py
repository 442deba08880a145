"""Measures the time, throughput and memory of a model's training step in each precision."""

from __future__ import annotations

import copy
import functools
import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_ext.optim import AdamW
from amp_ext.text_table import format_table
from amp_ext.training.config import MixedPrecisionConfig, Precision
from amp_ext.training.loss import loss_in
from amp_ext.training.trainer import MixedPrecisionTrainer

_WARM_UP_STEPS = 3
_ROUNDS = 3


@dataclass(frozen=True)
class PrecisionTiming:
    """Measurements in one precision.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        seconds_per_step: Time of a training step (forward, backward, optimizer), the median of
            three runs; None if the precision failed.
        samples_per_second: Throughput; None if the precision failed or the batch size is unknown.
        peak_memory_bytes: Peak memory of parameters, gradients, states and activations, without
            memory that was allocated before; None if the precision failed or the device is not
            CUDA, since other allocators report no peak.
        error: The exception that made the precision fail, as text, or None.
    """

    precision: Precision
    seconds_per_step: float | None = None
    samples_per_second: float | None = None
    peak_memory_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class PrecisionBenchmark:
    """Timings of several precisions; ``print`` shows them as a table.

    Attributes:
        device: Name of the device.
        samples: Batch size, the first dimension of the first input tensor that has dimensions; None
            if there is no such tensor.
        steps: Number of steps in each of the three runs.
        rows: The timing of each precision, in the order of ``precisions``.
    """

    device: str
    samples: int | None
    steps: int
    rows: tuple[PrecisionTiming, ...]

    def __str__(self) -> str:
        """Returns the table as text."""
        table = [["precision", "ms a step", "samples/s", "speed-up", "peak memory, MiB"]]
        first = next((row.seconds_per_step for row in self.rows if row.seconds_per_step), None)
        for row in self.rows:
            seconds, speed = row.seconds_per_step, row.samples_per_second
            if seconds is None or first is None:
                table.append([row.precision, "failed", "", "", ""])
                continue
            ms, speed_up = f"{1e3 * seconds:.3g}", f"{first / seconds:.2f}"
            samples = "-" if speed is None else f"{speed:,.1f}"
            peak = row.peak_memory_bytes
            mib = "-" if peak is None else f"{peak / 2**20:,.1f}"
            table.append([row.precision, ms, samples, speed_up, mib])
        errors = [f"{row.precision}: {row.error}" for row in self.rows if row.error]
        title = f"{self.device}, {self.samples or '?'} samples a step"
        return "\n".join([title, format_table(table), *errors])


def benchmark_precision(
    model: nn.Module,
    inputs: Any,
    *,
    targets: Any = None,
    loss_function: Callable[..., Tensor] | None = None,
    precisions: Sequence[Precision | str | torch.dtype] = ("fp32", "fp16", "bf16"),
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = AdamW,
    steps: int = 10,
) -> PrecisionBenchmark:
    """Measures training steps of a model in each precision, one after the other.

    Each precision trains a copy of the model, in train mode, on copies of the inputs. The caller's
    model, inputs and random generators do not change. On CUDA, torch's peak memory statistics are
    reset.

    Args:
        model: The model, on the device to measure. A model with 16-bit parameters can only be
            measured in that precision.
        inputs: Inputs for :meth:`~amp_ext.training.MixedPrecisionTrainer.train_step`.
        targets: Targets for ``train_step``, or None.
        loss_function: Function of the output, and of the targets if there are any. None takes the
            loss in the output, or else the mean square of its floating-point tensors, since the
            choice of the loss hardly changes the time.
        precisions: Precisions to measure, in this order. The table shows speed-ups over the first
            one that works.
        optimizer: Function that creates an optimizer from parameters.
        steps: Number of steps in each of three runs, which follow three steps to warm up.

    Returns:
        The timings. If a precision fails, its timing has the error.

    Raises:
        ValueError: If a precision is unknown, ``steps`` is less than 1, or ``targets`` are given
            without a loss function.

    Example:
        >>> print(benchmark_precision(model.cuda(), torch.randn(64, 784, device="cuda")))
    """
    if not steps >= 1:
        raise ValueError(f"benchmark_precision: steps must be 1 or more, got {steps}")
    if targets is not None and loss_function is None:
        raise ValueError("benchmark_precision: loss_function must be given with targets, got None")
    configs: list[Any] = [  # each normalizes the spelling of its precision
        MixedPrecisionConfig(precision, initial_loss_scale=1024.0) for precision in precisions
    ]
    tensors = [*model.parameters(), *_tensors(inputs)]
    device = tensors[0].device if tensors else torch.device("cpu")
    samples = next((len(tensor) for tensor in _tensors(inputs) if tensor.ndim), None)
    from torch.utils.benchmark import Timer  # imported here because it loads slowly

    is_cuda = device.type == "cuda"
    loss_function = _any_loss if loss_function is None else loss_function

    def seconds_per_step(config: MixedPrecisionConfig) -> float:
        trained, batch = copy.deepcopy(model).train(), copy.deepcopy((inputs, targets))
        stepped = optimizer(trained.parameters())
        trainer = MixedPrecisionTrainer(trained, stepped, config, loss_function=loss_function)
        step = functools.partial(trainer.train_step, *batch)
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        timer.timeit(_WARM_UP_STEPS)
        return statistics.median(timer.timeit(steps).mean for _ in range(_ROUNDS))

    rows = []
    with torch.random.fork_rng([device] if is_cuda else []):
        for config in configs:
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device) if is_cuda else 0
            try:
                seconds = seconds_per_step(config)
                speed = None if samples is None else samples / seconds
                peak = torch.cuda.max_memory_allocated(device) - before if is_cuda else None
                rows.append(PrecisionTiming(config.precision, seconds, speed, peak))
            except Exception as error:
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                rows.append(PrecisionTiming(config.precision, error=text))
            gc.collect()  # frees the model copy before the next precision is measured
    name = torch.cuda.get_device_name(device) if is_cuda else device.type
    return PrecisionBenchmark(name, samples, steps, tuple(rows))


def _any_loss(output: Any) -> Tensor:
    """Returns the loss in a model's output, or the mean square of its floating-point tensors."""
    loss = loss_in(output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    squares = [t.float().square().mean() for t in _tensors(output) if t.is_floating_point()]
    if not squares:
        raise ValueError(
            "benchmark_precision: loss_function must be given for a model whose output is "
            f"{type(output).__name__}"
        )
    return torch.stack(squares).sum()


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and mappings."""
    parts = [*value.values()] if isinstance(value, Mapping) else value
    if isinstance(parts, (tuple, list)):
        return [tensor for part in parts for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []
