"""Moments in codes of 8 bits: the optimizers' option, and what becomes of it in files."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F32, channels_last, contiguous, placed, strided, transposed
from harness.list_operations import BUFFERS, OPERATIONS
from harness.optimizer_cases import make_params, ours, through_a_file, trained
from harness.reference import same_bits
from torch import Tensor
from torch.nn import Parameter

from amp_ext.optim import AdamW, float32_state_dict


def has_groups(optimizer: Any) -> bool:
    """Returns whether a moment has codes that share exponents, as contiguous parameters may."""
    codes = {"8bit-bf16": ("q8m",), "8bit": ("q8m", "q8s")}[optimizer.defaults["state_dtype"]]
    buffers = BUFFERS[optimizer.description.operation].values()
    return any(buffer.code in codes for buffer in buffers)


# Of two, three and four dimensions, and of one row.
GROUPED = [(130, 32), (3, 5, 1024), (64, 32, 3, 3), (1, 4096)]
# Small, of one dimension, a scalar, nothing, and of rows that 32 does not divide.
UNGROUPED = [(127, 32), (4128,), (), (0, 32), (128, 33)]


def test_moments_share_exponents_where_32_elements_of_a_row_can():
    params = make_params(F32, shapes=GROUPED + UNGROUPED)
    optimizer = trained(ours("Lion")(params, state_dtype="8bit"), 1)
    for param in params:
        shape = tuple(param.shape)
        wanted: dict[str, Any] = {"step": (F32, ()), "exp_avg": (BF16, shape)}
        if shape in GROUPED:
            del wanted["exp_avg"]
            groups = (shape[0], param[0].numel() // 32)
            wanted |= {"exp_avg_q8m": (torch.uint8, shape), "exp_avg_exp": (torch.uint8, groups)}
        state = optimizer.state[param]
        assert {key: (each.dtype, tuple(each.shape)) for key, each in state.items()} == wanted


LAYOUTS = (contiguous, channels_last, transposed, strided)


def spread_grad(step: int) -> Tensor:
    """Gradients of many sizes: moments beside the exponents of other groups would show."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-3, 0, 64 * 32 * 9).view(64, 32, 3, 3)
    return torch.randn(64, 32, 3, 3, generator=generator) * sizes


@pytest.mark.parametrize("state_dtype", ["8bit-bf16", "8bit"])
@pytest.mark.parametrize("through", ["a conversion", "a file"])
@pytest.mark.parametrize(
    ("first", "second"),
    [pair for pair in itertools.permutations(LAYOUTS, 2) if contiguous in pair],
)
@cases.each_class
def test_another_layout_keeps_the_moments(name, options, first, second, through, state_dtype):
    """Only contiguous parameters have groups."""
    param = Parameter(placed(torch.randn(64, 32, 3, 3), first))
    optimizer = ours(name)([param], **options, state_dtype=state_dtype)
    for step in range(3):
        param.grad = spread_grad(step)
        optimizer.step()
    has_exponents = any(key.endswith("_exp") for key in optimizer.state[param])
    assert has_exponents == (first is contiguous and has_groups(optimizer))
    before = float32_state_dict(optimizer)["state"][0]
    if through == "a file":
        other = Parameter(placed(param.detach(), second))
        saved, param = optimizer.state_dict(), other
        optimizer = ours(name)([param], **options, state_dtype=state_dtype)
        optimizer.load_state_dict(through_a_file(saved))
    else:
        param.data = placed(param.detach(), second)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    kept = param.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert same_bits(param.detach(), kept)
    after = float32_state_dict(optimizer)["state"][0]
    group = cases.numbers_of(optimizer.param_groups[0])
    decays = OPERATIONS[cases.operation_of(name)].decays
    for key in before.keys() - {"step"}:
        moment = before[key]
        # A step without gradients, and a code's width.
        decay = group[decays[f"{key}s"]]
        assert (after[key] - moment * decay).norm() <= 0.03 * moment.norm(), key


# Checkpoints.


def test_codes_are_decoded_before_their_second_moments_get_narrow():
    param = Parameter(torch.zeros(64, 64, dtype=torch.float16))
    saved = AdamW([param], state_dtype="8bit-bf16")
    param.grad = torch.full_like(param, 1e-4)
    saved.step()
    loaded = AdamW([param], state_dtype=None)
    loaded.load_state_dict(saved.state_dict())
    assert (loaded.state[param]["exp_avg"] > 0).all()


def test_a_moment_that_is_decoded_has_the_layout_of_its_parameter():
    param = Parameter(torch.randn(8, 16, 4, 4))
    saved = AdamW([param], state_dtype="8bit")
    param.grad = torch.randn_like(param)
    saved.step()
    last = Parameter(param.detach().to(memory_format=torch.channels_last))
    loaded = AdamW([last])
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state[last]["exp_avg_sq"].stride() == last.stride()
