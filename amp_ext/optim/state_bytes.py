"""The bytes of masters and states."""

from __future__ import annotations

from typing import Any

import torch

#: Maps the option ``master_weights`` to the bytes that a master adds to a 16-bit parameter element.
MASTER_BYTES: dict[Any, int] = {True: 4, "split": 2, "split8": 1, False: 0}
_BLOCK = 32  # elements of a block, which share an exponent


def bytes_of_moment(number: int, dtype: torch.dtype | str, code: str, has_blocks: bool) -> int:
    """Returns the bytes of a moment with its exponents.

    Args:
        number: Number of elements.
        dtype: The dtype, or "8bit" or "8bit-bf16".
        code: Name of the 8-bit format of the moment, or empty.
        has_blocks: Whether 8-bit moments of the parameter are quantized blockwise.
    """
    if isinstance(dtype, torch.dtype):
        return number * dtype.itemsize
    if code == "q8h":
        return number
    # Falls back to bfloat16, as do the roots of second moments with "8bit-bf16".
    if not code or not has_blocks or (code == "q8s" and dtype != "8bit"):
        return 2 * number
    return number + -(-number // _BLOCK)
