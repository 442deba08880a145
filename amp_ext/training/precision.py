"""Chooses a precision for a model, and measures its training step in each precision."""

from __future__ import annotations

import copy
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
from amp_ext.training.trainer import MixedPrecisionTrainer

_FP16_RANGE = "float16 ends at 65504 and loses gradients below 6e-8, hence the loss scale."
_BF16_RANGE = "bfloat16 has the range of float32, so that no loss scale is needed."
_SLOW_CPU = "bfloat16 is 10 to 100 times slower on a CPU without AVX512-BF16, AMX and oneDNN."


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision with the reason for its choice.

    Attributes:
        precision: "fp32", "bf16" or "fp16", as for :class:`~amp_ext.training.MixedPrecisionConfig`.
            "fp16" needs a gradient scaler, which the trainer makes by itself.
        reason: The reason, in one or more sentences.
    """

    precision: Precision
    reason: str


def choose_precision(model: nn.Module, device: torch.device | str | None = None) -> PrecisionChoice:
    """Chooses the precision to train a model in.

    The dtypes of the parameters decide first: 16-bit, float64 and complex parameters leave no
    choice, and float16 beside bfloat16 needs a scaler. For float32 parameters the device decides.
    The choice involves no measurement, and small models may be faster in fp32: measure with
    :func:`amp_ext.training.benchmark_precision`.

    Args:
        model: The model, which is not changed.
        device: Device to train on; None takes the device of the model's first parameter, or the CPU
            for a model without parameters.

    Returns:
        The choice, with its reason.
    """
    params = list(model.parameters())
    if device is None:
        device = params[0].device if params else "cpu"
    device = torch.device(device)
    dtypes = {param.dtype for param in params if param.requires_grad}
    dtypes = dtypes or {param.dtype for param in params}
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    gpu = "A GPU of compute capability {}.{}".format(*capability)
    # Without oneDNN (mkldnn) torch multiplies 16-bit matrices in a plain loop, even on a CPU with
    # the instructions.
    has_instructions = (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ) and torch.backends.mkldnn.is_available()
    has_others = any(dtype.is_complex or dtype == torch.float64 for dtype in dtypes)
    rules: list[tuple[bool, Precision, str]] = [  # the first one that holds counts
        (torch.float16 in dtypes, "fp16", f"Parameters are float16 already. {_FP16_RANGE}"),
        (torch.bfloat16 in dtypes, "bf16", f"Parameters are bfloat16 already. {_BF16_RANGE}"),
        (has_others, "fp32", "Autocast does not change float64 and complex parameters."),
        (capability >= (8, 0), "bf16", f"{gpu} multiplies bfloat16 on Tensor Cores. {_BF16_RANGE}"),
        (capability >= (7, 5), "fp16", f"{gpu} can only emulate bfloat16. {_FP16_RANGE}"),
        (device.type == "cuda", "fp32", f"{gpu} is older than 7.5, which the CUDA kernels need."),
        (device.type != "cpu", "fp32", f"Nothing is known here about devices of {device.type!r}."),
        (has_instructions, "bf16", f"This CPU has AVX512-BF16 or AMX. {_BF16_RANGE}"),
        (True, "fp32", _SLOW_CPU),
    ]
    return next(PrecisionChoice(chosen, reason) for holds, chosen, reason in rules if holds)


@dataclass(frozen=True)
class PrecisionTiming:
    """Measurements in one precision.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        seconds_per_step: Time of a training step (forward, backward, optimizer), the median of
            three runs; None if the precision failed.
        peak_memory_bytes: Peak memory of parameters, gradients, states and activations, without
            memory that was allocated before; None if the precision failed or the device is not
            CUDA, since other allocators report no peak.
        error: The exception that made the precision fail, as text, or None.
    """

    precision: Precision
    seconds_per_step: float | None = None
    peak_memory_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class PrecisionBenchmark:
    """Timings of several precisions; ``print`` shows them as a table.

    Attributes:
        device: Name of the device.
        rows: The timing of each precision, in the order of ``precisions``.
    """

    device: str
    rows: tuple[PrecisionTiming, ...]

    def __str__(self) -> str:
        """Returns the table as text."""
        times = [row.seconds_per_step for row in self.rows if row.seconds_per_step is not None]
        table = [["precision", "ms a step", "speed-up", "peak memory, MiB"]]
        for row in self.rows:
            seconds, peak = row.seconds_per_step, row.peak_memory_bytes
            measured = "failed" if seconds is None else f"{1e3 * seconds:.3g}"
            speed_up = "-" if seconds is None else f"{times[0] / seconds:.2f}"
            memory = "-" if peak is None else f"{peak / 2**20:,.1f}"
            table.append([row.precision, measured, speed_up, memory])
        errors = [f"{row.precision}: {row.error}" for row in self.rows if row.error]
        return "\n".join([self.device, format_table(table), *errors])


def benchmark_precision(
    model: nn.Module,
    inputs: Any,
    *,
    targets: Any = None,
    loss_function: Callable[..., Tensor] | None = None,
    precisions: Sequence[Precision] = ("fp32", "fp16", "bf16"),
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
            mean square of the floating-point tensors in the output, since the choice of the loss
            hardly changes the time.
        precisions: Precisions to measure, in this order. The table shows speed-ups over the first
            one that works.
        optimizer: Function that creates an optimizer from parameters.
        steps: Number of steps in each of three runs, 1 or more, after three steps to warm up.

    Returns:
        The timings. If a precision fails, its timing has the error.

    Raises:
        ValueError: If a precision is unknown.

    Example:
        >>> print(benchmark_precision(model.cuda(), torch.randn(64, 784, device="cuda")))
    """
    configs: list[Any] = [MixedPrecisionConfig(p, initial_loss_scale=1024.0) for p in precisions]
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    from torch.utils.benchmark import Timer  # imported here because it loads slowly

    is_cuda = device.type == "cuda"

    def seconds_per_step(config: MixedPrecisionConfig) -> float:
        trained, batch = copy.deepcopy(model).train(), copy.deepcopy((inputs, targets))
        stepped, loss = optimizer(trained.parameters()), loss_function or _mean_square
        trainer = MixedPrecisionTrainer(trained, stepped, config, loss_function=loss)
        names = {"step": trainer.train_step, "batch": batch}
        timer = Timer("step(*batch)", globals=names, num_threads=torch.get_num_threads())
        timer.timeit(3)  # warms up
        return statistics.median(timer.timeit(steps).mean for _ in range(3))

    rows = []
    with torch.random.fork_rng([device] if is_cuda else []):
        for config in configs:
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device) if is_cuda else 0
            try:
                seconds = seconds_per_step(config)
                peak = torch.cuda.max_memory_allocated(device) - before if is_cuda else None
                rows.append(PrecisionTiming(config.precision, seconds, peak))
            except Exception as error:
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                rows.append(PrecisionTiming(config.precision, error=text))
            gc.collect()  # frees the model copy before the next precision is measured
    name = torch.cuda.get_device_name(device) if is_cuda else device.type
    return PrecisionBenchmark(name, tuple(rows))


def _mean_square(output: Any, targets: Any = None) -> Any:
    """Returns the mean square of the floating-point tensors in a model's output."""
    return sum(
        each.float().square().mean() for each in _tensors(output) if each.is_floating_point()
    )


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and mappings."""
    parts = [*value.values()] if isinstance(value, Mapping) else value
    if isinstance(parts, (tuple, list)):
        return [tensor for part in parts for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []
