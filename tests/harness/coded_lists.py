"""Lists of a step whose moments have codes of 8 bits, and the same numbers in float32.

For the tests of several folders and for ``engine_results``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.edge_shapes import BF16, SHAPES, Dtypes
from harness.list_operations import ALL_BUFFERS, BUFFERS, OPERATIONS, Lists, Options, build
from harness.number_codes import (
    GROUP,
    decode_q8h,
    dequantize_blockwise,
    encode_q8h,
    quantize_blockwise,
    root_of,
    root_of_q8s,
    rounded,
    split,
)
from harness.rows import rows

# The codes that there are beside this one, which is that of the second moments if there are any.
_CODES = {"q8h": ("q8h",), "q8s": ("q8h", "q8s"), "q8m": ("q8m",)}


def _steps() -> Iterator[tuple[str, tuple[str, Options, str]]]:
    """Yields each operation with each of its codes; what is dithered decays slowly."""
    for operation, buffers in BUFFERS.items():
        options, decays = ALL_BUFFERS[operation], OPERATIONS[operation].decays
        slow = {decays[n]: 0.999 for n in decays if buffers[n].code != "q8h"}
        for code in sorted({buffer.code for buffer in buffers.values()} & _CODES.keys()):
            name = f"{operation.strip('_')}-{code}"
            yield name, (operation, options, code)
            yield f"{name}-dither", (operation, options | slow | {"dither": True}, code)


# The operation, its options, and the code of its moments: of Adam's second ones, if they have one.
CODED_STEPS = rows(dict(_steps()))
coded_steps = pytest.mark.parametrize(("operation", "options", "code"), CODED_STEPS)

# Whole groups, in tensors of less than a vector of them and more than a tile.
GROUPED_SHAPES = [(GROUP,), (3, GROUP), (2, 4 * GROUP), (1, 8192), (3, 4096 + GROUP), (0, GROUP)]
FIRST_STATES = {operation: next(iter(buffers)) for operation, buffers in BUFFERS.items()}
# Of each tensor; those of groups are whole groups.
STARTS = [0, GROUP, 2**32 - GROUP, 2**40, GROUP * 77, 9 * GROUP] * 4


def shapes_of(code: str) -> list[tuple[int, ...]]:
    return GROUPED_SHAPES if code in ("q8s", "q8m") else SHAPES


def forms_in(lists: Lists, operation: str, code: str) -> dict[str, str | None]:
    """The codes of the lists of buffers, second moments before the ratios to them."""
    kept = {name: each for name, each in BUFFERS[operation].items() if name in lists}
    ratios_last = sorted(kept.items(), key=lambda item: item[1].code == "q8h")
    codes = _CODES[code]
    return {name: each.code if each.code in codes else None for name, each in ratios_last}


def encode(
    lists: Lists,
    operation: str,
    code: str,
    words_of: Callable[[int, int], Tensor | None] = lambda index, slope: None,
) -> Lists:
    """The lists of a step in codes, of float32 ones; exponents are a list beside them.

    ``words_of`` gives those that dither a moment, by the tensor's number and the slope.
    """
    found, roots = dict(lists), []
    for name, form in forms_in(lists, operation, code).items():
        buffer = BUFFERS[operation][name]
        moments = [(each, words_of(i, buffer.dither_stride)) for i, each in enumerate(lists[name])]
        if form in ("q8m", "q8s"):
            pairs = [quantize_blockwise(moment, form, words) for moment, words in moments]
            found[name] = [codes for codes, _ in pairs]
            found["exponents"] = [exponents for _, exponents in pairs]
            if form == "q8s":
                roots = [root_of_q8s(*pair) for pair in pairs]
        elif form == "q8h":
            found[name] = [
                encode_q8h(moment, root, words)
                for (moment, words), root in zip(moments, roots, strict=True)
            ]
        else:
            found[name] = [rounded(moment, BF16, words) for moment, words in moments]
            if buffer.role == "second moment":
                roots = [root_of(moment) for moment in found[name]]
    return found


def decoded(lists: Lists, operation: str, code: str) -> Lists:
    """The same numbers with float32 states."""
    found, roots = {name: list(tensors) for name, tensors in lists.items()}, []
    exponents = found.pop("exponents", [])
    for name, form in forms_in(lists, operation, code).items():
        if form in ("q8m", "q8s"):
            pairs = list(zip(lists[name], exponents, strict=True))
            found[name] = [dequantize_blockwise(*pair, form) for pair in pairs]
            roots = [root_of_q8s(*pair) for pair in pairs] if form == "q8s" else roots
        elif form == "q8h":
            found[name] = [decode_q8h(*pair) for pair in zip(lists[name], roots, strict=True)]
        else:
            found[name] = [moment.float() for moment in lists[name]]
            if BUFFERS[operation][name].role == "second moment":
                roots = [root_of(moment) for moment in lists[name]]
    return found


def build_coded(
    operation: str,
    options: Options,
    code: str,
    dtypes: Dtypes,
    shapes: list[tuple[int, ...]] | None = None,
    low_bits: int = 0,
    **more: Any,
) -> Lists:
    """The lists of a step on the CPU, with its moments in codes, if any, and split masters."""
    shapes = shapes_of(code) if shapes is None else shapes
    lists = build(operation, options, shapes, dtypes, "cpu", **more)
    lists = encode(lists, operation, code) if code else lists
    if low_bits:
        parts = [split(master, dtypes.param, low_bits) for master in lists["master_params"]]
        lists["params"], lists["master_params"] = (list(part) for part in zip(*parts, strict=True))
    return lists


def moved(lists: Lists, device: torch.device | str) -> Lists:
    """Copies that share nothing with ``lists``."""
    return {name: [t.clone().to(device) for t in tensors] for name, tensors in lists.items()}
