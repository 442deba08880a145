"""Every engine gives the same bits: plain C++, AVX2, the CUDA kernels emulated and on a GPU."""

from __future__ import annotations

import os

import engine_results
import pytest
import torch
from engine_results import Results
from gradient_lists import equal

from amp_ext import ops


@pytest.fixture(scope="module")
def plain(under_isa) -> Results:
    isa, found = under_isa(engine_results.cpu_results, "plain")
    assert isa == "plain"
    return found


def assert_same_bits(actual: Results, expected: Results) -> None:
    differing = [name for name, tensor in actual.items() if not equal(tensor, expected[name])]
    assert not differing


def test_the_numbers_are_of_all_kinds(plain):
    whole = torch.cat([tensor.double() for tensor in plain.values()])
    assert whole.isfinite().double().mean().item() > 0.9
    assert whole.isnan().any()
    assert whole.isinf().any()
    tiny = torch.finfo(torch.float32).smallest_normal
    assert ((whole != 0) & (whole.abs() < tiny)).any()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this processor lacks AVX2",
)
def test_avx2_gives_the_bits_of_plain_cpp(plain, under_isa):
    isa, found = under_isa(engine_results.cpu_results, "avx2")
    assert isa == "avx2"
    assert_same_bits(found, plain)
    assert found.keys() == plain.keys()
    if not os.environ.get("AMP_EXT_CPU_ISA"):
        assert ops.cpu_isa() == "avx2"


def test_every_device_gives_the_bits_of_plain_cpp(device, plain):
    found = engine_results.results(device)
    assert_same_bits(found, plain)
    assert found.keys() == plain.keys() - {"sums of squares"}
