"""Chooses a precision for a model on a device, and gives the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from amp_ext.training.config import Precision

_FP16_RANGE = "float16 ends at 65504 and loses gradients below 6e-8, hence the loss scale."
_BF16_RANGE = "bfloat16 has the range of float32, so that no loss scale is needed."


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision with the reason for its choice.

    Attributes:
        precision: "fp32", "bf16" or "fp16", as for :class:`~amp_ext.training.MixedPrecisionConfig`.
        reason: The reason, in one or more sentences.
    """

    precision: Precision
    reason: str

    @property
    def needs_scaler(self) -> bool:
        """Whether to train with a gradient scaler; the trainer makes one by itself."""
        return self.precision == "fp16"


def choose_precision(model: nn.Module, device: torch.device | str | None = None) -> PrecisionChoice:
    """Chooses the precision to train a model in.

    The dtypes of the parameters decide first: 16-bit, float64 and complex parameters leave no
    choice. For float32 parameters the device decides. The choice involves no measurement, and small
    models may be faster in fp32: measure with :func:`amp_ext.training.benchmark_precision`.

    Args:
        model: The model, which is not changed.
        device: Device to train on; None takes the device of the model's first parameter.

    Returns:
        The choice, with its reason.

    Raises:
        ValueError: If the model has both float16 and bfloat16 parameters to train, or if ``device``
            is None and the model has no parameters.
    """
    params = list(model.parameters())
    if device is None and not params:
        raise ValueError(
            "choose_precision: device must be given for a model without parameters, got None"
        )
    device = params[0].device if device is None else torch.device(device)
    dtypes = {param.dtype for param in params if param.requires_grad}
    dtypes = dtypes or {param.dtype for param in params}
    if dtypes >= {torch.float16, torch.bfloat16}:
        raise ValueError(
            "choose_precision: parameters to train must be in one 16-bit dtype, got float16 and "
            "bfloat16"
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    gpu = "A GPU of compute capability {}.{}".format(*capability)
    # Without oneDNN (mkldnn) torch multiplies 16-bit matrices in a plain loop, even on a CPU with
    # the instructions.
    has_instructions = (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ) and torch.backends.mkldnn.is_available()
    if torch.float16 in dtypes:
        return PrecisionChoice("fp16", f"Parameters are float16 already. {_FP16_RANGE}")
    if torch.bfloat16 in dtypes:
        return PrecisionChoice("bf16", f"Parameters are bfloat16 already. {_BF16_RANGE}")
    if any(dtype.is_complex or dtype == torch.float64 for dtype in dtypes):
        reason = "Autocast leaves float64 and complex parameters alone, so nothing would change."
    elif capability >= (8, 0):
        return PrecisionChoice("bf16", f"{gpu} multiplies bfloat16 on Tensor Cores. {_BF16_RANGE}")
    elif capability >= (7, 5):
        return PrecisionChoice("fp16", f"{gpu} can only emulate bfloat16. {_FP16_RANGE}")
    elif device.type == "cuda":
        reason = f"{gpu} is older than 7.5, the oldest that the CUDA kernels support."
    elif device.type == "cpu" and has_instructions:
        return PrecisionChoice("bf16", f"This CPU has AVX512-BF16 or AMX. {_BF16_RANGE}")
    elif device.type == "cpu":
        reason = "bfloat16 is 10 to 100 times slower on a CPU without AVX512-BF16, AMX and oneDNN."
    else:
        reason = f"Nothing is known here about devices of type {device.type!r}."
    return PrecisionChoice("fp32", reason)
