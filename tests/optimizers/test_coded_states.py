"""Moments in codes of 8 bits: the optimizers' option, and what becomes of it in files."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness.awkward import BF16, F16, F32
from harness.list_operations import BUFFERS
from harness.optimizer_cases import (
    make_params,
    of_other_classes,
    ours,
    params_of,
    through_a_file,
    train,
    twins,
)
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor
from torch.nn import Parameter

from amp_ext.optim import AdamW

Optimizer = torch.optim.Optimizer

# With groups: of two, three and four dimensions and of one row. Without: small, of one dimension, a
# scalar, nothing, and of rows that 32 does not divide.
GROUPED = [(130, 32), (3, 5, 1024), (64, 32, 3, 3), (1, 4096)]
UNGROUPED = [(127, 32), (4128,), (), (0, 32), (128, 33)]
SHAPES = GROUPED + UNGROUPED
CODED = ("8bit-bf16", "8bit")
coded = pytest.mark.parametrize("state_dtype", CODED)


def codes_of(operation: str) -> dict[str, dict[str, str]]:
    """Returns the codes that moments take with groups, by ``state_dtype``."""
    return {
        state_dtype: {
            buffer.name: buffer.code
            for buffer in BUFFERS[operation].values()
            if buffer.code in codes
        }
        for state_dtype, codes in (("8bit-bf16", ("q8h", "q8m")), ("8bit", ("q8h", "q8m", "q8s")))
    }


# The class, its options, and the codes of its moments with groups by ``state_dtype``.
_BOTH = {"8bit-bf16": {"exp_avg": "q8h"}, "8bit": {"exp_avg": "q8h", "exp_avg_sq": "q8s"}}
_MOMENTUM = {name: {"momentum_buffer": "q8m"} for name in CODED}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, str]]]] = {
    "adamw": ("AdamW", {"weight_decay": 0.5}, _BOTH),
    "lion": ("Lion", {"weight_decay": 0.5}, {name: {"exp_avg": "q8m"} for name in CODED}),
    "dampening": ("SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True}, _MOMENTUM),
}
SETTINGS |= {
    key: (name, options, codes_of(f"{name.lower()}_"))
    for key, (name, options) in of_other_classes(SETTINGS, "Adam").items()
}
each_setting = pytest.mark.parametrize(("name", "options", "codes"), rows(SETTINGS))

# Parameters and how much of their masters is kept.
each_form = pytest.mark.parametrize(
    ("dtype", "master_weights"),
    rows(
        {
            "fp32": (F32, True),
            "bf16-split": (BF16, "split"),
            "fp16-split8": (F16, "split8"),
            "bf16-alone": (BF16, False),
        }
    ),
)


def make(name: str, dtype: torch.dtype, device: Any = "cpu", **options: Any) -> Any:
    return ours(name)(make_params(dtype, device, SHAPES), **options)


def moments_of(optimizer: Any) -> list[dict[str, Tensor]]:
    """Returns the moments of each parameter as numbers, as a float32 optimizer loads them."""
    dtype = params_of(optimizer)[0].dtype
    group = dict(optimizer.param_groups[0])
    names = {key: group[key] for key in ("lr", "momentum", "dampening") if key in group}
    whole = type(optimizer)(twins(optimizer), **names, state_dtype=F32)
    whole.load_state_dict(optimizer.state_dict())
    assert all(param.dtype == dtype for param in params_of(whole))
    return [
        {key: whole.state[param][key] for key in whole.kept_by(group).names}
        for param in params_of(whole)
    ]


# States.


@coded
@each_form
@each_setting
def test_states_have_the_keys_dtypes_and_shapes_of_their_formats(
    name, options, codes, dtype, master_weights, state_dtype
):
    options = options | {"state_dtype": state_dtype, "master_weights": master_weights}
    optimizer = make(name, dtype, **options)
    train([optimizer], 2)
    buffers = optimizer.kept_by(optimizer.param_groups[0]).names
    for shape, param in zip(SHAPES, params_of(optimizer), strict=True):
        wanted = {}
        for buffer in buffers:
            code = codes[state_dtype].get(buffer)
            if code is None or (code != "q8h" and shape not in GROUPED):
                wanted[buffer] = (BF16, shape)
                continue
            dtype_of_code = torch.int8 if code == "q8h" else torch.uint8
            wanted[f"{buffer}_{code}"] = (dtype_of_code, shape)
            if code != "q8h":
                groups = (shape[0], torch.Size(shape[1:]).numel() // 32)
                wanted[f"{buffer}_exp"] = (torch.uint8, groups)
        found = {
            key: (value.dtype, tuple(value.shape))
            for key, value in optimizer.state[param].items()
            if key != "step" and not key.startswith("master")
        }
        assert found == wanted
        assert optimizer.state[param]["step"].item() == 2


def weight_as(layout: str, values: Tensor) -> Parameter:
    if layout == "channels_last":
        return Parameter(values.contiguous(memory_format=torch.channels_last))
    if layout == "transposed":
        return Parameter(values.transpose(0, 1).contiguous().transpose(0, 1))
    if layout == "with gaps":
        wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1])
        wide[..., ::2] = values
        return Parameter(wide[..., ::2])
    return Parameter(values.contiguous())


LAYOUTS = ("contiguous", "channels_last", "transposed", "with gaps")


def spread_grad(step: int) -> Tensor:
    """Gradients of many sizes: moments beside the exponents of other groups would show."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-3, 0, 64 * 32 * 9).view(64, 32, 3, 3)
    return torch.randn(64, 32, 3, 3, generator=generator) * sizes


@coded
@pytest.mark.parametrize("through", ["a conversion", "a file"])
@pytest.mark.parametrize(
    ("first", "second"),
    [pair for pair in itertools.permutations(LAYOUTS, 2) if "contiguous" in pair],
)
@each_setting
def test_another_layout_keeps_the_moments(
    name, options, codes, first, second, through, state_dtype
):
    """Only contiguous parameters have groups."""
    param = weight_as(first, torch.randn(64, 32, 3, 3))
    optimizer = ours(name)([param], **options, state_dtype=state_dtype)
    for step in range(3):
        param.grad = spread_grad(step)
        optimizer.step()
    has_exponents = any(key.endswith("_exp") for key in optimizer.state[param])
    has_code_with_groups = any(code != "q8h" for code in codes[state_dtype].values())
    assert has_exponents == (first == "contiguous" and has_code_with_groups)
    (before,) = moments_of(optimizer)
    if through == "a file":
        other = weight_as(second, param.detach())
        saved, param = optimizer.state_dict(), other
        optimizer = ours(name)([param], **options, state_dtype=state_dtype)
        optimizer.load_state_dict(through_a_file(saved))
    else:
        param.data = weight_as(second, param.detach()).data
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    kept = param.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert same_bits(param.detach(), kept)
    (after,) = moments_of(optimizer)
    beta = {"exp_avg": 0.99 if name == "Lion" else 0.9, "exp_avg_sq": 0.999, "momentum_buffer": 0.9}
    for key, moment in before.items():
        # A step without gradients, and a code's width.
        assert (after[key] - moment * beta[key]).norm() <= 0.03 * moment.norm(), key


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
