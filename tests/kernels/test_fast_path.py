"""The fast path of the CUDA kernels takes what is common.

Its bits are those of the general code: test_bit_equality.py and the hashes of scripts/hash_steps.py
compare them. Here the emulator counts the votes by which a warp leaves the fast path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.edge_numbers import FORMS
from harness.edge_shapes import BF16, F32
from torch import Tensor

import amp_ext
from amp_ext import ops

# Whole packs of warps, and a rest that goes element by element.
NUMEL = 8192 + 256 + 32


def votes() -> tuple[int, int]:
    """Returns how many warps have voted so far, and how many of them have left the fast path."""
    taken, held = ctypes.c_int64(), ctypes.c_int64()
    library = ctypes.CDLL(ops._C.__file__)
    library.cuda_emulator_votes(ctypes.byref(taken), ctypes.byref(held))
    return taken.value, held.value


def counted(steps: Callable[[], None]) -> tuple[int, int]:
    """Returns the votes in some steps, and those that left the fast path."""
    before = votes()
    steps()
    return tuple(after - old for after, old in zip(votes(), before, strict=True))  # type: ignore[return-value]


def optimizer_of(form: str, param: Tensor) -> amp_ext.optim.FusedOptimizer:
    """Returns an optimizer that keeps its numbers as a form of ``edge_numbers`` does."""
    operation, _, dtypes, low_bits, code = FORMS[form]
    name = {"adam_": "AdamW", "lion_": "Lion", "sgd_": "SGD"}[operation]
    sgd = {"momentum": 0.9, "decoupled_weight_decay": True}
    options: dict[str, Any] = sgd if name == "SGD" else {}
    options["state_dtype"] = {"": dtypes.state, "q8h": "8bit-bf16"}.get(code, "8bit")
    if dtypes.param != F32:
        split = {0: True, 16: "split", 8: "split8"}[low_bits]
        options["master_weights"] = split if dtypes.master else False
    return getattr(amp_ext.optim, name)([param], lr=1e-3, **options)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.endswith("float32")])
def test_no_warp_leaves_the_fast_path_in_usual_steps(form, emulated):
    dtype = FORMS[form][2].param
    params = [torch.nn.Parameter(torch.randn(NUMEL).mul_(0.02).to(dtype)) for _ in range(2)]
    optimizer = optimizer_of(form, params[0])
    cautious = {"params": [params[1]], "weight_decay": 0.1, "cautious_weight_decay": True}
    optimizer.add_param_group(cautious)
    scaler = amp_ext.GradScaler("cpu", init_scale=1024.0)

    def steps() -> None:
        for step in range(3):
            scaler.scale(torch.ones(()))
            for param in params:
                param.grad = torch.randn(NUMEL).mul_(10.0 ** (1 - step)).to(dtype)
            scaler.step(optimizer)
            scaler.update()

    taken, left = counted(steps)
    assert left == 0
    assert taken >= 3 * 2 * (NUMEL // 256)


def left_by_dead_rows(form: str, beta2: float, pruned: bool) -> tuple[float, float]:
    """Returns which shares of the warps leave the fast path in 2,000 steps of an embedding.

    Every second row of it has no gradient from the 20th step on, and is set to 0 if it is pruned.

    Returns:
        The share of warps whose updates are divided exactly, in a second vote, and the share that
        goes through the general code.
    """
    rows, width = 16, 256
    dtype = FORMS[form][2].param
    param = torch.nn.Parameter(torch.randn(rows, width).mul_(0.02).to(dtype))
    optimizer = optimizer_of(form, param)
    optimizer.param_groups[0]["betas"] = (0.9, beta2)

    def steps() -> None:
        for step in range(2000):
            grad = torch.randn(rows, width).mul_(1e-3)
            if step >= 20:
                grad[::2] = 0.0
                if pruned:
                    with torch.no_grad():
                        param[::2] = 0.0
            param.grad = grad.to(dtype)
            optimizer.step()

    taken, held = counted(steps)
    packs = 2000 * rows * width // 256
    divided = taken - packs
    return divided / packs, (held - divided) / packs


CODED = ["adam_ fp32 q8s", "adam_ bf16-split8 q8s", "adam_ bf16-split16 q8h"]
IN_BFLOAT16 = ["adam_ fp32 bfloat16", "adam_ bf16 bfloat16", "adam_ bf16-split16 bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("beta2", [0.999, 0.95])
@pytest.mark.parametrize("form", [*CODED, *IN_BFLOAT16])
def test_rows_without_gradients_stay_on_the_fast_path(form, beta2, emulated):
    assert sum(left_by_dead_rows(form, beta2, pruned=False)) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("form", CODED)
def test_pruned_weights_stay_on_the_fast_path_once_their_moments_are_gone(form, emulated):
    assert sum(left_by_dead_rows(form, 0.999, pruned=True)) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("form", IN_BFLOAT16[:2])
def test_updates_of_pruned_weights_are_divided_exactly_beside_first_moments_in_bfloat16(
    form, emulated
):
    """Such a moment stays at 2^-131, and the update of a 0 is a subnormal number."""
    divided, left = left_by_dead_rows(form, 0.999, pruned=True)
    assert 0.1 < divided <= 0.5
    assert left <= 0.01


def test_one_unusual_element_sends_its_warp_alone_through_the_general_code(emulated):
    param = torch.nn.Parameter(torch.randn(NUMEL).to(BF16))
    optimizer = optimizer_of("adam_ bf16-split16 bfloat16", param)
    param.grad = torch.randn(NUMEL).to(BF16)
    param.grad[8192 + 200] = torch.inf
    _, left = counted(optimizer.step)
    assert left == 2  # with both divisions
    assert param.isfinite().sum() == NUMEL - 1


def test_fast_roots_and_quotients_are_rounded_to_nearest(emulated):
    """From approximations that are exact but for a rounding; a GPU's are tried in test_gpu.py."""
    assert ops.count_division_errors(torch.device("cpu"), 997).tolist() == [0, 0, 0]


def test_a_stride_of_nothing_is_refused(emulated):
    with pytest.raises(RuntimeError, match="stride must be at least 1, got 0"):
        ops.count_division_errors(torch.device("cpu"), 0)
