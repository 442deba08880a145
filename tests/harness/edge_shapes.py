"""Sizes, layouts and dtypes that kernels get wrong, as rows of tests."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from harness.rows import rows

# Nothing, a scalar, less than a vector, a vector and one more; a tile of CUDA's step less one and
# whole, a tile of the CPU and of what CUDA rounds and one more; several of all with a tail.
SHAPES = [(0,), (), (1,), (3,), (4,), (5,), (2047,), (2048,), (8193,), (16385,)]

# Where a parameter of each shape begins in a whole of which it is a part, around 2^32 elements.
FIRST_ELEMENTS = [0, 5, 2**32 - 1, 2**32, 2**32 - 3, 2**40 + 77, 2**35 - 300, 2**32 - 100, 1]
FIRST_ELEMENTS += [2**32 - 9000]


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter, its gradient and its states, and whether it has a master."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: bool = False


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan

DTYPES = rows(
    {
        "fp32": Dtypes(F32, F32, F32),
        "fp64": Dtypes(F64, F64, F64),
        "fp32-grad16": Dtypes(F32, F16, F32),
        "fp32-gradbf16": Dtypes(F32, BF16, F32),
        "fp32-grad64": Dtypes(F32, F64, F32),
        "fp16-master": Dtypes(F16, F16, F32, master=True),
        "fp16-master-grad32": Dtypes(F16, F32, F32, master=True),
        "fp16-state32": Dtypes(F16, F16, F32),
        "fp16-as-torch": Dtypes(F16, F16, F16),
        "fp16-master-state16": Dtypes(F16, F16, F16, master=True),
        "fp16-master-gradbf16": Dtypes(F16, BF16, F32, master=True),
        "fp32-statebf16": Dtypes(F32, F32, BF16),
        "fp32-gradbf16-statebf16": Dtypes(F32, BF16, BF16),
        "fp16-master-statebf16": Dtypes(F16, F16, BF16, master=True),
        "fp16-statebf16-grad32": Dtypes(F16, F32, BF16),
        "bf16-master": Dtypes(BF16, BF16, F32, master=True),
        "bf16-master-grad32": Dtypes(BF16, F32, F32, master=True),
        "bf16-state32": Dtypes(BF16, BF16, F32),
        "bf16-as-torch": Dtypes(BF16, BF16, BF16),
        "bf16-master-state16": Dtypes(BF16, BF16, BF16, master=True),
    }
)

# One row for each kind of memory access, where the whole table would say nothing more.
FEW_DTYPES = [row for row in DTYPES if row.id in {"fp32", "fp64", "fp16-master", "bf16-as-torch"}]

# Fills the memory around a view; nothing may write there.
SENTINEL = 7.0


def contiguous(shape: tuple[int, ...], **kind) -> Tensor:
    return torch.full((math.prod(shape) + 64,), SENTINEL, **kind)[32:-32].view(shape)


def misaligned(shape: tuple[int, ...], **kind) -> Tensor:
    return torch.full((math.prod(shape) + 2,), SENTINEL, **kind)[1:-1].view(shape)


def strided(shape: tuple[int, ...], **kind) -> Tensor:
    return torch.full((*shape[:-1], 2 * shape[-1]), SENTINEL, **kind)[..., ::2]


def sliced(shape: tuple[int, ...], **kind) -> Tensor:
    return torch.full((*shape[:-1], shape[-1] + 3), SENTINEL, **kind)[..., 2:-1]


def transposed(shape: tuple[int, ...], **kind) -> Tensor:
    return contiguous(tuple(reversed(shape)), **kind).permute(*reversed(range(len(shape))))


def channels_last(shape: tuple[int, ...], **kind) -> Tensor:
    batch, channels, height, width = shape
    return contiguous((batch, height, width, channels), **kind).permute(0, 3, 1, 2)


Layout = Callable[..., Tensor]
KINDS = (contiguous, misaligned, strided, sliced, transposed, channels_last)
LAYOUTS = rows({kind.__name__.replace("_", "-"): kind for kind in KINDS})
# More than a chunk, and no side a multiple of a vector.
LAYOUT_SHAPE = (3, 5, 33, 37)


def placed(tensor: Tensor, layout: Layout) -> Tensor:
    """Returns a view with the layout and the values of ``tensor``, in a buffer of its own."""
    return layout(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def neighbours_untouched(view: Tensor) -> bool:
    """Tells whether the memory around a view made by ``placed`` still holds the sentinel."""
    count = view.untyped_storage().nbytes() // view.element_size()
    whole = view.detach().as_strided((count,), (1,), 0)
    outside = torch.ones(count, dtype=torch.bool, device=view.device)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return bool((whole[outside] == SENTINEL).all())


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Lets every launch of the CPU engine run on this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
