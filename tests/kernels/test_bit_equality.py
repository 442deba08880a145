"""Every engine gives the same bits.

Plain C++, AVX2, AVX-512, and the CUDA kernels emulated and on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch
from harness import engine_results
from harness.edge_shapes import BF16, F32, Dtypes
from harness.engine_results import Results
from harness.gradient_lists import equal
from harness.list_operations import build, run

from amp_ext import ops


@pytest.fixture(scope="module")
def plain(under_isa) -> Results:
    isa, found = under_isa(engine_results.cpu_results, "plain")
    assert isa == "plain"
    return found


def assert_same_bits(actual: Results, expected: Results) -> None:
    differing = [name for name, tensor in actual.items() if not equal(tensor, expected[name])]
    assert not differing


# What torch calls the processor's vectors, and ours that it has then, the widest last.
VECTORS = {"AVX2": ["avx2"], "AVX512": ["avx2", "avx512"]}
SETS = VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_wider_vectors_give_the_bits_of_plain_cpp(plain, under_isa, isa):
    if isa not in SETS:
        pytest.skip(f"this processor lacks {isa}")
    taken, found = under_isa(engine_results.cpu_results, isa)
    assert taken == isa
    assert_same_bits(found, plain)
    assert found.keys() == plain.keys()


@pytest.mark.skipif("AMP_EXT_CPU_ISA" in os.environ, reason="a set is chosen from outside")
def test_the_widest_vectors_of_the_processor_are_taken():
    assert ops.cpu_isa() == ["plain", *SETS][-1]


def test_every_device_gives_the_bits_of_plain_cpp(device, plain):
    found = engine_results.results(device)
    assert_same_bits(found, plain)
    assert found.keys() == plain.keys() - {"sums of squares"}


@pytest.mark.slow
@pytest.mark.parametrize("states", [F32, BF16], ids=["float32-states", "bfloat16-states"])
def test_a_large_tensor_has_the_bits_of_its_parts(states, device):
    """The CUDA kernels cut it into larger tiles."""
    numel, part = 2**22 + 3, 2**20
    whole = build("adam_", {}, [(numel,)], Dtypes(BF16, BF16, states, master=True), device)
    before = {name: tensor.clone() for name, (tensor,) in whole.items()}
    run("adam_", whole, dither=True, global_offsets=[0])
    for begin in range(0, numel, part):
        one = {
            name: [tensor.clone() if tensor.dim() == 0 else tensor[begin : begin + part].clone()]
            for name, tensor in before.items()
        }
        run("adam_", one, dither=True, global_offsets=[begin])
        for name, (tensor,) in one.items():
            expected = whole[name][0]
            assert equal(
                tensor, expected if expected.dim() == 0 else expected[begin : begin + part]
            )
