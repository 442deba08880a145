"""Tests of ``check_finite_``: it finds every inf and NaN, nothing else, and only reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import same_bits
from torch import Tensor

from amp_ext import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Around the widths of vectors, around the usual tiles and chunks, and more than one of them.
SIZES = [1, 3, 4, 5, 8, 9, 31, 33, 1023, 1025, 4095, 4097, 16385, 65535, 65537]
NON_FINITE = [
    pytest.param(float("inf"), id="inf"),
    pytest.param(float("-inf"), id="minus-inf"),
    pytest.param(float("nan"), id="nan"),
]


def found(tensors: list[Tensor], *, before: float = 0.0, **options: Tensor) -> float:
    """Returns found_inf after a check that starts from ``before``."""
    device = tensors[0].device if tensors else "cpu"
    found_inf = torch.full((), before, device=device)
    ops.check_finite_(tensors, found_inf, **options)
    return found_inf.item()


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_anywhere_is_found(dtype: torch.dtype, value: float, device) -> None:
    for size in SIZES:
        tensor = torch.ones(size, dtype=dtype, device=device)
        assert found([tensor]) == 0, size
        for index in {0, 1, size // 3, size // 2, size - 2, size - 1} & set(range(size)):
            tensor[index] = value
            assert found([tensor]) == 1, (size, index)
            tensor[index] = 1


@pytest.mark.parametrize("value", NON_FINITE)
def test_one_bad_element_is_found_whichever_thread_reads_it(value: float, device) -> None:
    tensor = torch.ones(1_000_003, device=device)
    assert found([tensor]) == 0
    for index in [*range(7, tensor.numel(), 99_991), tensor.numel() - 1]:
        tensor[index] = value
        assert found([tensor]) == 1, index
        tensor[index] = 1


@pytest.mark.parametrize("count", [2, 30, 700])
def test_one_bad_tensor_of_many_is_found(count: int, device) -> None:
    tensors = [torch.ones(1 + index % 5, device=device) for index in range(count)]
    assert found(tensors) == 0
    for index in {0, count // 2, count - 1}:
        tensors[index][-1] = float("nan")
        assert found(tensors) == 1, index
        tensors[index][-1] = 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern_is_judged_right(dtype: torch.dtype, device) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = patterns.isfinite()
    assert found([patterns[finite].to(device)]) == 0
    for pattern in patterns[~finite]:
        assert found([pattern.to(device)]) == 1, hex(pattern.view(torch.int16).item() & 0xFFFF)


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        pytest.param(0x7F800001, torch.int32, id="signalling-nan"),
        pytest.param(0x7FFFFFFF, torch.int32, id="nan-with-all-bits"),
        pytest.param(0x7FF0000000000001, torch.int64, id="signalling-nan-double"),
        pytest.param(0x7FF0000000000000, torch.int64, id="inf-double"),
    ],
)
def test_unusual_patterns_are_found(pattern: int, dtype: torch.dtype, device) -> None:
    floating = {torch.int32: torch.float32, torch.int64: torch.float64}[dtype]
    tensor = torch.zeros(100, dtype=dtype)
    tensor[57] = pattern
    assert found([tensor.view(floating).to(device)]) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.full((5000,), torch.finfo(torch.float32).max), id="largest-float"),
        pytest.param(torch.full((5000,), -torch.finfo(torch.float32).max), id="lowest-float"),
        pytest.param(torch.tensor([3e38, -3e38]).repeat(2500), id="sums-of-both-signs-overflow"),
        pytest.param(torch.full((5000,), 1e-45), id="subnormal"),
        pytest.param(torch.full((5000,), -0.0), id="minus-zero"),
        pytest.param(torch.full((5000,), 65504.0, dtype=torch.float16), id="largest-half"),
        pytest.param(torch.full((5000,), 3.38e38, dtype=torch.bfloat16), id="largest-bfloat16"),
        pytest.param(torch.full((5000,), 1e39, dtype=torch.float64), id="double-above-float"),
        pytest.param(torch.full((5000,), 1.7e308, dtype=torch.float64), id="largest-double"),
    ],
)
def test_large_and_small_finite_numbers_are_no_overflow(tensor: Tensor, device) -> None:
    assert found([tensor.to(device)]) == 0


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0, -2.0])
def test_clean_tensors_leave_found_inf_as_it_is(before: float, device) -> None:
    assert found([torch.ones(10, device=device)], before=before) == before


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0])
def test_found_inf_is_one_however_many_elements_are_bad(before: float, device) -> None:
    tensors = [torch.full((9_000,), float("inf"), device=device) for _ in range(3)]
    assert found(tensors, before=before) == 1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_found_inf_may_have_any_shape_of_one_element(shape: tuple[int, ...], device) -> None:
    neighbours = torch.zeros(3, device=device)
    found_inf = neighbours[1:2].view(shape)
    ops.check_finite_([torch.full((3,), float("nan"), device=device)], found_inf)
    assert neighbours.tolist() == [0, 1, 0]


@pytest.mark.parametrize("before", [0.0, 1.0])
def test_no_tensors_and_empty_tensors_are_clean(before: float, device) -> None:
    empty = torch.empty(0, device=device)
    found_inf = torch.full((), before, device=device)
    ops.check_finite_([], found_inf)
    ops.check_finite_([empty, torch.empty(3, 0, 2, device=device), empty], found_inf)
    assert found_inf.item() == before


def test_empty_tensors_between_others_hide_nothing(device) -> None:
    empty, bad = torch.empty(0, device=device), torch.full((), float("nan"), device=device)
    assert found([empty, torch.ones(3, device=device), empty, bad, empty]) == 1


def test_a_list_may_mix_dtypes(device) -> None:
    tensors = [torch.ones(6, dtype=dtype, device=device) for dtype in DTYPES * 2]
    assert found(tensors) == 0
    for tensor in tensors:
        tensor[-1] = float("inf")
        assert found(tensors) == 1
        tensor[-1] = 1


VIEWS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("every-second", lambda base: base[::2]),
    ("misaligned", lambda base: base[1:]),
    ("columns", lambda base: base.view(60, 70)[:, 3:66]),
    ("transposed", lambda base: base.view(60, 70).t()[:, :59]),
    ("channels-last", lambda base: base.view(2, 5, 6, 70).permute(0, 3, 1, 2)[:1]),
    ("one-element", lambda base: base[77]),
    ("expanded", lambda base: base[5:6].expand(100)),
    ("overlapping", lambda base: base.as_strided((30, 10), (1, 1))),
]


@pytest.mark.parametrize("view", [pytest.param(view, id=name) for name, view in VIEWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_read_whole_and_its_neighbours_not_at_all(
    dtype: torch.dtype, view: Callable[[Tensor], Tensor], device
) -> None:
    inside = view(torch.arange(4200)).flatten().unique().to(device)
    base = torch.full((4200,), float("nan"), dtype=dtype, device=device)
    base[inside] = 1
    assert found([view(base)]) == 0
    for index in (inside[0], inside[-1]):
        base[index] = float("inf")
        assert found([view(base)]) == 1, index
        base[index] = 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_slices_at_every_alignment_are_right(dtype: torch.dtype, device) -> None:
    for start in range(17):
        for length in range(0, 36, 5):
            base = torch.full((60,), float("nan"), dtype=dtype, device=device)
            base[start : start + length] = 1
            assert found([base[start : start + length]]) == 0, (start, length)
            assert found([base[start : start + length + 1]]) == 1, (start, length)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        pytest.param(65536.0, 0, id="usual"),
        pytest.param(1e-38, 0, id="inverse-below-the-largest-float"),
        pytest.param(3e-39, 0, id="subnormal-with-a-finite-inverse"),
        pytest.param(1e-39, 1, id="inverse-above-the-largest-float"),
        pytest.param(0.0, 1, id="zero"),
        pytest.param(float("nan"), 1, id="nan"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_scale_without_a_finite_inverse_counts_as_overflow(
    scale: float, expected: int, shape: tuple[int, ...], device
) -> None:
    grad_scale = torch.full(shape, scale, device=device)
    clean = torch.ones(10, device=device)
    assert found([clean], grad_scale=grad_scale) == expected
    assert found([clean, clean * float("inf")], grad_scale=grad_scale) == 1
    assert same_bits(grad_scale, torch.full(shape, scale))


def test_the_versions_of_the_tensors_stay(device) -> None:
    tensors = [torch.ones(5, device=device), torch.full((5,), float("nan"), device=device)]
    versions = [tensor._version for tensor in tensors]
    found(tensors)
    assert [tensor._version for tensor in tensors] == versions


READ_ONLY = """
import mmap, sys
import torch
from amp_ext import ops
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    tensor = torch.frombuffer(pages, dtype=dtype)
    half = tensor.numel() // 2
    found_inf = torch.zeros(())
    ops.check_finite_([tensor[:half], tensor[1:half]], found_inf)
    assert found_inf.item() == 0
    ops.check_finite_([tensor, tensor[1::2]], found_inf, grad_scale=torch.ones(()))
    assert found_inf.item() == 1
"""


def test_memory_that_cannot_be_written_can_be_checked(tmp_path: Path) -> None:
    """A write of any kind, even of the same bits, would end the child with a signal."""
    file = tmp_path / "read_only"
    file.write_bytes(bytes(160_000) + b"\xff" * 8)  # zeros, and a NaN of every dtype
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_ONLY, file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("tensors", "found_inf", "grad_scale", "text"),
    [
        pytest.param(
            [torch.ones(2), torch.ones(2, dtype=torch.int32)],
            torch.zeros(()),
            None,
            r"tensors\[1\] must be .*Int",
            id="integers",
        ),
        pytest.param(
            [torch.ones(2, dtype=torch.complex64)],
            torch.zeros(()),
            None,
            r"tensors\[0\] must be .*Complex",
            id="complex",
        ),
        pytest.param(
            [torch.ones(2), torch.ones(2).to_sparse()],
            torch.zeros(()),
            None,
            r"tensors\[1\] must be .*[Ss]parse",
            id="sparse",
        ),
        pytest.param(
            [torch.ones(2), torch.ones(2, device="meta")],
            torch.zeros(()),
            None,
            r"tensors\[1\] must be .*meta",
            id="another-device",
        ),
        pytest.param(
            [torch.ones(2)],
            torch.zeros((), dtype=torch.float64),
            None,
            "found_inf must be Float, got Double",
            id="double-found-inf",
        ),
        pytest.param(
            [torch.ones(2)],
            torch.zeros((), dtype=torch.bool),
            None,
            "found_inf must be Float, got Bool",
            id="bool-found-inf",
        ),
        pytest.param([torch.ones(2)], torch.zeros(2), None, "found_inf must", id="two-found-infs"),
        pytest.param(
            [torch.ones(2)],
            torch.zeros((), device="meta"),
            None,
            "found_inf must .*meta",
            id="found-inf-elsewhere",
        ),
        pytest.param(
            [torch.ones(2)],
            torch.zeros(()),
            torch.ones((), dtype=torch.float16),
            "grad_scale must be Float, got Half",
            id="half-scale",
        ),
        pytest.param(
            [torch.ones(2)], torch.zeros(()), torch.ones(2), "grad_scale must", id="two-scales"
        ),
    ],
)
def test_bad_arguments_are_named(
    tensors: list[Tensor], found_inf: Tensor, grad_scale: Tensor | None, text: str
) -> None:
    with pytest.raises(RuntimeError, match=rf"check_finite_: {text}"):
        ops.check_finite_(tensors, found_inf, grad_scale=grad_scale)
