"""Conversions of masters and moments between float32 and what is kept in fewer bits."""

from __future__ import annotations

from torch import Tensor

from amp_ext import ops

__all__ = [
    "dequantize_blockwise",
    "dequantize_ratios",
    "join_fp32",
    "quantize_blockwise",
    "quantize_ratios",
    "split_fp32",
]


def split_fp32(param: Tensor, master: Tensor, low_bits: int) -> Tensor:
    """Returns the lower part of a master of which a 16-bit parameter is the upper part.

    Both together are the master: of 16 bits exactly (float16 from 2^-16 on, to 2^-40 below), of 8
    to 2^-15 of it. Where it does not round to the parameter, that has changed, and the
    lower part is the parameter's own. Copies tensors of a GPU to the CPU and back.

    Args:
        param: float16 or bfloat16, of any shape.
        master: float32 of the same shape.
        low_bits: 16 or 8.

    Returns:
        uint8 of the parameter's shape and a last dimension of 2, or int8 of its shape; on its
        device, in its layout.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.binary.split_fp32(param, master, low_bits)


def join_fp32(param: Tensor, residual: Tensor) -> Tensor:
    """Returns the float32 master of which a 16-bit parameter and a lower part are the parts.

    Args:
        param: float16 or bfloat16, of any shape.
        residual: As returned by :func:`split_fp32`.

    Returns:
        float32 of the parameter's shape, on its device, in its layout.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.binary.join_fp32(param, residual)


def quantize_ratios(moment: Tensor, second_moment: Tensor) -> Tensor:
    """Returns first moments as codes of their ratios to the roots of the second moments.

    A ratio is measured in the power of two at or below that root, and rounded to nearest: bit 7 of
    a code is its sign, the others its place, from 0 for 0 to 126 for 15.27 and more. Place 127
    stands for what is not finite. Copies tensors of a GPU to the CPU and back.

    Args:
        moment: float32, of any shape.
        second_moment: float32 of the same shape, as it is stored.

    Returns:
        int8 of the same shape, on the same device.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.binary.quantize_ratios(moment, second_moment)


def dequantize_ratios(codes: Tensor, second_moment: Tensor) -> Tensor:
    """Returns the first moments of codes.

    Args:
        codes: As of :func:`quantize_ratios`.
        second_moment: float32 of the same shape, as it is stored.

    Returns:
        float32 of the same shape, on the same device.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.binary.dequantize_ratios(codes, second_moment)


def quantize_blockwise(moment: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """Returns moments as codes of 8 bits, and an exponent for each 32 of them.

    A second moment ("q8s") is coded by its root, and no positive one becomes 0; a momentum ("q8m")
    by sign and magnitude. Both are rounded to nearest, in units of a power of two above the largest
    of their group: a root with a sixteenth of the unit more, with 6 bits of its mantissa; a
    magnitude linear below an eighth of the unit, by octaves above. A group that has inf or NaN
    decodes to NaN. Copies tensors of a GPU to the CPU and back.

    Args:
        moment: float32, of a shape whose first dimension is outermost in memory, and whose others
            together have a multiple of 32 elements.
        code: "q8s" or "q8m".

    Returns:
        uint8 of the same shape, and uint8 of the shape (shape[0], groups in a row), on the same
        device. An exponent is that of a float32, with its bias of 127.

    Raises:
        RuntimeError: If the dtype, the shape or the code does not fit.
    """
    return ops.binary.quantize_blockwise(moment, code)


def dequantize_blockwise(codes: Tensor, exponents: Tensor, code: str) -> Tensor:
    """Returns the moments of codes.

    Args:
        codes: As of :func:`quantize_blockwise`.
        exponents: Likewise.
        code: "q8s" or "q8m".

    Returns:
        float32 of the shape of the codes, on the same device.

    Raises:
        RuntimeError: If a dtype, a shape or the code does not fit.
    """
    return ops.binary.dequantize_blockwise(codes, exponents, code)
