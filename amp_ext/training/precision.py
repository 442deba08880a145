"""Which precision pays on a device for a model, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from amp_ext.training.config import Precision

_BF16_CAPABILITY = (8, 0)  # bf16 on Tensor Cores
_FP16_CAPABILITY = (7, 5)  # the oldest that amp_ext's CUDA kernels are compiled for

_FP16_RANGE = "float16 ends at 65504 and loses gradients below 6e-8, hence the loss scale"
_BF16_RANGE = "bfloat16 has the range of float32, so that no loss scale is needed"


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision and why.

    Attributes:
        precision: "fp32", "bf16" or "fp16", as for :class:`~amp_ext.training.MixedPrecisionConfig`.
        needs_scaler: Whether to train with a gradient scaler; the trainer makes one by itself.
        reason: One or more sentences.
    """

    precision: Precision
    needs_scaler: bool
    reason: str


@dataclass(frozen=True)
class Facts:
    """All that the choice depends on.

    Attributes:
        device_type: "cuda", "cpu" or another.
        capability: Compute capability of a CUDA device.
        cpu_multiplies_bf16: Whether the CPU has instructions for products of bf16 matrices, and
            torch the library that uses them.
        dtypes: Those of the parameters to train; of all parameters if none is trained.
        batch_norm_in_16_bits: Whether a BatchNorm keeps its running statistics in 16 bits.
    """

    device_type: str
    capability: tuple[int, int] = (0, 0)
    cpu_multiplies_bf16: bool = False
    dtypes: frozenset[torch.dtype] = field(default=frozenset({torch.float32}))
    batch_norm_in_16_bits: bool = False


def choose_precision(model: nn.Module, device: torch.device | str | None = None) -> PrecisionChoice:
    """Chooses the precision to train a model in.

    The model's parameters decide first: those in 16 bits already, in float64 or complex leave no
    choice. Then the device does. Nothing is measured: :func:`amp_ext.training.benchmark_precision`
    does that, and small models may well be faster in fp32.

    Args:
        model: Only looked at.
        device: Where it will train; None takes the device of its first parameter.

    Returns:
        The choice, with its reason.

    Raises:
        ValueError: If there are float16 and bfloat16 parameters to train, or neither a device nor a
            parameter is given.
    """
    return choose_from_facts(gather_facts(model, device))


def gather_facts(model: nn.Module, device: torch.device | str | None = None) -> Facts:
    """Looks up what :func:`choose_from_facts` decides on; arguments as :func:`choose_precision`."""
    params = list(model.parameters())
    if device is None:
        if not params:
            raise ValueError(
                "choose_precision: device must be given for a model without parameters, got None"
            )
        device = params[0].device
    device = torch.device(device)
    trained = [param for param in params if param.requires_grad] or params
    return Facts(
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        cpu_multiplies_bf16=device.type == "cpu" and _cpu_multiplies_bf16(),
        dtypes=frozenset(param.dtype for param in trained) or frozenset({torch.float32}),
        batch_norm_in_16_bits=any(
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.running_var is not None
            and module.running_var.dtype.itemsize == 2
            for module in model.modules()
        ),
    )


def _cpu_multiplies_bf16() -> bool:
    # An instruction set alone is not enough: without oneDNN (mkldnn) torch multiplies in a loop.
    return torch.backends.mkldnn.is_available() and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def choose_from_facts(facts: Facts) -> PrecisionChoice:
    """Chooses the precision from facts alone; see :func:`choose_precision`."""
    if facts.dtypes >= {torch.float16, torch.bfloat16}:
        raise ValueError(
            "choose_precision: parameters to train must be in one 16-bit dtype, got float16 and "
            "bfloat16"
        )
    if torch.float16 in facts.dtypes:
        return _in_16_bits("fp16", f"Parameters are float16 already. {_FP16_RANGE}.", facts)
    if torch.bfloat16 in facts.dtypes:
        return _in_16_bits("bf16", f"Parameters are bfloat16 already. {_BF16_RANGE}.", facts)
    if any(dtype.is_complex for dtype in facts.dtypes):
        return PrecisionChoice(
            "fp32",
            False,
            "Some parameters are complex: autocast leaves complex numbers alone, and gradient "
            "scalers do not take them.",
        )
    if torch.float64 in facts.dtypes:
        return PrecisionChoice(
            "fp32",
            False,
            "Some parameters are float64, which autocast leaves alone: another precision would "
            "change nothing. Convert the model with .float() first if float32 will do.",
        )
    if facts.device_type == "cuda":
        return _on_cuda(facts.capability)
    if facts.device_type != "cpu":
        return PrecisionChoice(
            "fp32", False, f"Nothing is known here about devices of type {facts.device_type!r}."
        )
    if facts.cpu_multiplies_bf16:
        return PrecisionChoice(
            "bf16",
            False,
            "This CPU has instructions for products of bfloat16 matrices (AVX512-BF16 or AMX). "
            f"{_BF16_RANGE}.",
        )
    return PrecisionChoice(
        "fp32",
        False,
        "This CPU has no instructions for products of 16-bit matrices (AVX512-BF16 or AMX), or "
        "this torch does not use them: such products would be 10 to 100 times slower.",
    )


def _on_cuda(capability: tuple[int, int]) -> PrecisionChoice:
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= _BF16_CAPABILITY:
        reason = f"A GPU of {name} multiplies bfloat16 on Tensor Cores. {_BF16_RANGE}."
        return PrecisionChoice("bf16", False, reason)
    if capability >= _FP16_CAPABILITY:
        reason = (
            f"A GPU of {name} multiplies float16 at more than the speed of float32 and can only "
            f"emulate bfloat16. {_FP16_RANGE}."
        )
        return PrecisionChoice("fp16", True, reason)
    return PrecisionChoice(
        "fp32",
        False,
        f"A GPU of {name} is older than 7.5, the oldest that amp_ext's CUDA kernels are made for.",
    )


def _in_16_bits(precision: Precision, reason: str, facts: Facts) -> PrecisionChoice:
    """Adds what people with 16-bit parameters should know."""
    notes = [
        reason,
        "The optimizers of amp_ext.optim keep float32 masters, without which small updates vanish.",
    ]
    native = (
        facts.cpu_multiplies_bf16 and precision == "bf16"
        if facts.device_type == "cpu"
        else facts.device_type != "cuda"
        or facts.capability >= (_BF16_CAPABILITY if precision == "bf16" else _FP16_CAPABILITY)
    )
    if not native:
        notes.append("This device has no fast products in that precision: float32 would be faster.")
    if facts.batch_norm_in_16_bits:
        notes.append(
            "BatchNorm keeps its running statistics in 16 bits, where small updates vanish too: "
            "convert such modules back with .float() and train under autocast."
        )
    return PrecisionChoice(precision, precision == "fp16", " ".join(notes))
