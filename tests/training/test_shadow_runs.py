"""Tests that the codes of ``number_codes`` keep the bounds by which optimizers are judged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.gradient_streams import gradients
from harness.rows import rows
from shadow_figure import MASTERS, STATES, draw, errors_of_updates, errors_of_weights
from shadow_runs import (
    ADAM_BOUNDS,
    BETAS,
    LARGEST_BIAS,
    LION_BOUNDS,
    MOMENTUM_BOUNDS,
    Adam64,
    CodedAdam,
    Momentum,
    OptimizerScheme,
    assert_within,
    shadow_run,
)
from shadow_runs import Lion as OfLion
from torch import Tensor

from amp_ext.optim import SGD, AdamW, Lion


def zeros(stream: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(stream.shape[1:], dtype=dtype)


# Of the streams that need not be seen at each setting.
FEW_STREAMS = ["rare", "model"]
SETTINGS = [
    (betas, name) for betas, row in ADAM_BOUNDS["q8h dithered", "q8s"].items() for name in row
]


@pytest.mark.slow
@pytest.mark.parametrize(("betas", "name"), SETTINGS)
def test_coded_adam_keeps_its_bounds(name, betas):
    stream = gradients(name)
    schemes = {kinds: CodedAdam(stream.shape[1:], betas, *kinds) for kinds in ADAM_BOUNDS}
    found = shadow_run(stream, Adam64(stream.shape[1:], betas), schemes)
    for kinds, errors in found.items():
        assert_within(errors, ADAM_BOUNDS[kinds][betas][name], what=f"{kinds}: {errors}")
        # At 0.95 a rare row decays by 1e-11 before it is seen again, and its bias means nothing.
        assert betas[1] < 0.999 or abs(errors.bias) < LARGEST_BIAS[kinds[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_amsgrad_is_not_biased_where_the_second_moment_is_dithered(name):
    """Its maximum may be nearest: a maximum never has to fall."""
    stream = gradients(name)
    schemes = {
        kind: CodedAdam(stream.shape[1:], BETAS, "nearest", kind, "nearest")
        for kind in ("dithered", "nearest")
    }
    found = shadow_run(stream, Adam64(stream.shape[1:], amsgrad=True), schemes)
    assert abs(found["dithered"].bias) < 0.004
    assert found["dithered"].update < 0.015
    assert found["nearest"].bias > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_coded_momentum_keeps_its_bounds(name, momentum):
    stream = gradients(name)
    exact = Momentum(zeros(stream, torch.float64), momentum)
    schemes = {
        kind: Momentum(zeros(stream), momentum, kind)
        for kind, bounds in MOMENTUM_BOUNDS.items()
        if momentum in bounds
    }
    for kind, errors in shadow_run(stream, exact, schemes).items():
        assert errors.update < MOMENTUM_BOUNDS[kind][momentum], kind


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_coded_lion_turns_few_signs(name):
    stream = gradients(name)
    exact = OfLion(zeros(stream, torch.float64))
    schemes = {kind: OfLion(zeros(stream), kind=kind) for kind in LION_BOUNDS}
    for kind, errors in shadow_run(stream, exact, schemes).items():
        # A turned sign differs by two.
        assert (errors.update / 2) ** 2 < LION_BOUNDS[kind], kind


# The optimizers themselves, with states in bfloat16.


def of_ours(kind: type[torch.optim.Optimizer], stream: Tensor, **options: Any) -> OptimizerScheme:
    return OptimizerScheme(kind, stream.shape[1:], state_dtype=torch.bfloat16, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("betas", "name"), SETTINGS)
def test_adamw_with_bfloat16_states_keeps_its_bounds(name, betas):
    stream = gradients(name)
    scheme = of_ours(AdamW, stream, betas=betas, weight_decay=0.0)
    (errors,) = shadow_run(stream, Adam64(stream.shape[1:], betas), {"": scheme}).values()
    assert_within(errors, ADAM_BOUNDS["nearest", "dithered"][betas][name], what=f"{errors}")
    assert betas[1] < 0.999 or abs(errors.bias) < LARGEST_BIAS["dithered"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_amsgrad_with_bfloat16_states_is_not_biased(name):
    stream = gradients(name)
    scheme = of_ours(AdamW, stream, amsgrad=True, weight_decay=0.0)
    (errors,) = shadow_run(stream, Adam64(stream.shape[1:], amsgrad=True), {"": scheme}).values()
    assert abs(errors.bias) < 0.004
    assert errors.update < 0.015


@pytest.mark.slow
@pytest.mark.parametrize(("momentum", "kind"), [(0.9, "nearest"), (0.99, "dithered")])
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_sgd_with_bfloat16_states_keeps_its_bounds(name, momentum, kind):
    stream = gradients(name)
    exact = Momentum(zeros(stream, torch.float64), momentum)
    scheme = of_ours(SGD, stream, momentum=momentum)
    (errors,) = shadow_run(stream, exact, {"": scheme}).values()
    assert errors.update < MOMENTUM_BOUNDS[kind][momentum]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_lion_with_bfloat16_states_turns_few_signs(name):
    stream = gradients(name)
    exact = OfLion(zeros(stream, torch.float64))
    (errors,) = shadow_run(stream, exact, {"": of_ours(Lion, stream)}).values()
    assert (errors.update / 2) ** 2 < LION_BOUNDS["dithered"]


# The optimizers themselves, with states in 8 bits.

CODES_OF_ADAM = {
    "8bit-bf16": ("q8h dithered", "dithered"),
    "8bit": ("q8h dithered", "q8s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", CODES_OF_ADAM)
@pytest.mark.parametrize(("betas", "name"), SETTINGS)
def test_adamw_with_states_in_8_bits_keeps_its_bounds(name, betas, state_dtype):
    stream, kinds = gradients(name), CODES_OF_ADAM[state_dtype]
    scheme = OptimizerScheme(
        AdamW, stream.shape[1:], state_dtype=state_dtype, betas=betas, weight_decay=0.0
    )
    (errors,) = shadow_run(stream, Adam64(stream.shape[1:], betas), {"": scheme}).values()
    assert_within(errors, ADAM_BOUNDS[kinds][betas][name], what=f"{errors}")
    assert betas[1] < 0.999 or abs(errors.bias) < LARGEST_BIAS[kinds[1]]


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", CODES_OF_ADAM)
@pytest.mark.parametrize(("momentum", "kind"), [(0.9, "q8m dithered"), (0.99, "q8m dithered")])
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_sgd_with_states_in_8_bits_keeps_its_bounds(name, momentum, kind, state_dtype):
    stream = gradients(name)
    exact = Momentum(zeros(stream, torch.float64), momentum)
    scheme = OptimizerScheme(SGD, stream.shape[1:], state_dtype=state_dtype, momentum=momentum)
    (errors,) = shadow_run(stream, exact, {"": scheme}).values()
    assert errors.update < MOMENTUM_BOUNDS[kind][momentum], errors


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW_STREAMS)
def test_lion_with_states_in_8_bits_turns_few_signs(name):
    stream = gradients(name)
    exact = OfLion(zeros(stream, torch.float64))
    scheme = OptimizerScheme(Lion, stream.shape[1:], state_dtype="8bit")
    (errors,) = shadow_run(stream, exact, {"": scheme}).values()
    assert (errors.update / 2) ** 2 < LION_BOUNDS["q8m dithered"], errors


MOMENTUM_CODES = rows({"to-nearest": ("nearest", "q8m"), "dithered": (None, "q8m dithered")})


@pytest.mark.parametrize("momentum", [0.9, 0.99])
@pytest.mark.parametrize(("rounding", "kind"), MOMENTUM_CODES)
def test_the_codes_of_sgd_are_those_that_are_judged(rounding, kind, momentum):
    """Its arithmetic is that of the reference, so not a bit is different."""
    stream = gradients("half a decade")[:60]
    reference = Momentum(zeros(stream), momentum, kind)
    options = {"state_dtype": "8bit", "rounding": rounding, "momentum": momentum}
    scheme = OptimizerScheme(SGD, stream.shape[1:], **options)
    for grad in stream:
        assert torch.equal(scheme.step(grad), reference.step(grad))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two decades", *FEW_STREAMS])
def test_masters_end_where_float64_ends(name):
    errors = errors_of_weights(gradients(name))
    assert errors["split"] == errors["float32"] < 1e-5
    assert errors["split8"] < 0.003
    assert errors["none"] < 0.2
    assert errors["none, to nearest"] > 2 * errors["none"]


def test_the_figure_has_a_mark_for_each_way_to_store(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    stream = gradients("half a decade")[:50]
    updates, weights = errors_of_updates(stream), errors_of_weights(stream)
    assert updates.keys() == STATES.keys()
    assert weights.keys() == MASTERS.keys()
    draw({"half a decade": updates}, {"half a decade": weights}, tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 10_000


def test_nearest_second_moments_freeze():
    """What the bounds are there to notice."""
    stream = gradients("half a decade")[::2]
    schemes = {
        kind: CodedAdam(stream.shape[1:], BETAS, "nearest", kind)
        for kind in ("nearest", "dithered")
    }
    found = shadow_run(stream, Adam64(stream.shape[1:]), schemes)
    assert found["nearest"].bias > 0.2
    assert found["nearest"].update > 2 * found["dithered"].update


@pytest.mark.parametrize(
    ("optimizer", "amsgrad"),
    rows(
        {
            "torch": (torch.optim.AdamW, False),
            "amp_ext": (AdamW, False),
            "amp_ext-amsgrad": (AdamW, True),
        }
    ),
)
def test_an_optimizer_with_float32_states_is_exact(optimizer, amsgrad):
    stream = gradients("half a decade")[:50]
    scheme = OptimizerScheme(optimizer, stream.shape[1:], weight_decay=0.0, amsgrad=amsgrad)
    exact = Adam64(stream.shape[1:], amsgrad=amsgrad)
    (errors,) = shadow_run(stream, exact, {"": scheme}).values()
    assert errors.update < 1e-5
    assert errors.way < 1e-5
    assert math.isclose(errors.bias, 0, abs_tol=1e-5)
