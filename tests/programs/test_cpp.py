"""The C++ classes: their checks, and 50 steps of each beside the class of Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

import amp_ext
from amp_ext import optim

PROGRAM = Path(__file__).resolve().parents[1] / "cpp" / "program" / "main.cpp"
CHECKS = re.findall(r"^void (\w+)\(\) \{", PROGRAM.read_text(), re.MULTILINE)

pytestmark = pytest.mark.slow

Run = Callable[..., None]

STEPS, LR_AT, RESUME_AT = 50, 17, 24  # between two overflows, of which one lowers no scale
SHAPES = (64, 64), (9,)  # with blocks of 32 elements in 8 bits, and without
# The class, the dtype of the parameters and the options of each case of the program.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adam": ("Adam", "float32", {"betas": (0.8, 0.95), "amsgrad": True, "max_grad_norm": 0.5}),
    "adam-8bit-bf16": (
        "Adam",
        "float16",
        {"master_weights": "split8", "state_dtype": "8bit-bf16"},
    ),
    "adamw": (
        "AdamW",
        "float16",
        {"eps": 1e-5, "denominator_floor": 1e-6, "clip_value": 0.125},
    ),
    "adamw-split": (
        "AdamW",
        "bfloat16",
        {"master_weights": "split", "state_dtype": torch.bfloat16},
    ),
    "adamw-8bit": ("AdamW", "float32", {"state_dtype": "8bit", "rounding": "nearest"}),
    "adamw-skip": ("AdamW", "bfloat16", {"max_grad_norm": 0.5, "skip_nonfinite": True}),
    "sgd": (
        "SGD",
        "float64",
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "cautious_weight_decay": True},
    ),
    "sgd-masters": (
        "SGD",
        "float16",
        {"momentum": 0.75, "nesterov": True, "write_back_grads": True},
    ),
    "sgd-none": (
        "SGD",
        "bfloat16",
        {"momentum": 0.75, "dampening": 0.25, "master_weights": False},
    ),
    "lion": (
        "Lion",
        "bfloat16",
        {"betas": (0.8, 0.95), "maximize": True, "rounding": "dither"},
    ),
    "lion-none": ("Lion", "float16", {"master_weights": False, "state_dtype": None}),
    "lion-8bit": ("Lion", "float16", {"master_weights": "split", "state_dtype": "8bit"}),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_the_program_passes(run: Run, name: str) -> None:
    run("check", name)


def data_of(dtype: torch.dtype, scale: float, overflows: bool) -> dict[str, Any]:
    """Returns what a run trains with, as a program in C++ reads it."""
    generator = torch.Generator().manual_seed(7)
    params = [torch.randn(shape, generator=generator) for shape in SHAPES]
    grads = [
        [torch.randn(shape, generator=generator) / 8 for shape in SHAPES] for _ in range(STEPS)
    ]
    for step in (7, 23, 24) if overflows else ():
        grads[step][0][0, 0] = torch.inf
    return {
        "params": [param.to(dtype) for param in params],
        "grads": [[grad.to(dtype) for grad in each] for each in grads],
        "scale": scale,
        "resume_at": RESUME_AT,
        "lr_at": LR_AT,
    }


def train(kind: str, options: dict[str, Any], data: dict[str, Any]) -> tuple[Any, ...]:
    """Trains as the program does; returns each parameter after each step, scale and states."""
    params = [param.clone().requires_grad_() for param in data["params"]]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.005}]
    optimizer = getattr(optim, kind)(groups, **options)
    scaler = amp_ext.GradScaler(
        "cpu",
        init_scale=data["scale"],
        growth_interval=10,
        hysteresis=2,
        enabled=data["scale"] != 1.0,
    )
    bits: list[list[Tensor]] = [[], []]
    for step, grads in enumerate(data["grads"]):
        if step == LR_AT:
            optimizer.param_groups[0]["lr"] = 0.003
        for param, grad in zip(params, grads, strict=True):
            param.grad = scaler.scale(grad.clone())
        if step % 10 == 8 and params[0].dtype != torch.float16:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        for param, after in zip(params, bits, strict=True):
            after.append(param.detach().clone())
    return [torch.stack(each) for each in bits], scaler.get_scale(), optimizer.state_dict()["state"]


def key_in_archives(key: str) -> str:
    """Returns the name that archives of C++ have for an entry of a state."""
    if key.startswith("master"):
        return "master_param"
    return "exponents" if key.endswith("_exp") else re.sub(r"_q8\w$", "", key)


@pytest.mark.parametrize("scale", rows({"scaled": (1024.0,), "unscaled": (1.0,)}))
@pytest.mark.parametrize("name", CASES)
def test_each_step_has_the_bits_of_python(run, name, scale, tmp_path):
    kind, dtype, options = CASES[name]
    overflows = scale != 1.0 or options.get("skip_nonfinite", False)
    data = data_of(getattr(torch, dtype), scale, overflows)
    torch.save(data, tmp_path / "data.pt")
    run("train", name, str(tmp_path))
    bits, wanted_scale, states = train(kind, options, data)
    *mine, mine_scale = torch.load(tmp_path / "result.pt", weights_only=True)
    assert mine_scale == wanted_scale
    for step in range(STEPS):
        for param, (one, other) in enumerate(zip(mine, bits, strict=True)):
            assert same_bits(one[step], other[step]), f"param {param} after step {step}"
    archive = dict(torch.jit.load(tmp_path / "optimizer.pt").named_buffers())
    for param in range(len(SHAPES)):
        prefix = f"group{param}_param0_"
        wanted = {
            prefix + key_in_archives(key): tensor for key, tensor in states.get(param, {}).items()
        }
        # A state of C++ always counts its steps.
        assert {key for key in archive if key.startswith(prefix)} == {*wanted, f"{prefix}step"}
        for key, tensor in wanted.items():
            assert same_bits(archive[key], tensor), key
