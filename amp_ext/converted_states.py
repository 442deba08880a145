"""Converts master weights and moments between float32 and formats with fewer bits."""

from __future__ import annotations

from torch import Tensor

from amp_ext import ops


def split_fp32(param: Tensor, master: Tensor, low_bits: int) -> Tensor:
    """Returns the residual that completes a 16-bit parameter to its float32 master.

    With 16 bits, parameter and residual give the master exactly, except below 2^-16 for a float16
    parameter, where the error is at most 2^-40. With 8 bits the relative error is at most 2^-15. If
    a master does not round to its parameter, the parameter was changed later: the residual then
    gives the parameter's value. Tensors on a GPU are copied to the CPU and back.

    Args:
        param: float16 or bfloat16, of any shape.
        master: float32 of the same shape.
        low_bits: Number of bits of the residual for each element, 16 or 8.

    Returns:
        The residual, with the device and the memory layout of the parameter. 16 bits: uint8 with an
        additional last dimension of 2. 8 bits: int8 of the parameter's shape.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.extension.split_fp32(param, master, low_bits)


def join_fp32(param: Tensor, residual: Tensor) -> Tensor:
    """Returns the float32 master of a 16-bit parameter and its residual.

    Args:
        param: float16 or bfloat16, of any shape.
        residual: The residual from :func:`split_fp32`.

    Returns:
        The master, float32 of the parameter's shape, device and memory layout.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.extension.join_fp32(param, residual)


def quantize_ratios(moment: Tensor, second_moment: Tensor) -> Tensor:
    """Quantizes first moments to 8 bits, as ratios to the square roots of the second moments.

    A moment is divided by the largest power of two up to the root, and this ratio is rounded to
    nearest. Bit 7 of a code is the sign; the other bits are an index from 0 (ratio 0) to 126 (ratio
    15.27 or more), or 127 for inf and NaN. Tensors on a GPU are copied to the CPU and back.

    Args:
        moment: float32, of any shape.
        second_moment: float32 of the same shape, with the values that its own storage format holds.

    Returns:
        The codes, int8 of the same shape, on the same device.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.extension.quantize_ratios(moment, second_moment)


def dequantize_ratios(codes: Tensor, second_moment: Tensor) -> Tensor:
    """Returns the first moments that :func:`quantize_ratios` has quantized.

    Args:
        codes: int8 codes from :func:`quantize_ratios`.
        second_moment: float32 of the same shape, with the values that its own storage format holds.

    Returns:
        The moments, float32 of the same shape, on the same device.

    Raises:
        RuntimeError: If a dtype or the shape does not fit.
    """
    return ops.extension.dequantize_ratios(codes, second_moment)


def quantize_blockwise(moment: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """Quantizes moments to 8 bits, with one shared exponent for each block of 32 elements.

    The unit of a block is a power of two above its largest element. A block with inf or NaN
    dequantizes to NaN.

    * "q8s" stores the root of a second moment: ``root + unit / 16``, rounded to a mantissa of 6
      bits. A positive second moment never becomes 0.
    * "q8m" stores a momentum as sign and magnitude. Magnitudes below ``unit / 8`` have evenly
      spaced codes, and each factor of two above has as many codes.

    Tensors on a GPU are copied to the CPU and back.

    Args:
        moment: float32. The first dimension must be outermost in memory, and the product of the
            others must be a multiple of 32.
        code: "q8s" for second moments or "q8m" for momenta.

    Returns:
        The codes, uint8 of the same shape; and the exponents, uint8 of shape ``(shape[0], blocks in
        a row)``, with the bias of 127 of a float32. Both are on the same device.

    Raises:
        RuntimeError: If the dtype, the shape or the code does not fit.
    """
    return ops.extension.quantize_blockwise(moment, code)


def dequantize_blockwise(codes: Tensor, exponents: Tensor, code: str) -> Tensor:
    """Returns the moments that :func:`quantize_blockwise` has quantized.

    Args:
        codes: uint8 codes from :func:`quantize_blockwise`.
        exponents: uint8 exponents from :func:`quantize_blockwise`.
        code: "q8s" or "q8m", as passed to :func:`quantize_blockwise`.

    Returns:
        The moments, float32 of the shape of the codes, on the same device.

    Raises:
        RuntimeError: If a dtype, a shape or the code does not fit.
    """
    return ops.extension.dequantize_blockwise(codes, exponents, code)
