"""Says which dimensions of a model keep fp16 and bf16 matrix products from full Tensor Core speed.

Matrices are read 16 bytes at a time, so a dimension should be a multiple of 8 elements of 16 bits.
The vocabulary, mostly the largest dimension and the easiest to pad, is held against 64: 128 bytes,
which serve an A100 best.

Reference:
    NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001), part of the Deep
    Learning Performance documentation, 2023, section 2.2, "Tensor Core Requirements".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from amp_ext.plain_numbers import is_count, plain
from amp_ext.tensor_core import of_config, of_model
from amp_ext.tensor_core.dimension import Dimension

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MULTIPLE", "VOCABULARY_MULTIPLE", "Advice", "make_table", "tensor_core_advice"]

MULTIPLE = 16 // 2  # bytes of an access, bytes of an element
VOCABULARY_MULTIPLE = 128 // 2


@dataclass(frozen=True)
class Advice:
    """A dimension that should be padded.

    Attributes:
        dimension: Where it is; ``*`` stands for the number of a layer where several are alike.
        layers: How many are alike.
        size: As it is.
        multiple: What it should be a multiple of.
        padded: The next such size.
        extra_parameters: How many parameters padding this dimension alone adds in all layers; None
            where that can't be told.
        extra_percent: The same in percent of the model's parameters.
    """

    dimension: str
    layers: int
    size: int
    multiple: int
    padded: int
    extra_parameters: int | None
    extra_percent: float | None


def tensor_core_advice(
    model: nn.Module | Mapping[str, Any] | Any,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    multiple: int = MULTIPLE,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
) -> list[Advice]:
    """Returns the dimensions of matrix products that are not multiples, with padded sizes.

    Of a model these are the features of linear layers, the channels of convolutions (for each
    group; depthwise ones have no product), the width of embeddings and the sizes of attention and
    recurrent layers. The vocabulary is the largest number of embeddings that a linear layer gives
    out as well, or else the largest number of embeddings, from 64 on; other tables are only looked
    up.

    Of a configuration they are what Hugging Face's names say (``hidden_size``, ``n_embd``,
    ``vocab_size`` ...), also in configurations inside it; parameters are then estimated from the
    matrices, and not for encoders with decoders or mixtures of experts.

    A width that heads share is padded until the share of each head is a multiple; in a model, so is
    every dimension that is as large as the width of its attention.

    Args:
        model: A model, which is not changed and may be on the meta device, a mapping, or a
            configuration with ``to_dict()``.
        batch_size: Sequences, or samples, in a batch.
        sequence_length: Tokens in a sequence. A batch of sequences is multiplied as one matrix with
            a row for each token.
        multiple: Elements that dimensions should be a multiple of.
        vocabulary_multiple: The same for a vocabulary that is not smaller than this.

    Raises:
        TypeError: If ``model`` is none of these.
        ValueError: If a size is no positive int, a parameter has no shape yet, or no name of a
            mapping is understood.

    Example:
        >>> for advice in amp_ext.tensor_core.tensor_core_advice({"vocab_size": 50257}):
        ...     print(advice.dimension, advice.size, "->", advice.padded)
        vocab_size 50257 -> 50304
    """
    for name, value in (
        ("batch_size", batch_size),
        ("sequence_length", sequence_length),
        ("multiple", multiple),
        ("vocabulary_multiple", vocabulary_multiple),
    ):
        if value is not None and not is_count(plain(value)):
            raise ValueError(f"tensor_core_advice: {name} must be a positive int, got {value!r}")
    advice = [_advise(dimension, multiple, vocabulary_multiple) for dimension in _dimensions(model)]
    advice += _advise_on_batch(batch_size, sequence_length, multiple)
    return _joined(row for row in advice if row is not None)


def _dimensions(model: Any) -> list[Dimension]:
    if isinstance(model, nn.Module):
        return list(of_model.dimensions(model))
    config = model.to_dict() if hasattr(model, "to_dict") else model
    if not isinstance(config, Mapping):
        raise TypeError(
            "tensor_core_advice: model must be a torch.nn.Module, a mapping or a configuration "
            f"with to_dict(), got {type(model).__name__}"
        )
    found = list(of_config.dimensions(config))
    if not found:
        raise ValueError(
            f"tensor_core_advice: a configuration must have some of {', '.join(of_config.NAMES)}, "
            f"got {list(config)}"
        )
    return found


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _advise(dimension: Dimension, multiple: int, vocabulary_multiple: int) -> Advice | None:
    if dimension.vocabulary and dimension.size >= vocabulary_multiple:
        multiple = vocabulary_multiple
    if dimension.size % multiple == 0:
        return None
    multiple *= dimension.heads
    padded = _padded(dimension.size, multiple)
    extra = dimension.extra_parameters(padded) if dimension.extra_parameters else None
    percent = None
    if extra is not None and dimension.all_parameters:
        percent = 100 * extra / dimension.all_parameters
    return Advice(dimension.name, 1, dimension.size, multiple, padded, extra, percent)


def _advise_on_batch(
    batch_size: int | None, sequence_length: int | None, multiple: int
) -> Iterator[Advice]:
    """Yields what to pad so that the number of tokens in a batch is a multiple."""
    if sequence_length is not None and sequence_length % multiple:
        padded = _padded(sequence_length, multiple)
        yield Advice("sequence_length", 1, sequence_length, multiple, padded, 0, 0.0)
    if batch_size is not None:
        needed = multiple // math.gcd(multiple, sequence_length or 1)
        if batch_size % needed:
            padded = _padded(batch_size, needed)
            yield Advice("batch_size", 1, batch_size, needed, padded, 0, 0.0)


def _joined(rows: Iterator[Advice]) -> list[Advice]:
    """Joins rows that differ in the number of their layer only."""
    alike: dict[tuple[Any, ...], list[Advice]] = {}
    for row in rows:
        pattern = ".".join("*" if part.isdigit() else part for part in row.dimension.split("."))
        alike.setdefault((pattern, row.size, row.padded), []).append(row)
    joined = []
    for (pattern, _, _), same in alike.items():
        row = same[0]
        if len(same) > 1:
            extra = [row.extra_parameters for row in same if row.extra_parameters is not None]
            percent = [row.extra_percent for row in same if row.extra_percent is not None]
            row = replace(
                row,
                dimension=pattern,
                layers=len(same),
                extra_parameters=sum(extra) if extra else None,
                extra_percent=math.fsum(percent) if percent else None,
            )
        joined.append(row)
    return joined


def make_table(advice: Sequence[Advice]) -> Table:
    """Returns a table for the terminal; padding adds so many parameters, so much percent of all.

    Args:
        advice: From :func:`tensor_core_advice`.

    Raises:
        ImportError: If rich is missing: ``pip install rich``.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("dimension", overflow="fold")
    for title in ("layers", "size", "multiple", "padded", "adds", "%"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in advice:
        extra, percent = row.extra_parameters, row.extra_percent
        table.add_row(
            Text(row.dimension),  # not markup
            *(f"{number:,}" for number in (row.layers, row.size, row.multiple, row.padded)),
            "unknown" if extra is None else f"{extra:,}",
            "" if percent is None else f"{percent:.3g}",
        )
    return table
