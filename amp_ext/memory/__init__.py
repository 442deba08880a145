"""Computes how many bytes parameters, masters, gradients and optimizer states take in training.

The sizes are exact and count the tensors that persist between steps, without :data:`NOT_COUNTED`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor, nn

from amp_ext import optim
from amp_ext.optim.formats import fits_blocks
from amp_ext.optim.options import CODED_STATES
from amp_ext.optim.state_bytes import MASTER_BYTES, bytes_of_moment
from amp_ext.sharding import is_over_rows

__all__ = [
    "CONFIGURATIONS",
    "NOT_COUNTED",
    "OPTIMIZERS",
    "Configuration",
    "MemoryUsage",
    "parse_count",
    "training_memory",
]

# Maps each optimizer to the 8-bit formats of its states, "" for none. Formats "q8m" and "q8s" share
# an exponent per block, "q8h" has no exponents.
_STATES: dict[str, tuple[str, ...]] = {
    name: formats
    for exported in optim.__all__
    for name, formats in getattr(getattr(optim, exported), "_state_formats", {}).items()
}

#: Maps each optimizer to its number of states of the parameter's size.
OPTIMIZERS = {name: len(states) for name, states in _STATES.items()}

#: Memory that :func:`training_memory` does not count.
NOT_COUNTED = (
    "activations",
    "the 16-bit copies of weights that autocast keeps until its block ends",
    "temporary tensors within a step, step counters (4 bytes a tensor) and scratch space",
    "what the allocator rounds up or keeps in reserve",
    "if states are offloaded, the buffers for gradients",
    "for a number instead of a model: what 8-bit states of small or odd parameters take more, and "
    "the largest gradient if gradients are released",
)

_COUNT = re.compile(r"((?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+)?(?:e\+?\d\d?)?)\s*([kmbt]?)", re.I)
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Configuration:
    """The dtypes in which a model is trained.

    Attributes:
        name: The name in the table.
        dtype: The dtype of floating-point parameters, gradients and buffers. bfloat16 stands for
            both 16-bit dtypes. None keeps the dtypes of the model.
        master_weights: The option ``master_weights`` of amp_ext's optimizers.
        state_dtype: The option ``state_dtype`` of amp_ext's optimizers. torch's optimizers
            correspond to ``master_weights=False`` and ``state_dtype=None``. AMSGrad has no 8-bit
            states.
    """

    name: str
    dtype: torch.dtype | None
    master_weights: bool | Literal["split", "split8"] = True
    state_dtype: torch.dtype | Literal["8bit-bf16", "8bit"] | None = torch.float32

    def _stored_dtype(self, tensor: Tensor) -> torch.dtype:
        """Returns the dtype that a parameter or buffer of the model has in training."""
        return self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype

    @property
    def options(self) -> str:
        """The keyword arguments for amp_ext's optimizers, as Python source."""
        given = ((each, getattr(self, each.name)) for each in fields(self)[2:])
        return ", ".join(f"{each.name}={v!r}" for each, v in given if v != each.default)


_STATE_DTYPES: dict[str, Any] = {"16-bit": None, "fp32": torch.float32, "bf16": torch.bfloat16}
_KINDS: tuple[tuple[str, torch.dtype, Any, str], ...] = (
    ("fp32", torch.float32, True, "bf16 8bit-bf16 8bit"),
    ("16-bit", torch.bfloat16, False, "16-bit fp32 8bit-bf16 8bit"),
    ("16-bit + masters", torch.bfloat16, True, "fp32 bf16"),
    ("16-bit + split masters", torch.bfloat16, "split", "fp32 bf16 8bit-bf16 8bit"),
    ("16-bit + split8 masters", torch.bfloat16, "split8", "bf16 8bit-bf16 8bit"),
)

#: Configurations that :func:`training_memory` compares.
CONFIGURATIONS = (
    Configuration("fp32", torch.float32),
    *(
        Configuration(f"{kind}, {name} states", dtype, masters, _STATE_DTYPES.get(name, name))
        for kind, dtype, masters, names in _KINDS
        for name in names.split()
    ),
)


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of one configuration.

    Attributes:
        configuration: The dtypes of the training.
        parameter_count: The number of parameter elements, including frozen parameters.
        bytes: Sizes in bytes by name: ``parameters``; ``masters`` (for split masters, only the
            residuals that are stored in addition to the parameters); ``gradients`` (for each
            trainable parameter, in its dtype; if gradients are released, only the largest); the
            optimizer's ``states`` without masters; a model's ``buffers``; if states are offloaded,
            the host ``copies`` of trainable parameters; and the ``total``.
    """

    configuration: Configuration
    parameter_count: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of all sizes in bytes."""
        return self.bytes["total"]

    @property
    def host(self) -> int:
        """The bytes in host memory, which are those of offloaded states and 0 otherwise."""
        parts = ("masters", "states", "copies") if "copies" in self.bytes else ()
        return sum(self.bytes[part] for part in parts)

    @property
    def gpu(self) -> int:
        """The bytes on the GPU, which are all that are not in host memory."""
        return self.total - self.host


def training_memory(
    model: nn.Module | int | float | str,
    optimizer: str = "adamw",
    released: bool = False,
    offloaded: bool = False,
) -> list[MemoryUsage]:
    """Returns the memory that training takes in each configuration.

    Frozen parameters have no gradient, master or state. Tied parameters count once. The model is
    not changed, and may be on the meta device.

    Args:
        model: A model, or a number of trainable parameter elements in any form that
            :func:`parse_count` accepts.
        optimizer: A key of :data:`OPTIMIZERS`. With "muon", a model is split by
            :func:`amp_ext.optim.param_groups_for_muon`; a number counts as matrices.
        released: True counts the largest gradient instead of all, as with
            :func:`amp_ext.optim.release_gradients`. If ``model`` is a number, the largest gradient
            is not known and not counted.
        offloaded: True counts masters and states in host memory, beside copies of the parameters,
            as with :func:`amp_ext.optim.offload_states`.

    Returns:
        The memory for each of :data:`CONFIGURATIONS` that the optimizer supports, with all floating
        parameters and buffers converted to its dtype. If ``model`` is a model, the first entry
        describes it with its own dtypes and the default options of amp_ext's optimizers.

    Raises:
        ValueError: If the optimizer is unknown or can't be offloaded, or ``model`` is not a valid
            number.

    Example:
        >>> with torch.device("meta"):
        ...     model = Model()
        >>> for row in amp_ext.memory.training_memory(model):
        ...     print(row.configuration.name, row.total / 2**30, "GiB")
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"training_memory: optimizer must be one of {list(OPTIMIZERS)}, got {optimizer!r}"
        )
    is_muon = optimizer == "muon"
    if is_muon and offloaded:
        raise ValueError("training_memory: the states of Muon can't be offloaded")
    rows = [row for row in CONFIGURATIONS if not (is_muon and row.master_weights == "split8")]
    of_adamw: set[Any] = set()
    is_model = isinstance(model, nn.Module)
    if isinstance(model, nn.Module):
        rows.insert(0, Configuration("the model as it is", None))
        if is_muon:
            groups = optim.param_groups_for_muon(model, adamw={"lr": 0.0})
            of_adamw = {p for group in groups if "algorithm" in group for p in group["params"]}
    else:
        model = nn.ParameterList([torch.empty(parse_count(model), device="meta")]).float()
    count = sum(param.numel() for param in model.parameters())
    usages = []
    for row in rows:
        if optimizer == "amsgrad" and row.state_dtype in CODED_STATES:
            continue  # its maximum has no 8-bit format
        sizes, gradients = dict.fromkeys(("parameters", "masters", "gradients", "states"), 0), [0]
        for param in model.parameters():
            dtype, state_dtype, number = row._stored_dtype(param), row.state_dtype, param.numel()
            sizes["parameters"] += number * dtype.itemsize
            if not param.requires_grad:
                continue
            gradients.append(number * dtype.itemsize)
            if dtype in (torch.float16, torch.bfloat16):
                sizes["masters"] += number * MASTER_BYTES[row.master_weights]
            elif dtype != torch.float32:
                state_dtype = None
            has_blocks = not is_model or fits_blocks(param, is_over_rows(param))
            for code in _STATES["adamw" if param in of_adamw else optimizer]:
                sizes["states"] += bytes_of_moment(number, state_dtype or dtype, code, has_blocks)
        sizes["gradients"] = sum(gradients)
        if offloaded:
            sizes["copies"] = sum(gradients)  # a gradient has the size of its parameter
        if released:
            sizes["gradients"] = max(gradients) if is_model else 0
        sizes["buffers"] = sum(b.numel() * row._stored_dtype(b).itemsize for b in model.buffers())
        usages.append(MemoryUsage(row, count, {**sizes, "total": sum(sizes.values())}))
    return usages


def parse_count(text: int | float | str) -> int:
    """Parses a number of parameters: 7B, 124M, 1.3e9, 7_000_000_000 or 7,000,000,000.

    Args:
        text: The number. The suffixes K, M, B and T mean thousand, million, billion and trillion.

    Raises:
        ValueError: If ``text`` is not a whole number from 1 to 10**18.
    """
    match = _COUNT.fullmatch(str(text).strip())
    if match:
        number = Fraction(re.sub("[,_]", "", match[1])) * _SUFFIXES[match[2].lower()]
        if number.denominator == 1 and 1 <= number <= 10**18:
            return int(number)
    raise ValueError(
        "parse_count: a number of parameters must be a whole number from 1 to 10**18 such as 7B, "
        f"124M, 1.3e9 or 7_000_000_000, got {text!r}"
    )
