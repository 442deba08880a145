"""Which tensors share memory: views of one buffer, drawn by hypothesis; what the search takes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from operator import mul
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness.rows import rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_ext import ops

BYTES = 256
DTYPES = (torch.float16, torch.float32, torch.float64)

repeatable = settings(max_examples=300, deadline=None, derandomize=True, database=None)


class View(NamedTuple):
    """A strided view, in elements of its dtype."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.dtype).as_strided(self.sizes, self.strides, self.offset)

    def bytes(self) -> Counter[int]:
        """Counts the elements that lie on each byte."""
        indices = itertools.product(*map(range, self.sizes))
        starts = [self.offset + sum(map(mul, index, self.strides)) for index in indices]
        item = self.dtype.itemsize
        return Counter(item * start + k for start in starts for k in range(item))


@st.composite
def views(draw, like: View | None = None) -> View:
    """Draws a view: of any sizes, or of those of another view."""
    dtype = draw(st.sampled_from(DTYPES))
    dims = draw(st.lists(st.integers(0, 4), max_size=3)) if like is None else like.sizes
    room = BYTES // dtype.itemsize - 1
    strides = []
    for size in dims:
        strides.append(draw(st.integers(0, min(9, room // max(size - 1, 1)))))
        room -= max(size - 1, 0) * strides[-1]
    return View(dtype, tuple(dims), tuple(strides), draw(st.integers(0, room)))


REFUSED = re.compile("is written and must not (overlap itself, got|share memory with) ")


def is_refused(call) -> bool:
    try:
        call()
    except RuntimeError as error:
        if not REFUSED.search(str(error)):
            raise
        return True
    return False


@given(st.data(), st.integers(1, 3))
@repeatable
def test_what_is_written_may_share_no_byte_and_a_gradient_none_but_its_own(data, count):
    """Gradients that are written, and others that may overlap themselves."""
    buffer = torch.zeros(BYTES, dtype=torch.uint8)
    params = [data.draw(views()) for _ in range(count)]
    grads = [data.draw(views(like=param)) for param in params]
    written = sum((view.bytes() for view in params), Counter())
    read = sum((view.bytes() for view in grads), Counter())
    is_shared = any(number > 1 for number in written.values())
    tensors, gradients = ([view.of(buffer) for view in side] for side in (params, grads))
    inv_scale, found_inf = torch.ones(()), torch.zeros(())
    assert is_refused(lambda: ops.unscale_(tensors, inv_scale, found_inf)) == is_shared
    is_shared |= bool(written & read)
    assert is_refused(lambda: ops.sgd_(tensors, gradients, lr=0.0)) == is_shared


PROCESS = Path("/proc/self")
TALL, WIDE = 100_000, 64


def grown_by(call) -> int:
    """Returns the bytes by which the memory of this process grows at most during a call."""
    try:
        (PROCESS / "clear_refs").write_text("5")  # lets the peak start anew
    except OSError:
        pytest.skip("the peak of the memory can't be measured here")
    before = peak()
    call()
    return peak() - before


def peak() -> int:
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text())[1])


@pytest.mark.parametrize(
    "views",
    rows(
        {
            "a-column": [((TALL,), (WIDE,), 0)],
            "two-columns": [((TALL,), (WIDE,), 0), ((TALL,), (WIDE,), 5)],
            "blocks": [((TALL, 2), (WIDE, 1), 0), ((TALL, 1), (WIDE, 1), 2)],
            "in-steps": [((TALL, 2), (WIDE, 32), 0), ((TALL, 2), (WIDE, 32), 31)],
            # What only the elements tell.
            "crossed": [((TALL, 2), (6, 9), 0), ((TALL,), (6,), 1)],
        }
    ),
)
def test_the_search_takes_no_memory_for_what_lies_between_elements(views):
    whole = torch.zeros(TALL * WIDE)
    grads = [whole.as_strided(*view) for view in views]
    numbers = torch.ones(()), torch.zeros(())
    elements = sum(grad.numel() for grad in grads)
    # With the dense copies of which the operation makes two a time.
    assert grown_by(lambda: ops.unscale_(grads, *numbers)) < 40 * elements + 2**20
